"""The finished texts that one draft learns from and is checked on: bounded, oldest out, no client in charge of it.

Imports no jax. Nothing here reaches a disk: `record_file.py` writes records where that was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from adaserve_jax.distill.records import Record
from adaserve_jax.errors import IntegrityError

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
