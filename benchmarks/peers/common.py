"""What the scripts of peers share: start a server, wait until it is ready, measure it by its URL, end it.

Knows no peer. The same client, workload, targets and seeds measure every one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from adaserve_jax.bench.multi_slo import held_definition
from adaserve_jax.errors import AdaServeError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.results.jsonl import read_good_rows
from adaserve_jax.results.run_folder import RESULTS
from adaserve_jax.results.schema import ResultRow
from benchmarks.server.http_load import HOST, free_port

SERVER, LOG = "server.json", "server.log"
"""Files beside the rows: how the server was started, and what it printed."""
READY_LIMIT_S, END_LIMIT_S, POLL_S = 900.0, 30.0, 0.2
SHOWN_LOG_LINES = 20
SET_HERE = ("--url", "--system", "--model", "--policies", "--out", "--resume", "--append", "--extra-body")
"""Options of `adaserve bench` that these scripts give."""


@dataclass(frozen=True)
class Peer:
    """A server to measure. command: starts it, but for `--port N`. ready: a path that answers 200 once it serves.
    policy: what its rows are called. model: None: the first that it lists. extra_body: more fields of each request.
    environment: beside this process's own."""

    system: str
    command: tuple[str, ...]
    ready: str
    policy: str
    version: str = ""
    model: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def stop(message: str) -> SystemExit:
    """Print an error, and return the exception to raise, which ends the program with status 2."""
    print(f"error: {message}", file=sys.stderr)
    return SystemExit(2)


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a script and exit with the status of `main`. SIGTERM ends the server too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    raise SystemExit(main(sys.argv[1:]))


