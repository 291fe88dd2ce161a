"""Counters and measurements of a draft service; counters declare the Prometheus metric that exports them."""

# ruff: noqa: RUF009  # counter() returns dataclass fields

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from adaserve_jax.star.messages import Load
from adaserve_jax.stats import counter

ROWS_EDGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram of rows per batch."""


@dataclass
class CoreStats:
    """Counters of a core since its start. batches: runs of the device."""

    batches: int = 0
    rounds: int = counter("rounds", "Drafts searched.")
    trees: int = counter("trees", "Trees sent, including repeated ones.")
    queue_s: float = counter("queue_seconds", "Waiting for the device, summed over answered Drafts.", default=0.0)
    fed_tokens: int = counter("fed_tokens", "Tokens fed into the draft's KV.")
    stale: int = counter("stale", "Messages and trees of an epoch or round that is over.")
    duplicates: int = counter("duplicates", "Repeated messages.")
    resyncs: int = counter("resyncs", "Sessions that had to be reopened.")
    expired: int = counter("expired", "Drafts whose tree could not be ready before the target gave up.")
    failed: int = counter("failed", "Drafts whose batch failed on the device.")
    leases_ended: int = counter("leases_ended", "Sessions freed without a Close.")
    evicted: int = counter("evicted", "Times that a session lost its KV to another.")
    refused: Counter[str] = counter("refused", "Targets and sessions refused, by code.", "code", default=Counter)


@dataclass
class WorkerStats:
    """Counters of the worker's loop since its start, beside `CoreStats`.

    rows: batches that searched by the least of ROWS_EDGES that holds their rows; rows_searched: rows of all of them.
    """

    loop_s: float = counter("loop_seconds", "Running time of the loop; service and idle are parts of it.", default=0.0)
    idle_s: float = counter("idle_seconds", "The device had nothing to do.", default=0.0)
    service_s: float = counter("service_seconds", "The device worked.", default=0.0)
    searches: int = counter("searches", "Batches that searched.")
    search_s: float = counter("search_seconds", "Batches that searched, their catch-up included.", default=0.0)
    rows: Counter[float] = field(default_factory=Counter)
    rows_searched: int = 0
    frames: int = counter("frames", "Frames of targets.")
    nonsense: Counter[str] = counter(
        "nonsense", "Invalid messages, of a session or of a target.", "of", default=Counter
    )


@dataclass(frozen=True)
class ServiceSnapshot:
    """State of a running service between two batches. waiting: Drafts without a batch; holding: sessions with KV."""

    load: Load
    core: CoreStats
    worker: WorkerStats
    waiting: int
    holding: int


class BusyMeter:
    """Share of the last `window_s` seconds in which the device worked."""

    def __init__(self, window_s: float, now: float) -> None:
        self._window_s, self._since = window_s, now
        self._batches: deque[tuple[float, float]] = deque()
        self._sum_s = 0.0

    def add(self, started_s: float, ended_s: float) -> None:
        self._batches.append((ended_s, ended_s - started_s))
        self._sum_s += ended_s - started_s

    def share(self, now: float) -> float:
        """Return the share, in [0, 1]."""
        while self._batches and self._batches[0][0] <= now - self._window_s:
            self._sum_s -= self._batches.popleft()[1]
        watched_s = min(self._window_s, now - self._since)
        return min(1.0, max(0.0, self._sum_s) / watched_s) if watched_s > 0 else 0.0
