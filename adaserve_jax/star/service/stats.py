"""Counters and measurements of a draft service."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from adaserve_jax.star.messages import Load

ROWS_EDGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram of rows per batch."""


@dataclass
class CoreStats:
    """Counters of a core since its start.

    batches: runs of the device. rounds: Drafts searched. trees: Trees sent, including repeated ones. fed_tokens: tokens
    fed into the KV. stale: messages and trees of an epoch or round that is over. duplicates: repeated messages.
    resyncs: sessions that had to be reopened. refused: refusals by code. expired: Drafts whose tree could not be ready
    in time. failed: Drafts whose batch failed. leases_ended: sessions freed without a Close. evicted: times that a
    session lost its KV to another. queue_s: seconds that answered Drafts waited for the device, summed.
    """

    batches: int = 0
    rounds: int = 0
    trees: int = 0
    fed_tokens: int = 0
    stale: int = 0
    duplicates: int = 0
    resyncs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    failed: int = 0
    leases_ended: int = 0
    evicted: int = 0
    queue_s: float = 0.0


@dataclass
class WorkerStats:
    """Counters of the worker's loop since its start, beside `CoreStats`.

    loop_s: seconds of the loop; service_s, idle_s: those with a batch on the device and without work; the rest is the
    loop's own work. searches, search_s: batches that searched, and their seconds. rows: such batches by the least of
    ROWS_EDGES that holds their rows; rows_searched: rows of all of them. frames: frames taken in. nonsense: invalid
    messages that concerned a "session" or a "target".
    """

    loop_s: float = 0.0
    idle_s: float = 0.0
    service_s: float = 0.0
    searches: int = 0
    search_s: float = 0.0
    rows: Counter[float] = field(default_factory=Counter)
    rows_searched: int = 0
    frames: int = 0
    nonsense: Counter[str] = field(default_factory=Counter)


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