def parser(description: str | None, *, target: str | None = None, draft: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that every peer has. target, draft: defaults of --target and --draft, which must
    be given where there is none."""
    made = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        epilog="What follows -- goes to `adaserve bench`: the same for every system that is compared.",
    )
    made.add_argument("--target", default=target, required=target is None, help="model that answers")
    drafts = made.add_mutually_exclusive_group(required=draft is None)
    drafts.add_argument("--draft", default=draft, help="model that drafts")
    drafts.add_argument("--no-draft", action="store_true", help="decode without a draft")
    made.add_argument("--draft-tokens", type=int, default=4, help="tokens drafted at once, at most (4)")
    made.add_argument("--max-requests", type=int, default=16, help="most requests that run together (16)")
    made.add_argument("--max-context", type=int, default=2048, help="most tokens of a request (2048)")
    made.add_argument(
        "--prefix-cache", action="store_true", help="let requests share prompts' KV; off, as points repeat"
    )
    made.add_argument("--server-args", default="", help="further options of the server, in one string")
    made.add_argument("--targets-of", type=Path, help="folder of a run whose baseline relative targets are to multiply")
    made.add_argument("--out", type=Path, required=True, help="folder for the rows; repeated, the run goes on there")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return options of the script, and those of `adaserve bench` after --. Exits with status 2 when one is wrong."""
    own, bench = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, bench = own[:at], own[at + 1 :]
    options = made.parse_args(own)
    taken = [text for text in bench if text.partition("=")[0] in SET_HERE]
    if taken:
        made.error(f"{taken[0]} of `adaserve bench` is given by this script; leave it out")
    for name in ("draft_tokens", "max_requests", "max_context"):
        if getattr(options, name) < 1:
            made.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.targets_of is not None:
        bench += ["--baseline-ms", repr(baseline_ms(options.targets_of))]
    return options, bench


def drafted(options: argparse.Namespace) -> bool:
    return not options.no_draft


def policy_name(options: argparse.Namespace) -> str:
    """Return the name of the way in which a peer decodes, for its rows."""
    return f"draft:{options.draft_tokens}" if drafted(options) else "plain"


def baseline_ms(folder: Path) -> float:
    """Return the ms per token that the relative targets of a measured run multiply. Raises SystemExit: it has none."""
    try:
        held = held_definition(folder, resume=True)
        if held is not None:
            return float(held["baseline_ms"])
        rows, _ = read_good_rows(folder / RESULTS, ResultRow)
    except (OSError, AdaServeError) as error:
        raise stop(f"--targets-of must be the folder of a measured run: {error}") from None
    if not rows:
        raise stop(f"--targets-of must be the folder of a measured run; {folder / RESULTS} has no row yet")
    return 1e3 * rows[0].baseline_s


def program(name: str, how: str) -> str:
    """Return the path of an installed program, beside this Python or on PATH. Raises SystemExit, with `how`, the
    command that installs it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise stop(f"{name} is not installed, or not on PATH; install it with: {how}")
    return found


def output(*command: str) -> str:
    """Return what a program prints, such as its help or its version, errors too."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return done.stdout


def checkpoint(name_or_path: str, role: str) -> str:
    """Return the folder of a checkpoint, where `demo` is the embedded pair's; what is no folder is left as it is: the
    name of a repository."""
    if name_or_path != "demo" and not Path(name_or_path).expanduser().is_dir():
        return name_or_path
    return str(resolve_folder(name_or_path, role))  # pyright: ignore[reportArgumentType]


def bench_command(peer: Peer, url: str, out: Path, bench: Sequence[str]) -> list[str]:
    """Return the command of `adaserve bench` on a server that runs. It goes on in `out`, or begins there."""
    command = [sys.executable, "-m", "adaserve_jax.cli", "bench", "--url", url, "--system", peer.system]
    command += ["--policies", peer.policy, "--out", str(out), "--resume"]
    if peer.model is not None:
        command += ["--model", peer.model]
    if peer.extra_body:
        command += ["--extra-body", json.dumps(peer.extra_body)]
    return [*command, *bench]


def measure(peer: Peer, out: Path, bench: Sequence[str]) -> int:
    """Start the peer, measure it, end it. Returns the status of `adaserve bench`; raises SystemExit where the server
    does not start. A run that is gone on with has the port, and so the URL, that it had."""
    port = port_for(out)
    command = [*peer.command, "--port", str(port)]
    out.mkdir(parents=True, exist_ok=True)
    held = {"system": peer.system, "version": peer.version, "command": command, "port": port}
    (out / SERVER).write_text(json.dumps(held, indent=1) + "\n")
    with running(command, out / LOG, os.environ | peer.environment) as server:
        print(f"{peer.system}: starting, its output is in {out / LOG}", file=sys.stderr)
        wait_ready(server, f"http://{HOST}:{port}{peer.ready}", out / LOG)
        status = subprocess.run(bench_command(peer, f"http://{HOST}:{port}", out, bench), check=False).returncode
    if (out / RESULTS).exists():  # a suite prints its own way on
        print(f"to compare: adaserve report {shlex.quote(str(out))} OTHER... -o report.html", file=sys.stderr)
    return status


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and end it with whatever it starts: politely first. environment: None: this process's own."""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment,
        )  # fmt: skip
    try:
        yield process
    finally:
        _signal_all(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
        _signal_all(process, signal.SIGKILL)
        process.wait()


def wait_ready(server: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = READY_LIMIT_S) -> None:
    """Wait until the server answers. Raises SystemExit, with the end of the log, when it ends or takes too long."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if server.poll() is not None:
            raise stop(f"the server ended with status {server.returncode} before it was ready\n{_tail(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(POLL_S)
    raise stop(f"the server was not ready after {limit_s:g} s: {url}\n{_tail(log)}")


def port_for(out: Path) -> int:
    """Return the port of the run that is in `out`, or a free one if there is none. Raises SystemExit: it is taken."""
    try:
        port = int(json.loads((out / SERVER).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return free_port()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            raise stop(f"the run in {out} had port {port}, which is taken; free it, or give another --out") from None
    return port


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process and those that it started, which share its session's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])
