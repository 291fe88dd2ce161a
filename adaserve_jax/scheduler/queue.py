"""The waiting queue: the order of admission, and the bound on how long a sequence can wait.

Preempted sequences come first, then waiting ones by `order_key`. The key of a sequence never changes. It is its due
time plus AGEING_S seconds per step of priority, so a later arrival can overtake it only within a bounded time. Under
the orderings of RELEGATING a sequence that can hardly meet its targets any more goes behind the others, and every
PROMOTION_PERIOD-th admission takes the sequence that has waited longest, which bounds that wait too. Under `priority`
ordering, a baseline, priorities are strict and preempted sequences have no precedence: a sequence may wait for as long
as better ones arrive.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Literal

from adaserve_jax.scheduler.fairness import TenantShares
from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import Sequence

Ordering = Literal["deadline", "hybrid", "goodput", "arrival", "priority"]

RELEGATING: tuple[Ordering, ...] = ("deadline", "hybrid", "goodput")
"""Orderings that send a sequence behind the others once its TTFT target can hardly be met."""

AGEING_S = 30.0
"""Seconds of waiting that outweigh one step of priority."""
STRICT_S = 1e9
"""Seconds per step of priority under `priority` ordering: no wait outweighs one."""
PATIENCE_S = 10.0
"""TTFT target, in seconds, assumed of a sequence without one, and upper bound of the target used in the order."""
MAX_PRIORITY = 100
"""Bound of priorities in the order, either way."""
PROMOTION_PERIOD = 128
"""Admissions of which one takes the sequence that has waited longest."""
PROMPT_TOKEN_S = 0.008
"""alpha of `hybrid` ordering: seconds by which a token of the prompt puts a sequence back. Source: Niyama's 8 ms."""
OUTPUT_WEIGHT = 8.0
"""Weight of an output token beside a prompt token in the goodput of `goodput` ordering. Source: JITServe's code."""
LATE_PROMPTS = 6.0
"""Times that its prompt takes alone within which a waiting sequence counts as late: the prompt still has to be
computed, beside others. It gives up long prompts first, which cost the most.
"""
LEAST_LATE_SHARE = 0.5
"""Share of its `patience_s` within which no sequence counts as late."""


def order_key(
    sequence: Sequence, ordering: Ordering, patience_s: float | None, output_tokens: float = 1.0
) -> float:  # fmt: skip
    """Return the key of admission, seconds on the engine's clock; the lower key is served sooner.

    `hybrid` puts a due time back by the work on the prompt: between the earliest deadline and the shortest prompt
    first. `goodput` prefers sequences that earn more per step: output_tokens, a bound on its length, is also the number
    of its steps. The share of steps that earn nothing but output is turned into at most PATIENCE_S seconds of waiting.
    patience_s: seconds from arrival within which the first token must come; None: PATIENCE_S.
    """
    if ordering == "deadline":
        return deadline_key_s(sequence.arrival_s, sequence.priority, patience_s)
    if ordering == "hybrid":
        prompt_s = PROMPT_TOKEN_S * len(sequence.prompt_ids)
        return deadline_key_s(sequence.arrival_s, sequence.priority, patience_s) + prompt_s
    if ordering == "goodput":
        output = OUTPUT_WEIGHT * output_tokens
        steps_share = output / (len(sequence.prompt_ids) + output)
        return sequence.arrival_s + AGEING_S * bounded_priority(sequence.priority) + PATIENCE_S * steps_share
    return sequence.arrival_s + (STRICT_S if ordering == "priority" else AGEING_S) * bounded_priority(sequence.priority)


def deadline_key_s(arrival_s: float, priority: int, patience_s: float | None) -> float:
    """Return the key of admission under `deadline` ordering. patience_s: as of `order_key`."""
    patience_s = PATIENCE_S if patience_s is None else min(patience_s, PATIENCE_S)
    return arrival_s + AGEING_S * bounded_priority(priority) + patience_s


def wait_ratio(state: SequenceState, now: float) -> float:
    """Return the waiting time for the first token over what the targets allow (PATIENCE_S without one)."""
    patience_s = PATIENCE_S if state.patience_s is None else state.patience_s
    return max(0.0, now - state.sequence.arrival_s) / patience_s


def bounded_priority(priority: int) -> int:
    """Return a priority as the orderings take it."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def _rank(state: SequenceState) -> tuple[float, int]:
    return state.rank


def _is_bounded(state: SequenceState) -> bool:
    """Return whether a sequence's targets bound its wait."""
    return state.patience_s is not None


class _Lines:
    """New sequences that wait, by rank, in one line for each flow."""

    def __init__(self, shares: TenantShares | None):
        self._shares = shares
        self._of: dict[int, list[SequenceState]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._of.values())

    def __contains__(self, state: SequenceState) -> bool:
        line = self._of.get(state.flow, [])
        index = bisect_left(line, state.rank, key=_rank)
        return index < len(line) and line[index] is state

    def add(self, state: SequenceState) -> None:
        insort(self._of.setdefault(state.flow, []), state, key=_rank)

    def remove(self, state: SequenceState) -> None:
        line = self._of[state.flow]
        del line[bisect_left(line, state.rank, key=_rank)]
        if not line:
            del self._of[state.flow]

    def first(self, eligible: Callable[[SequenceState], bool] | None = None) -> SequenceState | None:
        """Return the sequence to serve first, of all or of the eligible ones; None without any."""
        if eligible is None:
            heads = self.heads()
        else:
            firsts = (next(filter(eligible, line), None) for line in self._of.values())
            heads = [head for head in firsts if head is not None]
        if self._shares is None:
            return heads[0] if heads else None
        return self._shares.next_of(heads)

    def by_rank(self) -> Iterator[SequenceState]:
        """Yield all sequences by rank, whatever their flow."""
        return merge(*self._of.values(), key=_rank)

    def heads(self) -> list[SequenceState]:
        """Return the first sequence of each line."""
        return [line[0] for line in self._of.values()]


