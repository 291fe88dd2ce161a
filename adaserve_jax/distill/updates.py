"""Updates of one draft: buffer its records, train a new version piece by piece, and check it before and after it
serves.

A version is on probation until held-out records have come after it, and it has been checked on them and on the latest
PROBATION_RECORDS at least. Meanwhile the trainer keeps the version before as the good one, and returns to it if
acceptance fell.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import numpy as np

from adaserve_jax.distill.records import PackedBatch, Record, pack
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.errors import IntegrityError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params

MIN_HELD_OUT = 8
"""Held-out records that always have room, and that a tenant may have in any case: fewer say nothing about a draft."""
CHECK_BATCHES = 8
"""Held-out batches that check a version before it serves."""
PROBATION_BATCHES = 4
"""Held-out batches that check a version once it serves, the latest records first."""
PROBATION_RECORDS = 4
"""New held-out records that end a version's probation; a single one does when the next update is due, and is judged
with the ones before it."""
_log = logging.getLogger(__name__)

PieceKind = Literal["pack", "accumulate", "apply", "check", "copy", "publish"]
"""Kind of the next piece: draw and pack records on the host, a micro-step forward and back, an optimiser step, a
forward, a copy of weights and optimiser state, or new weights for the executor."""


@dataclass(frozen=True, eq=False)
class TenantGroup:
    """Packed held-out records of one tenant, or of several if there are many. weight: their share of all records."""

    weight: float
    batches: list[PackedBatch]


def group_by_tenant(
    records: Sequence[Record], num_tokens: int, most_batches: int, rng: np.random.Generator
) -> list[TenantGroup]:
    """Pack held-out records by tenant: about `most_batches` batches of num_tokens, at least one per group, with the
    first records of each group that fit."""
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
        parts.append(TenantGroup(len(group) / len(records), pack(some, num_tokens, rng)[:batches]))
    return parts


@dataclass(frozen=True)
class UpdateVerdict:
    """Result of a check: whether the new weights may serve, and the mean sum min(p, q) of the new and old weights."""

    good: bool
    acceptance: float
    before: float


def judge(
    weights: Sequence[float],
    new: Sequence[Sequence[Scores]],
    old: Sequence[Sequence[Scores]],
    tolerance: float,
) -> UpdateVerdict:
    """Decide whether new weights may serve. new, old: scores of each group's batches by the new and the old weights.

    They may not if acceptance is not finite, or fell by more than the tolerance in the mean over groups or for the
    median group (the lower one of two). So no single tenant decides, however much it gains. Groups without a row that
    counts are left out; if none is left, new weights may not serve.
    """
    counted = [index for index, sums in enumerate(new) if sum(each.weight for each in sums)]
    acceptance, before = (np.array([_mean(parts[index]) for index in counted]) for parts in (new, old))
    share = np.array([weights[index] for index in counted])
    share = share / share.sum()
    change = acceptance - before
    means = float(share @ acceptance), float(share @ before)
    if not counted or not np.isfinite(change).all():
        return UpdateVerdict(False, *means)
    order = np.argsort(change, kind="stable")
    middle = order[int(np.searchsorted(np.cumsum(share[order]), 0.5 - 1e-9))]
    return UpdateVerdict(bool(min(means[0] - means[1], change[middle]) >= -tolerance), *means)


def _mean(sums: Sequence[Scores]) -> float:
    return sum(each.overlap_sum for each in sums) / sum(each.weight for each in sums)


class Ring:
    """Bounded store of records, at most `capacity`.

    A tenant with its share, `tenant_share` of the capacity, evicts its own oldest record while others have any.
    Otherwise a full ring evicts the oldest record of the tenant furthest above its share, or of all.
    """

    def __init__(self, capacity: int, tenant_share: float):
        self.capacity = capacity
        self.limit = max(1, int(tenant_share * capacity))
        self._of: dict[str, deque[tuple[int, Record]]] = {}
        self._len = 0
        self._added = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Record]:
        """Yield records, oldest first."""
        return iter(self.latest(self._added))

    def latest(self, count: int) -> list[Record]:
        """Return those of the last `count` added records that are still there, oldest first."""
        kept = sorted((entry for entries in self._of.values() for entry in entries), key=lambda entry: entry[0])
        return [record for number, record in kept if number >= self._added - count]

    def add(self, record: Record) -> None:
        """Add a record, evicting another if there is no room."""
        self._make_room(record.tenant)
        self._of.setdefault(record.tenant, deque()).append((self._added, record))
        self._added += 1
        self._len += 1

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


class RecordBuffer:
    """Records of one draft in two rings: `capacity` records to train on, and those held out.

    held_out_share: size of the held-out ring as a share of `capacity`; at least MIN_HELD_OUT records. tenant_share:
    largest share of either ring that one tenant has while others have any.
    """

    def __init__(self, capacity: int, held_out_share: float, tenant_share: float):
        self._share = tenant_share
        self._train = Ring(capacity, tenant_share)
        self._held_out = Ring(max(MIN_HELD_OUT, int(held_out_share * capacity)), tenant_share)

    def __len__(self) -> int:
        """Return the number of records, held-out ones included."""
        return len(self._train) + len(self._held_out)

    def __iter__(self) -> Iterator[Record]:
        """Yield records to train on, then held-out ones, each oldest first."""
        yield from self._train
        yield from self._held_out

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def add(self, record: Record) -> None:
        (self._held_out if record.held_out else self._train).add(record)

    def extend(self, records: Iterable[Record]) -> None:
        for record in records:
            self.add(record)

    def sample(self, rng: np.random.Generator, num_records: int) -> list[Record]:
        """Draw up to `num_records` records to train on, each at most once. No tenant gets more than its share unless
        the others have no more."""
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

    def held_out(self, latest: int | None = None) -> list[Record]:
        """Return the records to check a draft on, oldest first: the latest of each tenant, limited by `fair_limit`.

        latest: only those among so many held-out records that were added last; None: among all.
        """
        records = list(self._held_out) if latest is None else self._held_out.latest(latest)
        left = Counter(record.tenant for record in records)
        most = fair_limit(list(left.values()), self._share)
        chosen = []
        for record in records:
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


def fair_limit(counts: list[int], share: float) -> int:
    """Return the largest number of records per tenant such that no tenant has more than `share` of all that remain.

    Not below MIN_HELD_OUT, and no limit for a single tenant. counts: records of each tenant.
    """
    largest = max(counts, default=0)
    if len(counts) < 2:
        return largest
    fair = (most for most in range(largest, MIN_HELD_OUT, -1) if most <= share * sum(min(n, most) for n in counts))
    return next(fair, min(largest, MIN_HELD_OUT))


class DraftUpdates:
    """Training of one draft while it serves. `version` is the one in force; 0 is the loaded draft.

    num_tokens: of a micro-step. serve: called between steps with the weights of a version that serves from then on; if
    it raises, the version before goes on serving. rng: draws records and orders.
    """

    def __init__(
        self, name: str, trainer: Trainer, buffer: RecordBuffer, learn: LearnConfig, num_tokens: int,
        serve: Callable[[Params], None], rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.name = name
        self.trainer = trainer
        self.buffer = buffer
        self.updates = self.refused = self.rolled_back = 0
        self.version = self._before = self._made = 0
        self.acceptance: float | None = None
        """Acceptance of the version in force on held-out records; None: not checked yet."""
        self.loss: float | None = None
        self._learn = learn
        self._num_tokens = num_tokens
        self._serve = serve
        self._rng = rng
        self._new = self._new_held_out = 0
        self._on_probation = self._is_training = self._is_worse = False

    def add(self, record: Record) -> None:
        self.buffer.add(record)
        self._new += 1
        self._new_held_out += record.held_out

    @property
    def due(self) -> bool:
        """True if `run` has something to do."""
        return self._update_is_due or self._verdict_is_due

    @property
    def _update_is_due(self) -> bool:
        records, held_out = len(self.buffer), self.buffer.num_held_out
        return self._new >= self._learn.learn_every and 0 < held_out < records

    @property
    def _verdict_is_due(self) -> bool:
        return self._on_probation and self._new_held_out >= (1 if self._update_is_due else PROBATION_RECORDS)

    def run(self) -> Iterator[PieceKind]:
        """Do what is due, piece by piece: yield the kind of the next piece, and run it when asked for another. Work
        outside pieces takes no time."""
        if self._verdict_is_due:
            yield from self._end_probation()
        elif self._update_is_due:
            yield from self._update()

    def _update(self) -> Iterator[PieceKind]:
        self._new = 0
        if self._on_probation:  # no held-out record came since, so nothing speaks against it
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
        records = self.buffer.held_out(max(self._new_held_out, PROBATION_RECORDS))  # one alone is no evidence
        self._new_held_out = 0
        verdict = yield from self._compare(records[::-1], PROBATION_BATCHES)
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
        self.trainer.restore_good()
        yield "publish"
        self._take_back()
        self.acceptance = verdict.before

    def _compare(self, records: list[Record], most_batches: int) -> Generator[PieceKind, None, UpdateVerdict]:
        """Compare the weights in training with the good ones."""
        yield "pack"
        parts = group_by_tenant(records, self._num_tokens, most_batches, self._rng)
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
        """Serve the version before again, to which the trainer has returned."""
        self._serve(self.trainer.weights())
        self.version = self._before
        self._on_probation = self._is_worse = False
        self.rolled_back += 1

    def _refuse(self, reason: str) -> None:
        self.trainer.restore_good()
        self._is_training = False
        self.refused += 1
        _log.warning("draft %s: an update of version %d is refused: %s", self.name, self.version, reason)

    def settle(self) -> None:
        """Drop an unfinished update at the end. The version in force becomes the good one, unless it was found worse
        than the one before."""
        if self._is_training or self._is_worse:
            self.trainer.restore_good()
            self._is_training = False
        if self._is_worse:
            self._take_back()
        if self._on_probation:
            self._confirm()

    @property
    def good_version(self) -> int:
        """Version of the trainer's good weights: the one in force, or the one before it during probation."""
        return self._before if self._on_probation else self.version

    def state(self) -> dict[str, Any]:
        """Return what a restart needs about the good version beside the trainer's state and the records."""
        return {"version": self.good_version, "made": self._made}

    def restore(self, state: dict[str, Any]) -> None:
        """Serve the weights that the trainer has loaded. Raises KeyError, TypeError, ValueError if `state` is
        malformed."""
        self.version, self._made = int(state["version"]), int(state["made"])
        self._serve(self.trainer.weights())
