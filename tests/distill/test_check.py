"""Whether new weights may serve: verdicts by hand, and which held-out records are asked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaserve_jax.distill.records import Record
from adaserve_jax.distill.trainer import Scores
from adaserve_jax.distill.updates import group_by_tenant, judge


def scores(overlap_sum: float, weight: float = 10.0) -> Scores:
    return Scores(overlap_sum, 0.0, weight)


def verdict(weights, before, after, tolerance=0.01):
    """One batch of ten rows for each part, whose acceptance is given."""
    return judge(weights, [[scores(10 * a)] for a in after], [[scores(10 * a)] for a in before], tolerance)


def test_the_mean_is_weighted_by_parts_and_rows():
    new = [[scores(6, 10), scores(2, 2)], [scores(1, 4)]]
    old = [[scores(4, 10), scores(2, 2)], [scores(1, 4)]]
    found = judge([3, 1], new, old, 0.0)
    assert found.acceptance == pytest.approx(0.75 * 8 / 12 + 0.25 * 0.25)
    assert found.before == pytest.approx(0.75 * 6 / 12 + 0.25 * 0.25)
    assert found.good


@pytest.mark.parametrize(("fall", "good"), [(-0.2, True), (0.0, True), (0.009, True), (0.011, False), (0.3, False)])
def test_one_client_may_lose_the_tolerance_and_no_more(fall: float, good: bool):
    assert verdict([1.0], [0.5], [0.5 - fall]).good == good


def test_what_one_client_gains_does_not_pay_for_what_the_others_lose():
    """A client with half of the slice gains 0.4, the other loses 0.1: the mean rises, and yet."""
    found = verdict([0.5, 0.5], [0.6, 0.2], [0.5, 0.6])
    assert found.acceptance > found.before and not found.good
    assert not verdict([0.3, 0.3, 0.4], [0.6, 0.6, 0.2], [0.5, 0.5, 0.7]).good


def test_one_client_cannot_keep_the_others_from_learning():
    """Its acceptance falls by 0.1, on a fifth of the slice, while the others' rises."""
    assert verdict([0.4, 0.4, 0.2], [0.5, 0.5, 0.3], [0.6, 0.6, 0.2]).good


def test_but_acceptance_over_all_may_not_fall():
    assert not verdict([0.3, 0.3, 0.4], [0.5, 0.5, 0.5], [0.51, 0.51, 0.3]).good


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_no_number_is_not_good(broken: float):
    assert not verdict([0.5, 0.5], [0.5, 0.5], [0.9, broken]).good


def test_a_client_without_a_row_that_counts_is_not_asked():
    """As of a head, to which the row of a first token says nothing."""
    nothing = [scores(0, 0)]
    better = judge([0.6, 0.4], [nothing, [scores(6)]], [nothing, [scores(5)]], 0.01)
    assert better.good and (better.acceptance, better.before) == (0.6, 0.5)
    assert not judge([0.6, 0.4], [nothing, [scores(5)]], [nothing, [scores(6)]], 0.01).good
    assert not judge([1.0], [nothing], [nothing], 0.01).good, "nobody was asked"


def record_of(tenant: str, rows: int = 4) -> Record:
    length = rows + 1
    ids = np.zeros((rows, 2), np.int32)
    return Record(
        np.arange(length, dtype=np.int32), np.arange(rows, dtype=np.int32), ids, np.full((rows, 2), -1, np.float32),
        tenant=tenant,
    )  # fmt: skip


def rows_of(parts) -> list[int]:
    return [sum(batch.num_rows for batch in part.batches) for part in parts]


def test_every_client_is_asked_by_itself():
    records = [record_of("a")] * 6 + [record_of("b")] * 2
    parts = group_by_tenant(records, 8, 8, np.random.default_rng(0))
    assert [part.weight for part in parts] == [0.75, 0.25]
    assert rows_of(parts) == [24, 8]  # two texts in a batch, four batches each at most


def test_of_one_client_as_many_as_fit_and_the_first_of_them():
    records = [record_of("a", rows) for rows in (4, 4, 4, 4, 7, 7)]
    (part,) = group_by_tenant(records, 8, 2, np.random.default_rng(0))
    assert part.weight == 1.0 and len(part.batches) == 2
    assert rows_of([part]) == [16]  # the last ones are not looked at


def test_very_many_clients_share_the_batches():
    records = [record_of(f"client {index}") for index in range(40)]
    parts = group_by_tenant(records, 8, 4, np.random.default_rng(0))
    assert 1 < len(parts) <= 4
    assert sum(part.weight for part in parts) == pytest.approx(1.0)
    assert all(len(part.batches) == 1 for part in parts)
    again = group_by_tenant(records, 8, 4, np.random.default_rng(1))
    assert [part.weight for part in again] == [part.weight for part in parts]
