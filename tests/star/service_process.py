"""`adaserve draft` as a process that tests start, kill and start again at the same address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from tests.conftest import ROOT

SMALL = (
    "--max-sessions", "16", "--max-batch", "2", "--max-batch-tokens", "8", "--max-context", "128", "--page-size", "16",
    "--max-depth", "3", "--max-width", "1", "--lease-s", "1", "--http", "127.0.0.1:0",
)  # fmt: skip
MAIN = "import sys; sys.modules['torch'] = None; from adaserve_jax.cli import main; main()"
"""`adaserve`, as where torch is not installed: transformers would spend seconds on it."""
_READY = re.compile(r"ready: grpc://127\.0\.0\.1:(\d+) drafts .* metrics on (\S+/metrics)\n")


class ServiceProcess:
    """Begins to start at once; `wait` until it is ready. model: its draft; address: the same for all its lives."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)
        self._process = self._start(0)
        self.address = ("127.0.0.1", 0)
        self._metrics = ""

    def wait(self) -> None:
        """Until it says that it is ready."""
        said = _out(self._process).readline()
        found = _READY.fullmatch(said)
        assert found is not None, said or f"it ended with {self._process.wait()}"
        self.address, self._metrics = ("127.0.0.1", int(found[1])), found[2]

    def kill(self) -> None:
        """As a crash does: without a word. Safe from any thread, and twice."""
        self._process.send_signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Its connections stand, and nothing is said, until it thaws."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        """At the address that it had, once it is dead."""
        self._reap()
        self._process = self._start(self.address[1])

    def number(self, metric: str) -> float:
        """What /metrics says of it; no older than SNAPSHOT_EVERY_S of the service."""
        with urlopen(self._metrics) as said:
            found = re.search(rf"^adaserve_draft_service_{metric} (\S+)$", said.read().decode(), re.MULTILINE)
        assert found is not None, metric
        return float(found[1])

    def close(self) -> None:
        self.kill()
        self._reap()

    def _start(self, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, "draft", "--listen", f"127.0.0.1:{port}", "--model", self._model, *SMALL]
        quiet = os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, text=True)

    def _reap(self) -> None:
        self._process.wait()
        _out(self._process).close()


def _out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout
