"""How long is a server without its engine after a crash, and how long does a start take with and without its programs?

    python -m benchmarks.server.restart --out restart.json

A server on the embedded pair starts with an empty compile cache, and again with the cache that the first start filled.
Then its engine process is killed. Seconds are until `/ready` answers 200. CPU seconds are those of the engine's process
until then, compiling included.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.engine.cpu_time import cpu_s
from benchmarks.server.http_load import Served, children, command_line, get, served, wait_ready

AIMS_S = {"first start": 60.0, "second start": 12.0, "after a crash": 12.0}
"""Most seconds until the server is ready."""
RESTART_LIMIT_S = 120.0


def restart(server: Served) -> tuple[float, float]:
    """Kill the engine; return seconds until the server is ready again, and CPU seconds of the new engine."""
    killed, began = server.engine_pid, time.monotonic()
    os.kill(killed, signal.SIGKILL)
    while time.monotonic() < began + RESTART_LIMIT_S:
        with contextlib.suppress(OSError):
            if killed not in children(server.process.pid) and get(server.port, "/ready").status != 200:
                break
        time.sleep(0.01)
    wait_ready(server.process, server.port)
    return time.monotonic() - began, cpu_s(server.engine_pid)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
) -> None:
    """Measure the starts and write what was found."""
    commit, rows = source_commit(), []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "adaserve_jax.cli", "serve", "--compile-cache", folder, "--port"]
        for name in ("first start", "second start"):
            with served(command) as server:
                rows.append({"start": name, "ready_s": server.start_s, "cpu_s": cpu_s(server.engine_pid)})
                if name == "second start":
                    ready_s, engine_cpu_s = restart(server)
                    rows.append({"start": "after a crash", "ready_s": ready_s, "cpu_s": engine_cpu_s})
    report = {
        "commit": commit, "machine": machine_name(), "command": command_line(out),
        "aims_s": AIMS_S, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("start", "ready after, s", "CPU, s")
    for row in rows:
        table.add_row(row["start"], f"{row['ready_s']:.1f}", f"{row['cpu_s']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
