"""From the records of one draft to a version of it that serves, piece by piece. Knows no requests, executor or clock.

A version is on probation until held-out records that came after it have been asked too. Meanwhile the trainer remembers
the version before as the good one, and takes it back when acceptance fell.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from zlib import crc32

import numpy as np

from adaserve_jax.distill.records import Batch, Record, pack
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.errors import IntegrityError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params

# Whether new weights may serve: held-out records, with the old weights beside the new ones. Knows no trainer.
#
# One client must not decide that. So the clients are compared one by one: acceptance over all of them together
# must not fall, and neither must that of the client in the middle, whatever others gain.


class Sums(Protocol):
    """Over the rows of a batch: of sum min(p, q), and how many rows they are."""

    @property
    def overlap_sum(self) -> float: ...

    @property
    def weight(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Part:
    """Held-out records of one client, or of several where there are many, packed. weight: their share of all."""

    weight: float
    batches: list[Batch]


def parts_of(records: Sequence[Record], num_tokens: int, most_batches: int, rng: np.random.Generator) -> list[Part]:
    """Held-out records by client, the first of each as far as they fit; about `most_batches` batches of num_tokens in
    all, at least one for each part."""
    tenants = {record.tenant for record in records}
    together = len(tenants) > most_batches
    grouped: dict[str | int, list[Record]] = {}
    for record in records:
        key = crc32(record.tenant.encode(errors="surrogatepass")) % most_batches if together else record.tenant
        grouped.setdefault(key, []).append(record)
    parts = []
    for group in grouped.values():
        batches = max(1, most_batches // len(grouped))
        ends = np.cumsum([min(int(record.position[-1]) + 1, num_tokens) for record in group])
        some = group[: 1 + int(np.searchsorted(ends, batches * num_tokens))]
        parts.append(Part(len(group) / len(records), pack(some, num_tokens, rng)[:batches]))
    return parts


@dataclass(frozen=True)
class Verdict:
    """good: whether the new weights may serve. acceptance, before: mean sum min(p, q), of the new and the old ones."""

    good: bool
    acceptance: float
    before: float


def judge(
    weights: Sequence[float], new: Sequence[Sequence[Sums]], old: Sequence[Sequence[Sums]], tolerance: float
) -> Verdict:
    """By part, the sums of its batches under the new and the old weights. Not good: acceptance fell by more than the
    tolerance, over all or for the part in the middle (the lower one of two), or is no number."""
    acceptance, before = (np.array([_mean(sums) for sums in parts]) for parts in (new, old))
    share = np.asarray(weights) / np.sum(weights)
    change = acceptance - before
    means = float(share @ acceptance), float(share @ before)
    if not np.isfinite(change).all():
        return Verdict(False, *means)
    order = np.argsort(change, kind="stable")
    middle = order[int(np.searchsorted(np.cumsum(share[order]), 0.5 - 1e-9))]
    return Verdict(bool(min(means[0] - means[1], change[middle]) >= -tolerance), *means)


def _mean(sums: Sequence[Sums]) -> float:
    rows = sum(each.weight for each in sums)
    return sum(each.overlap_sum for each in sums) / rows if rows else math.nan


# The finished texts that one draft learns from and is checked on: bounded, oldest out, no client in charge of
# it.
#
# Imports no jax. Nothing here reaches a disk: `record_file.py` writes records where that was asked for.

LEAST_HELD_OUT = 8
"""Held-out records that are room for whatever the share, and that a client may have whatever the others have: fewer
say nothing about a draft."""


class Ring:
    """At most `capacity` records. A tenant that has its share, `tenant_share` of the capacity, gets no more while
    others have any: its own oldest goes instead. Otherwise the oldest goes when there is no room, first that of the
    tenant furthest above its share."""

    def __init__(self, capacity: int, tenant_share: float):
        self.capacity = capacity
        self.limit = max(1, int(tenant_share * capacity))
        self._of: dict[str, deque[tuple[int, Record]]] = {}
        self._len = 0
        self._added = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Record]:
        """Oldest first."""
        kept = sorted((entry for entries in self._of.values() for entry in entries), key=lambda entry: entry[0])
        return (record for _, record in kept)

    def add(self, record: Record) -> None:
        """Take it in; what has to go for it goes."""
        self._make_room(record.tenant)
        self._of.setdefault(record.tenant, deque()).append((self._added, record))
        self._added += 1
        self._len += 1

    def counts(self) -> dict[str, int]:
        """Records by tenant."""
        return {tenant: len(entries) for tenant, entries in self._of.items()}

    def _make_room(self, tenant: str) -> None:
        own = len(self._of.get(tenant, ()))
        if own >= self.limit and self._len > own:
            self._evict(tenant)
        elif self._len == self.capacity:
            largest = max(self._of, key=lambda name: len(self._of[name]))
            is_above = largest != tenant and len(self._of[largest]) > self.limit
            self._evict(largest if is_above else min(self._of, key=lambda name: self._of[name][0][0]))

    def _evict(self, tenant: str) -> None:
        self._of[tenant].popleft()
        if not self._of[tenant]:
            del self._of[tenant]
        self._len -= 1

    def check_integrity(self) -> None:
        """Raise IntegrityError unless counts hold, each tenant has its own records, and they lie in order."""
        if self._len != sum(map(len, self._of.values())) or self._len > self.capacity:
            raise IntegrityError(f"a ring of {self.capacity} counts {self._len} records, which is not what it holds")
        for tenant, entries in self._of.items():
            order = [number for number, _ in entries]
            if not order or order != sorted(order) or any(record.tenant != tenant for _, record in entries):
                raise IntegrityError(f"records of {tenant!r} are out of order, or another's")


class Buffer:
    """Records of one draft, in two rings: those to train on, and those held out.

    capacity: records to train on. held_out_share: of the capacity, the size of the other ring (LEAST_HELD_OUT at
    least). tenant_share: most of either ring that is one client's while others have any.
    """

    def __init__(self, capacity: int, held_out_share: float, tenant_share: float):
        self._share = tenant_share
        self._train = Ring(capacity, tenant_share)
        self._held_out = Ring(max(LEAST_HELD_OUT, int(held_out_share * capacity)), tenant_share)

    def __len__(self) -> int:
        """Records, held-out ones with them."""
        return len(self._train) + len(self._held_out)

    def __iter__(self) -> Iterator[Record]:
        """Records to train on, then held-out ones, each oldest first."""
        yield from self._train
        yield from self._held_out

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def add(self, record: Record) -> None:
        """Take in a finished text."""
        (self._held_out if record.held_out else self._train).add(record)

    def extend(self, records: Iterable[Record]) -> None:
        for record in records:
            self.add(record)

    def sample(self, rng: np.random.Generator, num_records: int) -> list[Record]:
        """Draw records to train on, each at most once and none that is held out; fewer when there are fewer. No tenant
        has more than its share of what was asked for unless the others have no more."""
        records = list(self._train)
        limit = max(1, int(self._share * num_records))
        taken: dict[str, int] = {}
        drawn: list[Record] = []
        above: list[Record] = []
        for index in rng.permutation(len(records)).tolist():
            record = records[index]
            count = taken[record.tenant] = taken.get(record.tenant, 0) + 1
            (drawn if count <= limit else above).append(record)
            if len(drawn) == num_records:
                break
        return (drawn + above)[:num_records]

    def held_out(self) -> list[Record]:
        """What a draft is checked on, oldest first: of each tenant the latest, so many that no tenant has more than its
        share of them, or more than LEAST_HELD_OUT, as soon as there are two tenants."""
        left = self._held_out.counts()
        most = fair_most(list(left.values()), self._share)
        chosen = []
        for record in self._held_out:
            if left[record.tenant] <= most:
                chosen.append(record)
            left[record.tenant] -= 1
        return chosen

    def check_integrity(self) -> None:
        """Raise IntegrityError unless both rings hold, and no record is in the wrong one."""
        for ring, held_out in ((self._train, False), (self._held_out, True)):
            ring.check_integrity()
            if any(record.held_out != held_out for record in ring):
                raise IntegrityError("a held-out record lies among those to train on, or the other way round")


def fair_most(counts: list[int], share: float) -> int:
    """The most records that each tenant may have, so that nobody has more than `share` of what all have then; not below
    LEAST_HELD_OUT, and no bound where there is one tenant only. counts: records of each."""
    largest = max(counts, default=0)
    if len(counts) < 2:
        return largest
    for most in range(largest, LEAST_HELD_OUT, -1):
        if most <= share * sum(min(count, most) for count in counts):
            return most
    return min(largest, LEAST_HELD_OUT)


_log = logging.getLogger(__name__)
CHECK_BATCHES = 8
"""Held-out batches that a version is asked about before it serves."""
PROBATION_BATCHES = 4
"""The same once it serves, the latest records first."""
PROBATION_RECORDS = 4
"""New held-out records that end a version's probation; any do when the next update is due."""

