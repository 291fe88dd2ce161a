"""One session of a draft service: the text of one request, how much of it the draft's KV holds, what was asked.

No thread, clock or device, and no messages sent. Who is served when is dispatch.py's; what is answered is core.py's.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from adaserve_jax.star.messages import Draft, Load, Open, Tree
from adaserve_jax.star.service.limits import Allowance


class Heard(Enum):
    """What a session makes of a message."""

    TAKEN = "taken"
    """The text is as the message says; a Draft with depth waits for its tree."""
    STALE = "stale"
    """Of an epoch or round that is over."""
    DUPLICATE = "duplicate"
    """Heard before, word for word; nothing changed."""
    ANSWERED = "answered"
    """Heard before, word for word, and answered: the answer can be sent again."""
    GAP = "gap"
    """Does not follow the text; nothing changed but that the tree asked for before is not wanted any more."""
    CONFLICT = "conflict"
    """Has the number of one heard before, and says something else."""


@dataclass(frozen=True)
class Sampling:
    """How the request draws its tokens, and so with which noise its draft must search."""

    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @staticmethod
    def of(opened: Open) -> Sampling:
        return Sampling(
            int(opened.seed),
            int(opened.choice),
            float(opened.temperature),
            int(opened.top_k),
            float(opened.top_p),
            float(opened.min_p),
        )


@dataclass(frozen=True, eq=False)
class Asked:
    """A Draft that waits. Times are the core's clock. deadline_s: when its tree should be ready; give_up_s: when nobody
    waits for it any more; order: of arrival."""

    draft: Draft
    received_s: float
    deadline_s: float
    give_up_s: float
    order: int


class Target:
    """One target that said Hello. here: its stream stands. served: the turn in which it was served last."""

    def __init__(self, target_id: str, allowance: Allowance):
        self.id = target_id
        self.allowance = allowance
        self.sessions: dict[int, Session] = {}
        self.here = True
        self.served = -1


class Session:
    """One session. key: its own, never used again, also when target and number come again. computed: the draft's KV
    holds this many tokens of the text. asked: the Draft that waits for its tree. flying: a batch with it is on the
    device. closed: it has ended. feed: a message brought what the KV lacks, or asked for it, so it is worth feeding;
    wanted_s: the deadline of a Draft that ran out of time for that lag's sake. heard_s: for the lease."""

    def __init__(self, target: Target, opened: Open, key: int, now: float):
        self.target = target
        self.number = int(opened.session)
        self.key = key
        self.epoch = int(opened.epoch)
        self.sampling = Sampling.of(opened)
        self.length = len(opened.tokens)
        self._tokens = np.zeros(max(64, self.length), np.int32)
        self._tokens[: self.length] = opened.tokens
        self.computed = 0
        self.round = -1
        self.asked: Asked | None = None
        self.answered: tuple[Draft, Tree] | None = None
        self.answered_s = now
        self.flying = False
        self.closed = False
        self.feed = self.length > 0
        self.wanted_s: float | None = None
        self.heard_s = now
        self._last: Draft | None = None

    @property
    def text(self) -> np.ndarray:
        """i32[length], a view: copy what is kept."""
        return self._tokens[: self.length]

    @property
    def lag(self) -> int:
        """Tokens that the KV lacks."""
        return self.length - self.computed

    @property
    def search_from(self) -> int:
        """Where feeding begins before a search: the last token is fed at any rate, the tree grows from its logits."""
        return min(self.computed, self.length - 1)

    @property
    def urgency(self) -> tuple[float, int]:
        """Of the Draft that waits: the least goes first."""
        assert self.asked is not None
        return self.asked.deadline_s, self.asked.order

    # ---- what is heard ----

    def reopen(self, opened: Open) -> Heard:
        """Begin anew with a higher epoch; KV of the common beginning stays."""
        epoch, tokens, sampling = int(opened.epoch), opened.tokens, Sampling.of(opened)
        if epoch < self.epoch:
            return Heard.STALE
        if epoch == self.epoch:
            both = min(len(tokens), self.length)
            same = sampling == self.sampling and np.array_equal(tokens[:both], self._tokens[:both])
            return Heard.DUPLICATE if same else Heard.CONFLICT
        self.epoch, self.sampling = epoch, sampling
        self.asked = self.answered = self._last = self.wanted_s = None
        self._write(0, tokens)
        return Heard.TAKEN

    def hear(self, draft: Draft) -> Heard:
        """The text grows by a Draft, or is cut back to what it says; the caller makes it wait (`asked`)."""
        if draft.epoch < self.epoch:
            return Heard.STALE
        if draft.epoch == self.epoch and draft.round <= self.round:
            return self._hear_again(draft)
        self.asked = None
        if draft.epoch > self.epoch:
            return Heard.GAP
        base, end = int(draft.base), int(draft.base) + len(draft.tokens)
        both = min(end, self.length)
        differs = base < both and not np.array_equal(draft.tokens[: both - base], self._tokens[base:both])
        if base > self.length or differs:
            return Heard.GAP
        self.round, self._last, self.answered = int(draft.round), draft, None
        self._write(base, draft.tokens)
        return Heard.TAKEN

    def _hear_again(self, draft: Draft) -> Heard:
        if draft.round < self.round or self._last is None:
            return Heard.STALE
        if not same_draft(draft, self._last):
            return Heard.CONFLICT
        return Heard.ANSWERED if self.answered is not None else Heard.DUPLICATE

    def _write(self, base: int, tokens: np.ndarray) -> None:
        """The text is its first `base` tokens and these; `computed` falls back to where it differs."""
        end = base + len(tokens)
        same = base + _common(self._tokens[base : min(end, self.computed)], tokens)
        if end > len(self._tokens):
            grown = np.zeros(max(end, 2 * len(self._tokens)), np.int32)
            grown[: self.length] = self.text
            self._tokens = grown
        self._tokens[base:end] = tokens
        self.length = end
        self.computed = min(self.computed, end, same)
        self.feed = self.computed < end

    # ---- what is done ----

    def fed(self, start: int, tokens: np.ndarray) -> None:
        """A batch wrote these tokens' KV from position `start` on; the text may have changed meanwhile."""
        if self.computed < start:
            return  # what came before them is not of this text any more
        self.computed = start + _common(self.text[start:], tokens)
        if self.computed >= self.length:
            self.feed, self.wanted_s = False, None

    def unfed(self, start: int = 0) -> None:
        """Its KV from position `start` on is gone; it is fed anew when it speaks."""
        self.computed = min(self.computed, start)
        self.feed, self.wanted_s = False, None


def same_draft(one: Draft, other: Draft) -> bool:
    """Whether they say the same, word for word."""
    return np.array_equal(one.tokens, other.tokens) and all(
        getattr(one, name) == getattr(other, name)
        for name in ("session", "epoch", "round", "base", "depth", "width", "calibrated", "due_s", "give_up_s")
    )


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    both = min(len(one), len(other))
    if not both:
        return 0
    differs = one[:both] != other[:both]
    first = int(differs.argmax())
    return first if differs[first] else both


# What a draft service has done so far. Imports no jax.

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
