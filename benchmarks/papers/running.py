"""Runs the steps of a figure, each in its folder and each once; what has ended is not run again.

A folder holds what one command measured at one commit: that of another is put aside before the command runs again.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.jsonl import make_folder
from adaserve_jax.results.provenance import source_commit
from benchmarks.papers.data import SOURCES, find_data, make_data
from benchmarks.papers.entry import Form, Step

ROOT = Path(__file__).resolve().parents[2]
STAMP = "step.json"
"""In the folder of a step: the command and commit of the run, and its seconds once it has ended."""
MADE = "made-workloads"
INTERRUPTED = 130
PLACEHOLDER = re.compile(r"{([^{}]+)}")

Run = Callable[[Sequence[str]], int]
"""Runs a command and gives its exit code."""


class StepError(AdaServeError):
    """A command of a figure did not end well."""


def command(step: Step) -> str:
    """As a user would type it, in the root of the checkout, with the placeholders that {here} and others are."""
    return " ".join(word if PLACEHOLDER.search(word) else shlex.quote(word) for word in step.argv)


def execute(argv: Sequence[str]) -> int:
    """Run a command in the root of the checkout. An interrupt reaches the command too, which is waited for."""
    with subprocess.Popen(argv, cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


def folder_of(step: Step, out: Path) -> Path:
    return out / step.name


def run_form(form: Form, out: Path, data: Path | None, *, run: Run = execute, note: Callable[[str], None]) -> float:
    """Run what has not ended yet; returns the seconds that all steps took when they ran.

    data: a folder of workloads; None: made ones below `out`. Raises ConfigError: data is missing, or a step needs a GPU
    and there is none. StepError: a command failed.
    """
    if any(step.gpu for step in form.steps) and not _has_gpu():
        raise ConfigError("--size gpu: JAX finds no GPU here; --show prints the commands to run where there is one")
    return sum(_run_step(step, out, data, run, note) for step in form.steps)


def data_of(form: Form, data: Path | None) -> str:
    """What workload the placeholders of a form stand for."""
    needed = [name for name in SOURCES if any("{" + name + "}" in step.argv for step in form.steps)]
    if not needed:
        return ""
    return " and ".join(SOURCES[name].what if data else f"made in place of {SOURCES[name].what}" for name in needed)


def _run_step(step: Step, out: Path, data: Path | None, run: Run, note: Callable[[str], None]) -> float:
    here = folder_of(step, out)
    argv = [_filled(word, step, out, data) for word in step.argv]
    stamp = {"command": argv, "commit": source_commit()}
    held = _held(here)
    same = {name: held.get(name) for name in stamp} == stamp
    if same and "seconds" in held:
        note(f"{step.name}: has ended in {here}")
        return held["seconds"]
    if here.is_dir() and not same:
        note(f"{step.name}: what another command or commit left is now in {_put_aside(here)}")
    elif here.is_dir() and step.anew:
        shutil.rmtree(here)
    make_folder(here)
    _write(here, stamp)
    note(f"{step.name}: about {step.minutes:g} min: {shlex.join(argv)}")
    started = time.monotonic()
    code = run(_real(argv))
    if code:
        raise StepError(f"{step.name} failed with exit code {code}: {shlex.join(argv)}; run the figure again to go on")
    stamp["seconds"] = ended_s = time.monotonic() - started
    _write(here, stamp)
    return ended_s


def _filled(word: str, step: Step, out: Path, data: Path | None) -> str:
    return PLACEHOLDER.sub(lambda found: str(_place(found[1], step, out, data)), word)


def _place(name: str, step: Step, out: Path, data: Path | None) -> Path:
    if name == "here":
        return folder_of(step, out)
    if name not in SOURCES:
        return out / name
    if data is None:
        make_data(name, out / MADE)
    return find_data(name, data or out / MADE)


def _real(argv: Sequence[str]) -> list[str]:
    """With the interpreter that runs this."""
    programs = {"python": [sys.executable], "adaserve": [sys.executable, "-m", "adaserve_jax.cli"]}
    return [*programs[argv[0]], *argv[1:]]


def _held(here: Path) -> dict:
    try:
        return json.loads((here / STAMP).read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def _write(here: Path, stamp: dict) -> None:
    (here / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")


def _put_aside(here: Path) -> Path:
    """Rename a folder to the first free name; returns it."""
    aside = next(path for number in count(1) if not (path := here.with_name(f"{here.name}.old{number}")).exists())
    return here.rename(aside)


def _has_gpu() -> bool:
    """Asked in a process of its own, so that the device stays free for the steps."""
    code = "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