PieceKind = Literal["pack", "accumulate", "apply", "check", "copy", "publish"]
"""What comes next: records drawn and packed on the host, a micro-step forward and back, an optimiser step, a forward,
weights and optimiser state remembered or restored, or new weights for the executor."""


class DraftUpdates:
    """Of one draft. serve: called with the weights of a version, between steps, to serve from now on; where it raises,
    the version before goes on serving. version: the one in force; 0 is what was loaded."""

    def __init__(
        self, name: str, trainer: Trainer, buffer: Buffer, learn: LearnConfig, num_tokens: int,
        serve: Callable[[Params], None], rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.name = name
        self.trainer = trainer
        self.buffer = buffer
        self.updates = self.refused = self.rolled_back = 0
        self.version = self._before = self._made = 0
        self.acceptance: float | None = None
        """Of the version in force on held-out records; None: never asked."""
        self.loss: float | None = None
        self._learn = learn
        self._num_tokens = num_tokens
        self._serve = serve
        self._rng = rng
        self._new = self._new_held_out = 0
        self._on_probation = self._is_training = self._is_worse = False

    def add(self, record: Record) -> None:
        """A finished request of this draft's."""
        self.buffer.add(record)
        self._new += 1
        self._new_held_out += record.held_out

    @property
    def due(self) -> bool:
        """Whether `run` has something to do."""
        return self._update_is_due or self._verdict_is_due

    @property
    def _update_is_due(self) -> bool:
        records, held_out = len(self.buffer), self.buffer.num_held_out
        return self._new >= self._learn.learn_every and 0 < held_out < records

    @property
    def _verdict_is_due(self) -> bool:
        return self._on_probation and self._new_held_out >= (1 if self._update_is_due else PROBATION_RECORDS)

    def run(self) -> Iterator[PieceKind]:
        """Do what is due. Says what kind of piece comes next, does it when it is asked again, and ends. What is not
        announced takes no time."""
        if self._verdict_is_due:
            yield from self._end_probation()
        elif self._update_is_due:
            yield from self._update()

    def _update(self) -> Iterator[PieceKind]:
        self._new = 0
        if self._on_probation:  # no held-out record came since: nothing speaks against it
            yield "copy"
            self._confirm()
        self._is_training = True
        for _ in range(self._learn.learn_steps):
            yield "pack"
            for batch in pack(self.buffer.sample(self._rng, self._learn.learn_every), self._num_tokens, self._rng):
                yield "accumulate"
                self.trainer.accumulate(batch)
            yield "apply"
            applied = self.trainer.apply()
            if not applied.finite:
                yield "copy"
                self._refuse("a gradient is not finite")
                return
            self.loss = applied.loss
        records = self.buffer.held_out()
        shuffled = [records[index] for index in self._rng.permutation(len(records))]
        verdict = yield from self._compare(shuffled, CHECK_BATCHES)
        if not verdict.good:
            self.acceptance = verdict.before
            yield "copy"
            self._refuse(f"acceptance on held-out requests went from {verdict.before:.4f} to {verdict.acceptance:.4f}")
            return
        yield "publish"
        self._serve(self.trainer.weights())
        self._made += 1
        self._before, self.version = self.version, self._made
        self.acceptance = verdict.acceptance
        self.updates += 1
        self._is_training, self._on_probation, self._new_held_out = False, True, 0

    def _end_probation(self) -> Iterator[PieceKind]:
        self._new_held_out = 0
        verdict = yield from self._compare(self.buffer.held_out()[::-1], PROBATION_BATCHES)
        self.acceptance = verdict.acceptance
        if verdict.good:
            yield "copy"
            self._confirm()
            return
        self._is_worse = True
        _log.warning(
            "draft %s: version %d is taken back: acceptance on held-out requests is %.4f, and %.4f with version %d",
            self.name, self.version, verdict.acceptance, verdict.before, self._before,
        )  # fmt: skip
        yield "copy"
        self.trainer.back_to_good()
        yield "publish"
        self._take_back()
        self.acceptance = verdict.before

    def _compare(self, records: list[Record], most_batches: int) -> Generator[PieceKind, None, Verdict]:
        """The weights in training against the good ones."""
        yield "pack"
        parts = parts_of(records, self._num_tokens, most_batches, self._rng)
        scores: tuple[list[list[Scores]], list[list[Scores]]] = ([], [])
        for part in parts:
            for sums, good in zip(scores, (False, True), strict=True):
                sums.append([])
                for batch in part.batches:
                    yield "check"
                    sums[-1].append(self.trainer.evaluate(batch, good=good))
        return judge([part.weight for part in parts], *scores, self._learn.learn_tolerance)

    def _confirm(self) -> None:
        self.trainer.mark_good()
        self._on_probation = False

    def _take_back(self) -> None:
        """The trainer is back at the version before: it serves again."""
        self._serve(self.trainer.weights())
        self.version = self._before
        self._on_probation = self._is_worse = False
        self.rolled_back += 1

    def _refuse(self, reason: str) -> None:
        self.trainer.back_to_good()
        self._is_training = False
        self.refused += 1
        _log.warning("draft %s: an update of version %d is refused: %s", self.name, self.version, reason)

    def settle(self) -> None:
        """At the end: leave an update that is under way. The version in force is the good one, unless it was found to
        be worse than the one before, which is good then."""
        if self._is_training or self._is_worse:
            self.trainer.back_to_good()
            self._is_training = False
        if self._is_worse:
            self._take_back()
        if self._on_probation:
            self._confirm()

    @property
    def good_version(self) -> int:
        """The version that the trainer remembers: the one in force, or while that is on probation the one before."""
        return self._before if self._on_probation else self.version

    def state(self) -> dict[str, Any]:
        """Of the good version: what a restart needs to know beside the trainer's state and the records."""
        return {"version": self.good_version, "made": self._made}

    def go_on_from(self, state: dict[str, Any]) -> None:
        """The trainer's state was read, and is good: serve it. Raises KeyError, TypeError: not what `state` gave."""
        self.version, self._made = int(state["version"]), int(state["made"])
        self._serve(self.trainer.weights())
