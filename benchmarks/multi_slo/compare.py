"""This package, llama.cpp and vLLM under the multi-SLO benchmark, one after another on one machine.

    python -m benchmarks.multi_slo.compare --out multi-slo [--duration 60] [--only adaserve,llama-draft,vllm-draft]

All serve the embedded target grown to 110M parameters, the peers with the embedded draft and without it. All are held
to the targets that follow from this package's baseline. Repeated, the command goes on where it ended. A peer that is
not installed is left out and named at the end. Writes a folder per server and README.md and index.html with the page.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.report import write_suite_page
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.submission import FILE
from benchmarks import program

OURS = "adaserve"
TITLE = "Multi-SLO benchmark: this package beside llama.cpp and vLLM"


@dataclass(frozen=True)
class Entry:
    """One server. module: of benchmarks.peers. options: of it, in which {target}, {draft} name checkpoint folders and
    {gguf} the folder of GGUF files."""

    name: str
    module: str
    options: tuple[str, ...]

    def command(self, places: dict[str, str], out: Path, first: Path | None, suite: Sequence[str]) -> list[str]:
        own = [option.format(**places) for option in self.options]
        targets = [] if first is None else ["--targets-of", str(first)]
        return [sys.executable, "-m", f"benchmarks.peers.{self.module}", *own, "--out", str(out / self.name),
                *targets, "--", *suite]  # fmt: skip


MODELS = ("--target", "{target}", "--draft", "{draft}")
PLAIN = ("--target", "{target}", "--no-draft")
FLOAT32 = ("--server-args", "--dtype float32")  # by itself vLLM takes bfloat16, which most CPUs emulate
GGUF = ("--target", "{gguf}/target.gguf")
ENTRIES = (
    Entry(OURS, "adaserve", (*MODELS, "--server-args", "--max-queue-wait 0")),
    Entry("llama-draft", "llama_cpp", (*GGUF, "--draft", "{gguf}/draft.gguf")),
    Entry("llama-plain", "llama_cpp", (*GGUF, "--no-draft")),
    Entry("vllm-draft", "vllm", (*MODELS, *FLOAT32)),
    Entry("vllm-plain", "vllm", (*PLAIN, *FLOAT32)),
)
NAMES = tuple(entry.name for entry in ENTRIES)


def prepare(work: Path, names: Sequence[str]) -> dict[str, str]:
    """Make the checkpoints that are not there yet, and return what `Entry.options` name."""
    target, draft = work / "grown-110M", "demo"
    _make(target, "adaserve_jax.cli", "grow", "--params", "110M")
    if any(name.startswith("llama") for name in names):
        for role, source in (("target", str(target)), ("draft", draft)):
            _make(work / f"{role}.gguf", "benchmarks.peers.to_gguf", source, "--role", role, "--out")
    return {"target": str(target), "draft": draft, "gguf": str(work)}


def _make(made: Path, *command: str) -> None:
    """Run a module that writes to its last argument, unless that is there. One that was stopped leaves only a part."""
    if made.exists():
        return
    part = made.with_name(f"part-{made.name}")
    if part.is_dir():
        shutil.rmtree(part)
    if subprocess.run([sys.executable, "-m", *command, str(part)], check=False).returncode:
        raise ConfigError(f"{' '.join(command[:2])} failed; its message is above")
    part.rename(made)


def compare(
    out: Annotated[Path, typer.Option(help="folder for checkpoints, runs and the page")],
    duration: Annotated[float, typer.Option(help="seconds in which requests of a load arrive, at least")] = 60.0,
    repeats: Annotated[int, typer.Option(help="times that each load is measured")] = 1,
    only: Annotated[str, typer.Option(help="servers, separated by commas")] = ",".join(NAMES),
) -> None:
    """Measure the servers and write the page."""
    wanted = comma_list("only", only, str)
    if set(wanted) - set(NAMES) or OURS not in wanted:
        raise ConfigError(f"--only must name {OURS} and some of {', '.join(NAMES[1:])}, got {only!r}")
    out.mkdir(parents=True, exist_ok=True)
    places = prepare(out, wanted)
    suite = ["--suite", "multi-slo", "--duration", f"{duration:g}", "--repeats", str(repeats)]
    done: list[Path] = []
    missing: list[str] = []
    for entry in (each for each in ENTRIES if each.name in wanted):
        first = done[0].parent.parent if done else None
        status = subprocess.run(entry.command(places, out, first, suite), check=False).returncode
        found = sorted((out / entry.name).glob(f"*/{FILE}"))
        if status == 0 and found:
            done.append(found[0])
        else:
            missing.append(entry.name)
            if entry.name == OURS:
                raise ConfigError("this package was not measured, so that nothing has targets; its message is above")
    for name in ("README.md", "index.html"):
        write_suite_page(done, out / name, TITLE)
    write_suite_page(done, None, TITLE)
    if missing:
        typer.echo(f"not measured, for the reasons above: {', '.join(missing)}", err=True)


if __name__ == "__main__":
    program.run(compare)
