"""Every figure of a group against the summary of the same requests, which has its own tests; pooling by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.report.estimates import Estimates
from adaserve_jax.report.measures import (
    ATTAINMENT,
    GOODPUT,
    GOODPUT_TPOT,
    MEAN_ACCEPTED,
    PERCENTILES,
    RATIOS,
    THROUGHPUT,
    TPOT_P50,
    TPOT_P90,
    TPOT_P99,
    VIOLATIONS,
    WITH_TARGET,
    WITHOUT_TARGET,
    MeasureColumns,
)
from adaserve_jax.report.points import measured
from adaserve_jax.report.sections import TIMES_OVER, shares_within
from tests.report.made import folder, point, random_requests, request


def only_group(*points):
    (group,) = measured([folder(*points)]).groups.values()
    return group


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_one_repeat_are_its_rows(seed: int):
    group = only_group(point(random_requests(40, seed), wall=55.0))
    estimates = Estimates()
    for name, row in group.points[0].rows.items():
        for measure in (*RATIOS, *PERCENTILES):
            expected, found = getattr(row, measure.name), estimates.value(group, measure, name)
            if measure in (GOODPUT, GOODPUT_TPOT) and row.attainment is None:
                expected = None  # 0 in the row, and no figure of a class without a target
            assert (found is None) == (expected is None), (name, measure.name)
            assert found is None or found == pytest.approx(expected), (name, measure.name)


def test_repeats_are_pooled_by_request():
    met, missed = request(0, tpot=0.125), request(1, tpot=0.5)
    group = only_group(point([met, met, met], wall=10.0, repeat=0), point([missed], wall=30.0, repeat=1))
    estimates = Estimates()
    assert estimates.value(group, ATTAINMENT) == 0.75
    assert estimates.value(group, GOODPUT) == 15 / 40  # 3 x 5 tokens met, in 10 + 30 s
    assert estimates.value(group, THROUGHPUT) == 20 / 40
    assert estimates.value(group, TPOT_P50) == 0.125


def test_classes_share_the_wall_time():
    chat, code = request(0, slo_class="chat", tokens=6), request(1, slo_class="code", tokens=4)
    group = only_group(point([chat, code], wall=5.0))
    assert [Estimates().value(group, THROUGHPUT, name) for name in ("all", "chat", "code")] == [2.0, 1.2, 0.8]


def test_requests_with_and_without_a_target_are_told_apart():
    columns = MeasureColumns.of([([request(0), request(1, tpot_slo=None), request(2)], 1.0)])
    assert columns.mask(WITH_TARGET).tolist() == [True, False, True]
    assert columns.mask(WITHOUT_TARGET).tolist() == [False, True, False]


@pytest.mark.parametrize("target", ["tpot_slo_s", "ttft_slo_s", "e2e_slo_s"])
def test_a_target_of_any_kind_alone_is_one(target: str):
    free = request(0, tpot_slo=None)
    columns = MeasureColumns.of([([free, replace(free, due_s=1.0, **{target: 9.0})], 1.0)])
    assert columns.mask(WITH_TARGET).tolist() == [False, True]
    assert columns.mask(WITHOUT_TARGET).tolist() == [True, False]


def test_interval_holds_the_value_and_widens_a_sure_share():
    mixed = only_group(point([request(i, tpot=0.125 if i % 4 else 0.5) for i in range(40)]))
    found = Estimates().of(mixed, ATTAINMENT)
    assert found.value == 0.75 and 0.5 < found.low < 0.75 < found.high < 0.9
    sure = Estimates().of(only_group(point([request(i) for i in range(40)])), ATTAINMENT)
    assert (sure.value, sure.high) == (1.0, 1.0)
    assert sure.low**40 == pytest.approx(0.025)


def test_goodput_of_requests_that_all_met_or_all_missed():
    met, missed = (only_group(point([request(i, tpot=tpot) for i in range(40)])) for tpot in (0.125, 0.5))
    found = Estimates().of(met, GOODPUT)
    assert (found.value, found.high) == (20.0, 20.0)
    assert (found.low / 20) ** 40 == pytest.approx(0.025)
    found = Estimates().of(missed, GOODPUT)
    assert (found.value, found.low) == (0.0, 0.0)
    assert (1 - found.high / 20) ** 40 == pytest.approx(0.025)


def test_requests_without_a_target_have_no_attainment_and_no_goodput():
    group = only_group(point([request(i, tpot_slo=None) for i in range(4)]))
    assert [Estimates().of(group, each).value for each in (ATTAINMENT, GOODPUT, GOODPUT_TPOT)] == [None] * 3


def test_without_requests_figures_are_the_rows_mean_and_have_no_interval():
    one, other = point([request(0)], repeat=0), point([request(0, tpot=0.5)], repeat=1)
    group = only_group((one[0], [], []), (other[0], [], []))
    found = Estimates().of(group, ATTAINMENT)
    assert (found.value, found.low, found.high) == (0.5, None, None)


def test_paired_differences_see_what_independent_ones_do_not():
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.05, 0.5, 60)  # what makes a request slow for both
    ours = [request(i, tpot=float(hard[i]) * 0.95, tpot_slo=None) for i in range(60)]
    theirs = [request(i, tpot=float(hard[i]), tpot_slo=None) for i in range(60)]
    moved = [request(i, tpot=float(hard[i]), tpot_slo=None, due=i + 0.5) for i in range(60)]
    found = measured([folder(point(ours, policy="a"), point(theirs, policy="b"), point(moved, policy="c"))])
    a, b, c = found.groups.values()
    estimates = Estimates()
    paired, unpaired = (estimates.difference(a, other, TPOT_P50) for other in (b, c))
    assert paired.value == pytest.approx(unpaired.value) == pytest.approx(-0.05 * np.median(hard))
    assert paired.excludes_zero and not unpaired.excludes_zero
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 4


def test_violation_ratio():
    ours = point([request(i, tpot=0.5 if i < 2 else 0.125) for i in range(20)], policy="a")
    theirs = point([request(i, tpot=0.5 if i < 8 else 0.125) for i in range(20)], policy="b")
    none = point([request(i) for i in range(20)], policy="c")
    a, b, c = measured([folder(ours, theirs, none)]).groups.values()
    estimates = Estimates()
    assert estimates.value(a, VIOLATIONS) == pytest.approx(0.1)
    assert estimates.violation_ratio(b, a).value == pytest.approx(4.0)
    assert estimates.violation_ratio(a, c).value == math.inf
    assert estimates.violation_ratio(c, c).value is None


def test_share_within_the_target_is_the_attainment():
    records = random_requests(90, 3)
    group = only_group(point(records))
    at_one = TIMES_OVER.tolist().index(1.0)
    for name, row in group.points[0].rows.items():
        shares = shares_within(group.columns, name)
        if row.attainment_tpot is None:
            assert shares == ()
        else:
            assert shares[at_one] == pytest.approx(row.attainment_tpot)
            assert list(shares) == sorted(shares)
    finished = sum(r.status == "finished" for r in records if r.tpot_slo_s) / sum(
        r.tpot_slo_s is not None for r in records
    )
    assert shares_within(group.columns, "all")[-1] == pytest.approx(finished)


def test_throughput_has_an_interval_of_enough_repeats_only():
    points = [point([request(i, tokens=5 + n) for i in range(4)], repeat=n) for n in range(5)]
    few, many = only_group(*points[:4]), only_group(*points)
    assert Estimates().of(few, THROUGHPUT).low is None
    found = Estimates().of(many, THROUGHPUT)
    assert found.value == pytest.approx(2.8)  # 4 x 7 tokens in 10 s, on average
    assert 2.0 <= found.low < 2.8 < found.high <= 3.6


def test_who_drafts_nothing_has_no_accepted_tokens():
    group = only_group(point([request(0, spec=(4, 0, 0))]))
    assert group.points[0].row.mean_accepted == 0.0
    assert Estimates().value(group, MEAN_ACCEPTED) is None


def test_what_differs_from_repeat_to_repeat_for_both_falls_away():
    rng = np.random.default_rng(4)
    drift = rng.uniform(0.1, 0.4, 6)  # how slow the machine was in each repeat
    ours, theirs = (
        [
            point([request(i, tpot=slow * drift[n], tpot_slo=None) for i in range(8)], policy=policy, repeat=n)
            for n in range(6)
        ]
        for policy, slow in (("a", 0.9), ("b", 1.0))
    )
    a, b = measured([folder(*ours, *theirs)]).groups.values()
    estimates = Estimates()
    difference, alone = estimates.difference(a, b, TPOT_P50), estimates.of(a, TPOT_P50)
    assert difference.value == pytest.approx(-0.1 * np.median(np.repeat(drift, 8)))
    assert difference.high < 0 and difference.high - difference.low < (alone.high - alone.low) / 5


def all_or_none(met: bool, of: int, policy: str, **changes):
    return point([request(i, tpot=0.125 if met else 0.5) for i in range(of)], policy=policy, **changes)


@pytest.mark.parametrize("of", [1, 2, 3, 9])
def test_a_handful_of_requests_tells_nothing_from_chance(of: int):
    a, b = measured([folder(all_or_none(True, of, "a"), all_or_none(False, of, "b"))]).groups.values()
    estimates = Estimates()
    for measure in (ATTAINMENT, GOODPUT, TPOT_P50):
        found = estimates.difference(a, b, measure)
        assert found.value != 0 and (found.low, found.high) == (None, None)
        assert not found.excludes_zero
        assert estimates.of(a, measure).low is None


def test_percentiles_have_an_interval_where_a_request_is_beyond_them():
    ten, hundred = (only_group(point([request(i, tpot=0.1 + i / 1e3) for i in range(n)])) for n in (10, 100))
    estimates = Estimates()
    assert estimates.of(ten, TPOT_P90).low is not None
    assert estimates.of(ten, TPOT_P99).low is None
    assert estimates.of(hundred, TPOT_P99).low is not None


def test_classes_of_few_requests_have_no_interval_of_their_own():
    few = [request(i, slo_class="code" if i < 3 else "chat", tpot=0.5 if i % 2 else 0.125) for i in range(40)]
    group, estimates = only_group(point(few)), Estimates()
    assert estimates.of(group, ATTAINMENT, "code").low is None
    assert estimates.of(group, ATTAINMENT, "chat").low is not None


def test_difference_of_all_met_and_none_met_leaves_room_for_what_was_not_seen():
    a, b = measured([folder(all_or_none(True, 40, "a"), all_or_none(False, 40, "b"))]).groups.values()
    sure = 0.025 ** (1 / 40)
    estimates = Estimates()
    found = estimates.difference(a, b, ATTAINMENT)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(sure - (1 - sure))
    same = estimates.difference(a, a, ATTAINMENT)
    assert (same.low, same.high) == (pytest.approx(sure - 1), pytest.approx(1 - sure))


def test_goodput_of_all_met_still_differs_by_how_long_answers_were():
    tokens = [2 if i % 2 else 30 for i in range(40)]
    met, missed = (
        only_group(point([request(i, tpot=tpot, tokens=n) for i, n in enumerate(tokens)])) for tpot in (0.125, 0.5)
    )
    found = Estimates().of(met, GOODPUT)
    assert found.value == pytest.approx(64.0)  # 640 tokens in 10 s
    # 40 draws of 2 or 30 tokens: a deviation of 14 each, of 14 * sqrt(40) in their sum, and of it per 10 s
    half = 1.96 * 14 * math.sqrt(40) / 10
    assert found.high == pytest.approx(64.0 + half, rel=0.03)
    assert found.low == pytest.approx(min(64.0 - half, 64.0 * 0.025 ** (1 / 40)), rel=0.03)
    none = Estimates().of(missed, GOODPUT)
    assert none.high == pytest.approx((64.0 + half) * (1 - 0.025 ** (1 / 40)), rel=0.03)


def test_violation_ratio_may_be_any_number_where_ours_may_be_none():
    ours = point([request(i, tpot=0.5 if i < 2 else 0.125) for i in range(40)], policy="a")
    theirs = point([request(i, tpot=0.5 if i < 20 else 0.125) for i in range(40)], policy="b")
    none = point([request(i) for i in range(40)], policy="c")
    a, b, c = measured([folder(ours, theirs, none)]).groups.values()
    estimates = Estimates()
    found = estimates.violation_ratio(b, a)  # of the resamples exp(-2) = 13.5% have no violation of ours
    assert found.value == pytest.approx(10.0) and found.high == math.inf and 2.0 < found.low < 6.0
    found = estimates.violation_ratio(b, c)
    alone = estimates.of(b, ATTAINMENT)
    assert found.value == math.inf
    assert found.low == pytest.approx((1 - alone.high) / (1 - 0.025 ** (1 / 40)))


def spread_over(repeats, policy: str, slow: float, **changes):
    """Repeats whose requests and times differ from each other, and are the same for all policies."""
    made = []
    for n in repeats:
        rng = np.random.default_rng(n)
        records = [request(i, tpot=float(rng.uniform(0.1, 0.3)) * slow, due=i + n / 10) for i in range(20)]
        made.append(point(records, policy=policy, repeat=n, **changes))
    return made


def test_repeats_are_paired_however_late_one_was_measured_again():
    a, b = measured([folder(*spread_over((0, 2, 1), "a", 0.9), *spread_over((0, 1, 2), "b", 1.0))]).groups.values()
    assert [each.row.repeat for each in a.points] == [0, 1, 2]
    estimates = Estimates()
    pairing = estimates.pairing(a, b)
    assert pairing.paired and not pairing.left_out
    assert pairing.one is a and pairing.other is b
    assert estimates.difference(a, b, TPOT_P50).high < 0


def test_one_invalid_repeat_leaves_the_others_paired():
    lost = point([request(0)], policy="a", repeat=1, valid=False, invalid_reason="client was late")
    held = folder(*spread_over((0, 2), "a", 0.9), lost, *spread_over((0, 1, 2), "b", 1.0))
    a, b = measured([held]).groups.values()
    estimates = Estimates()
    pairing = estimates.pairing(a, b)
    assert pairing.paired and pairing.left_out == 1
    assert [each.row.repeat for each in pairing.other.points] == [0, 2]
    found = estimates.difference(a, b, TPOT_P50)
    expected = [estimates.value(group, TPOT_P50) for group in (a, pairing.other)]
    assert found.value == pytest.approx(expected[0] - expected[1]) and found.high < 0


def test_requests_are_paired_in_whatever_order_they_ended():
    records = [request(i, tpot=0.5 if i < 10 else 0.125) for i in range(40)]
    held = folder(point(records, policy="a"), point(records[::-1], policy="b"))
    a, b = measured([held]).groups.values()
    assert Estimates().pairing(a, b).paired
    assert Estimates().difference(a, b, ATTAINMENT).value == 0.0
    assert (Estimates().difference(a, b, TPOT_P50).low, Estimates().difference(a, b, TPOT_P50).high) == (0.0, 0.0)


def test_without_a_common_repeat_groups_are_independent_and_whole():
    a, b = measured([folder(*spread_over((0, 1), "a", 0.9), *spread_over((2,), "b", 1.0))]).groups.values()
    pairing = Estimates().pairing(a, b)
    assert not pairing.paired and (pairing.one, pairing.other) == (a, b)
