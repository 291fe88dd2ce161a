"""Which repeats of two groups were given the same requests, so that one can be set against the other in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adaserve_jax.report.points import Group, Point


@dataclass(frozen=True)
class Pairing:
    """Two groups as they are compared. paired: repeat by repeat with the same requests; else they are whole, and
    independent of each other. left_out: repeats that have no match, of both groups together."""

    one: Group
    other: Group
    paired: bool
    left_out: int = 0


def pair_up(one: Group, other: Group) -> Pairing:
    """Restrict both to the repeats that both have, in the same order; where there is none, leave them as they are.

    Of repeats with the same requests, those of one run and one number belong together first, then those of one number.
    """
    candidates = [
        (a.row.run_id != b.row.run_id, a.row.repeat != b.row.repeat, i, j)
        for i, a in enumerate(one.points)
        for j, b in enumerate(other.points)
        if _same_load(a, b)
    ]
    found: dict[int, int] = {}
    for *_, i, j in sorted(candidates):
        if i not in found and j not in found.values():
            found[i] = j
    if not found:
        return Pairing(one, other, paired=False)
    kept = sorted(found)
    left_out = len(one.points) + len(other.points) - 2 * len(kept)
    one, other = _restricted(one, kept), _restricted(other, [found[i] for i in kept])
    return Pairing(one, other, one.has_records and other.has_records, left_out)


def _same_load(one: Point, other: Point) -> bool:
    """By their requests; without records by what they were made from."""
    if one.is_complete and other.is_complete:
        return one.columns.same_requests(other.columns)
    return _load(one) == _load(other)


def _load(point: Point) -> tuple[object, ...]:
    row = point.row
    return row.repeat, row.seed, row.workload_hash, row.duration_s, row.requests


def _restricted(group: Group, kept: Sequence[int]) -> Group:
    """The group itself where it is whole and in order, so that what was drawn for it serves again."""
    if list(kept) == list(range(len(group.points))):
        return group
    return replace(group, points=tuple(group.points[i] for i in kept))
