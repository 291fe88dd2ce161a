"""Every figure of a group against the summary of the same requests, which has its own tests; pooling by hand."""

import numpy as np
import pytest

from adaserve_jax.report.columns import WITH_TARGET, WITHOUT_TARGET, Columns
from adaserve_jax.report.estimates import Estimates
from adaserve_jax.report.latency import TIMES_OVER, shares_within
from adaserve_jax.report.measures import (
    ATTAINMENT,
    GOODPUT,
    MEAN_ACCEPTED,
    PERCENTILES,
    RATIOS,
    THROUGHPUT,
    TPOT_P50,
    VIOLATIONS,
)
from adaserve_jax.report.points import measured
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
    columns = Columns.of([([request(0), request(1, tpot_slo=None), request(2)], 1.0)])
    assert columns.mask(WITH_TARGET).tolist() == [True, False, True]
    assert columns.mask(WITHOUT_TARGET).tolist() == [False, True, False]


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


def test_no_request_with_a_target_has_no_attainment():
    group = only_group(point([request(i, tpot_slo=None) for i in range(4)]))
    assert Estimates().of(group, ATTAINMENT).value is None
    found = Estimates().of(group, GOODPUT)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


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
    assert paired.is_not_zero and not unpaired.is_not_zero
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 4


def test_violation_ratio():
    ours = point([request(i, tpot=0.5 if i < 2 else 0.125) for i in range(20)], policy="a")
    theirs = point([request(i, tpot=0.5 if i < 8 else 0.125) for i in range(20)], policy="b")
    none = point([request(i) for i in range(20)], policy="c")
    a, b, c = measured([folder(ours, theirs, none)]).groups.values()
    estimates = Estimates()
    assert estimates.value(a, VIOLATIONS) == pytest.approx(0.1)
    assert estimates.violation_ratio(b, a).value == pytest.approx(4.0)
    assert estimates.violation_ratio(a, c).value is None


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
