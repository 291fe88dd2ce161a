"""Whether new weights may serve: held-out records, with the old weights beside the new ones. Knows no trainer.

One client must not decide that. So the clients are compared one by one: acceptance over all of them together must not
fall, and neither must that of the client in the middle, whatever others gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import numpy as np

from adaserve_jax.distill.batches import Batch, pack
from adaserve_jax.distill.records import Record


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
