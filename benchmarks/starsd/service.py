"""`adaserve draft` as a process of its own, and what its /metrics say it did between two moments."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

PREFIX = "adaserve_draft_service_"
READY = re.compile(r"ready: grpc://127\.0\.0\.1:(\d+) .* metrics on (\S+)")
END_S = 15.0


@dataclass(frozen=True)
class Counts:
    """Of a service since it was ready, or between two moments: seconds of its loop, those without and with a batch on
    the device and those of batches that searched; such batches, the requests in them, what these waited, and trees."""

    loop_s: float
    idle_s: float
    service_s: float
    search_s: float
    searches: float
    rounds: float
    queue_s: float
    trees: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


NAMES = ("loop_seconds", "idle_seconds", "service_seconds", "search_seconds", "searches", "rounds", "queue_seconds",
         "trees")  # fmt: skip


@dataclass(frozen=True)
class Service:
    """A running one: its process, its port, and where its metrics are."""

    pid: int
    port: int
    metrics: str

    def counts(self) -> Counts:
        """As of its latest snapshot, which is at most a batch and 0.2 s old."""
        found = self.read()
        return Counts(*(found[name] for name in NAMES))

    def read(self) -> dict[str, float]:
        """Every counter without a label, by its name without prefix and `_total`."""
        text = httpx.get(self.metrics, timeout=30).text
        return {name: float(value) for name, value in re.findall(rf"^{PREFIX}(\w+)_total (\S+)$", text, re.M)}


@contextmanager
def service(
    model: Path,
    *,
    one_by_one: bool,
    depth: int,
    max_batch: int,
    max_feed: int,
    max_context: int,
) -> Iterator[Service]:
    """Start one that drafts chains, wait until it is ready, end it with SIGTERM afterwards. Raises RuntimeError."""
    command = [
        sys.executable, "-m", "adaserve_jax.cli", "draft", "--model", str(model), "--listen", "127.0.0.1:0",
        "--http", "127.0.0.1:0", "--max-depth", str(depth), "--max-width", "1", "--max-context", str(max_context),
        "--max-batch", str(max_batch), "--max-batch-tokens", str(max_feed),
        *(["--one-by-one"] if one_by_one else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = time.monotonic()
        found = next((match for line in process.stdout if (match := READY.search(line))), None)
        if found is None:
            raise RuntimeError(f"the draft service ended after {time.monotonic() - started:.0f} s, unready")
        yield Service(process.pid, int(found[1]), found[2])
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
