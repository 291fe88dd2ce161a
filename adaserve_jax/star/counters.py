"""What a draft service has done so far. Imports no jax."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from adaserve_jax.star.messages import Load

ROWS_EDGES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class CoreStats:
    """Counters since the start. batches: runs of the device; rounds: Drafts searched; trees: Trees answered, with those
    sent again; fed_tokens: into KV; stale: messages and trees of another epoch or round; duplicates: messages heard
    before; resyncs: sessions that had to be opened anew; refused: by code; expired: Drafts whose tree could not be
    ready in time; failed: Drafts whose batch failed; leases_ended: sessions, with those that went for others' sake;
    evicted: times that a session's KV went for another's; queue_s: seconds that answered Drafts waited for the device,
    summed."""

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
    """What the loop saw since it began, beside `CoreStats`. loop_s: seconds that it runs; idle_s, service_s: those of
    them without and with a batch on the device, the rest is its own work; searches, search_s: batches that searched,
    and their seconds; rows: batches that searched by the least of ROWS_EDGES that holds their rows; rows_searched: of
    all of them; frames: taken in; nonsense: messages that made no sense, by whose they were (session, target)."""

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
class Snapshot:
    """Of a running service, as it was between two batches."""

    load: Load
    core: CoreStats
    worker: WorkerStats
    waiting: int
    holding: int


class BusyMeter:
    """Which share of the last `window_s` seconds the device worked."""

    def __init__(self, window_s: float, now: float) -> None:
        self._window_s, self._since = window_s, now
        self._batches: deque[tuple[float, float]] = deque()
        self._sum_s = 0.0

    def add(self, started_s: float, ended_s: float) -> None:
        self._batches.append((ended_s, ended_s - started_s))
        self._sum_s += ended_s - started_s

    def share(self, now: float) -> float:
        """In [0, 1]."""
        while self._batches and self._batches[0][0] <= now - self._window_s:
            self._sum_s -= self._batches.popleft()[1]
        watched_s = min(self._window_s, now - self._since)
        return min(1.0, max(0.0, self._sum_s) / watched_s) if watched_s > 0 else 0.0