class WaitingQueue:
    """Sequences that hold no slot: new ones and preempted ones."""

    def __init__(self, ordering: Ordering, shares: TenantShares | None = None):
        """Set up an empty queue. shares: order the new sequences by the shares of their tenants too."""
        self._ordering: Ordering = ordering
        self._shares = shares
        self._preempted: list[SequenceState] = []
        self._on_time, self._late = _Lines(shares), _Lines(shares)
        self.admissions = 0
        """Sequences that were taken for the first time."""
        self._untargeted = self._demanding = 0

    def __len__(self) -> int:
        return len(self._preempted) + self.num_new

    @property
    def num_new(self) -> int:
        """Number of waiting sequences that never ran."""
        return len(self._on_time) + len(self._late)

    def add(self, state: SequenceState) -> None:
        """Queue a new sequence."""
        self._on_time.add(state)
        self._count(state, 1)

    def put_back(self, state: SequenceState) -> None:
        """Return a preempted sequence to the front."""
        insort(self._preempted, state, key=_rank)
        self._count(state, 1)

    def peek(self, now: float) -> SequenceState | None:
        """Return the sequence to admit next without removing it; None if the queue is empty."""
        if self._ordering == "priority":
            firsts = [*self._preempted[:1], *filter(None, [self._on_time.first()])]
            return min(firsts, key=_rank, default=None)
        if self._preempted:
            return self._preempted[0]
        if self._ordering in RELEGATING:
            self._demote_late(now)
            if self.promotes_oldest and self.num_new:
                return min((*self._on_time, *self._late), key=lambda state: (state.sequence.arrival_s, state.number))
        return self._on_time.first() or self._late.first()

    def instead_of(self, refused: SequenceState, now: float) -> Iterator[SequenceState]:
        """Yield the new sequences that may go when the one from `peek` may not start.

        They are the first one whose targets bound its wait, if those of `refused` do not, the first one that is not
        demanding, if `refused` is, and the first one without a TPOT target.
        """
        if refused.patience_s is None:
            # `peek` puts late heads of lines behind the others, and those behind `refused` are no heads
            while (state := self._on_time.first(_is_bounded)) is not None and self._is_late(state, now):
                self._demote(state)
            yield from self._first(_is_bounded)
        if refused.is_demanding and self._demanding < len(self):
            yield from self._first(lambda state: not state.is_demanding)
        if self._untargeted:
            yield from self._first(lambda state: state.is_untargeted)

    def _first(self, eligible: Callable[[SequenceState], bool]) -> Iterator[SequenceState]:
        """Yield the first eligible new sequence, if there is one."""
        state = self._on_time.first(eligible) or self._late.first(eligible)
        if state is not None:
            yield state

    def is_late(self, state: SequenceState) -> bool:
        """Return whether a `peek` put a waiting sequence behind the others, since its first token will hardly come in
        time."""
        return state in self._late

    @property
    def promotes_oldest(self) -> bool:
        """True if the next admission goes to the sequence that has waited longest."""
        return self._ordering in RELEGATING and self.admissions % PROMOTION_PERIOD == PROMOTION_PERIOD - 1

    def take(self, state: SequenceState, now: float) -> None:
        """Remove a sequence that starts and, unless it was preempted, count an admission."""
        is_new = not state.preemptions
        self.remove(state)
        self.admissions += is_new
        if is_new and self._shares is not None:
            self._shares.start(state, now)

    def remove(self, state: SequenceState) -> None:
        """Remove a waiting sequence. Raises ValueError if it does not wait."""
        for line in (self._on_time, self._late):
            if state in line:
                line.remove(state)
                break
        else:
            index = bisect_left(self._preempted, state.rank, key=_rank)
            if self._preempted[index : index + 1] != [state]:
                raise ValueError(f"request {state.sequence.sequence_id!r} does not wait")
            del self._preempted[index]
        self._count(state, -1)

    def _count(self, state: SequenceState, change: int) -> None:
        """Keep the counts that let `instead_of` skip searches that would find nothing."""
        self._untargeted += change * state.is_untargeted
        self._demanding += change * state.is_demanding

    def first_on_time(self, most: int) -> list[SequenceState]:
        """Return up to `most` new sequences that are on time, by rank."""
        return list(islice(self._on_time.by_rank(), most))

    def most_urgent_wait(self, now: float) -> float:
        """Return the wait ratio of the first sequence that is on time; 0 if there is none."""
        first = self._on_time.first()
        return 0.0 if first is None else wait_ratio(first, now)

    def _demote_late(self, now: float) -> None:
        while late := [head for head in self._on_time.heads() if self._is_late(head, now)]:
            for state in late:
                self._demote(state)

    def _demote(self, state: SequenceState) -> None:
        self._on_time.remove(state)
        self._late.add(state)

    def _is_late(self, state: SequenceState, now: float) -> bool:
        """Return whether a waiting sequence will hardly have its first token in time, where that counts."""
        if state.patience_s is None or self._ordering not in RELEGATING:
            return False
        late_s = max(state.patience_s - LATE_PROMPTS * state.prompt_s, LEAST_LATE_SHARE * state.patience_s)
        return now > state.sequence.arrival_s + late_s
