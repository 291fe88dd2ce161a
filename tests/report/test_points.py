"""Which rows are one point, which points are repeats of each other, and how they are named."""

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.points import find_point, find_rate, measured
from adaserve_jax.report.view import warnings
from tests.report.made import PROVENANCE, folder, point, request

ONE = [request(0)]


def test_repeats_of_a_setting_are_one_group():
    found = measured([folder(point(ONE), point(ONE, repeat=1), point(ONE, rate=2.0), point(ONE, policy="adaserve"))])
    assert [(who, setting.rate_rps, len(group.points)) for (who, setting), group in found.groups.items()] == [
        ("ar", 1.0, 2), ("ar", 2.0, 1), ("adaserve", 1.0, 1)
    ]  # fmt: skip
    assert (found.policies, found.varied) == (("ar", "adaserve"), ("rate_rps",))
    assert found.classes == ("chat",)


def test_invalid_points_are_in_no_group():
    found = measured([folder(point(ONE), point(ONE, rate=2.0, valid=False, invalid_reason="client was late"))])
    assert [setting.rate_rps for setting in found.settings] == [1.0]
    assert (len(found.points), len(found.valid), found.varied) == (2, 1, ())


def test_systems_labels_and_replicas_are_told_apart():
    found = measured([folder(
        point(ONE), point(ONE, policy="spec:4", system="vllm"), point(ONE, policy="other", system="other"),
        point(ONE, policy="nightjar", label="tuned"), point(ONE, policy="adaserve", replicas=2, router="least"),
    )])  # fmt: skip
    assert found.policies == ("ar", "vllm spec:4", "other", "nightjar (tuned)", "adaserve, 2 replicas by least")


def test_folders_are_named_only_where_they_hold_the_same():
    other = folder(point(ONE), point(ONE, policy="adaserve"), path="b/run")
    found = measured([folder(point(ONE), path="a/run"), other])
    assert found.policies == ("a/run: ar", "b/run: ar", "adaserve")
    assert [each.name for each in found.points] == ["a/run: ar@1/s", "b/run: ar@1/s", "adaserve@1/s"]


@pytest.mark.parametrize("change", [{"commit": "fedcba"}, {"target_params": 5}, {"workload_hash": "cd" * 32}])
def test_runs_of_one_folder_are_repeats_only_when_they_were_made_alike(change: dict[str, object]):
    alike = replace(PROVENANCE, run_id="r2", started_at="2026-11-02T10:00:00+00:00", baseline_s=0.051)
    (group,) = measured([folder(point(ONE), point(ONE, provenance=alike))]).groups.values()
    assert [each.row.run_id for each in group.points] == ["r1", "r2"]
    found = measured([folder(point(ONE), point(ONE, provenance=replace(alike, **change)))])
    assert found.policies == ("run r1: ar", "run r2: ar")


def test_a_workload_may_differ_between_settings_of_one_run():
    urgent = replace(PROVENANCE, workload_hash="cd" * 32)
    found = measured([folder(point(ONE, urgent_share=0.2), point(ONE, urgent_share=0.6, provenance=urgent))])
    assert found.policies == ("ar",)
    assert found.varied == ("urgent_share",)


def test_old_rows_that_cannot_be_told_apart_keep_no_requests():
    rows, records, _ = point(ONE, replicas=1)
    more, _, _ = point(ONE, replicas=2, router="least")
    found = measured([folder((rows, records, []), (more, [], []))])
    assert found.policies == ("ar", "ar, 2 replicas by least")
    assert [each.records for each in found.points] == [(), ()]


def test_an_unknown_point_is_refused_with_those_that_there_are():
    found = measured([folder(point(ONE), point(ONE, rate=2.0))])
    assert find_point(found.points, "ar@2/s").setting.rate_rps == 2.0
    with pytest.raises(ConfigError, match=r"expected one of the points 'ar@1/s', 'ar@2/s', got 'ar@3/s'"):
        find_point(found.points, "ar@3/s")


def test_a_point_is_found_by_a_rate_that_is_near_its_own():
    rates = {"adaserve": 4.11866, "ar": 4.12, "b": 3.9, "c": 4.05, "d": 4.2}
    found = measured([folder(*(point(ONE, policy=policy, rate=rate) for policy, rate in rates.items()))])
    assert find_point(found.points, "adaserve@4/s").name == "adaserve@4.11866/s"
    assert find_point(found.points, "ar@4/s").name == "ar@4.12/s"
    with pytest.raises(ConfigError, match="got 'e@4/s'"):
        find_point(found.points, "e@4/s")


def test_a_rate_between_two_finds_neither():
    assert find_rate((1.99665, 4.11866, 6.02837), 4.0) == 4.11866
    assert find_rate((3.9, 4.1), 3.95) == 3.9
    assert find_rate((3.9, 4.1), 4.0) is None
    assert find_rate((4.0, 4.1), 4.0) == 4.0
    assert find_rate((1.0, 2.0), 3.0) is find_rate((), 1.0) is None


def test_a_folder_without_rows_is_refused():
    with pytest.raises(ConfigError, match="expected folders with results to report on, found no row in run"):
        measured([folder()])


def test_workloads_of_one_setting_are_no_repeats_of_each_other():
    other = replace(PROVENANCE, workload="other", workload_hash="cd" * 32)
    twin = replace(PROVENANCE, run_id="r2", workload="other", workload_hash="ef" * 32)
    one, two = point(ONE), point(ONE, repeat=1, provenance=other)
    found = measured([folder(one, two)])
    assert [(s.workload, s.describe(found.varied)) for s in found.settings] == [
        ("mixed", "workload mixed"), ("other", "workload other")
    ]  # fmt: skip
    assert [len(group.points) for group in found.groups.values()] == [1, 1]
    three = measured([folder(one, two, path="a"), folder(point(ONE, provenance=twin), path="b")])
    assert sorted(s.workload for s in three.settings) == [
        "mixed", "other cdcdcdcdcdcd", "other efefefefefef"
    ]  # fmt: skip


def test_arrivals_are_told_by_burstiness_where_they_can_be():
    plain = point(ONE, burstiness=1.0)
    bursts = point(ONE, repeat=1, arrival_process="gamma:cv=2", burstiness=2.0)
    trace = point(ONE, repeat=2, arrival_process="trace")
    assert measured([folder(plain, bursts)]).varied == ("burstiness",)
    found = measured([folder(plain, trace)])
    assert found.varied == ("burstiness", "process")
    assert [s.describe(found.varied) for s in found.settings] == ["arrivals trace", "burstiness 1, arrivals poisson"]


@pytest.mark.parametrize("change", [{"engine_hash": "ef" * 32}, {"max_prefill_tokens": 64}])
def test_runs_of_other_engine_settings_are_no_repeats(change: dict[str, object]):
    other = replace(PROVENANCE, run_id="r2", **change)
    found = measured([folder(point(ONE), point(ONE, provenance=other))])
    assert found.policies == ("run r1: ar", "run r2: ar")


def test_runs_of_another_duration_are_no_repeats():
    other = replace(PROVENANCE, run_id="r2")
    found = measured([folder(point(ONE), point(ONE, provenance=other, duration_s=20.0))])
    assert found.policies == ("run r1: ar", "run r2: ar")


def test_what_a_run_measured_after_it_was_resumed_elsewhere_is_told_apart():
    later = replace(PROVENANCE, commit="fedcba9876543210")
    found = measured([folder(point(ONE), point(ONE, repeat=1, provenance=later), point(ONE, rate=2.0))])
    assert found.policies == ("run r1: ar", "run r1 part 2: ar")
    assert found.sources == ("run r1", "run r1 part 2")
    (said,) = (item.text for item in warnings(found).items)
    assert said == ("run r1 and run r1 part 2 were not measured alike: commit (0123456789ab against fedcba987654).")


def test_folders_of_one_name_are_told_from_those_beside_them():
    now, then = folder(point(ONE), path="a/out"), folder(point(ONE), path="b/out")
    assert measured([now], beside=[then]).sources == ("a/out",)
    assert measured([then], beside=[now]).sources == ("b/out",)


def test_points_that_were_tuned_one_by_one_are_of_their_run():
    tuned = [
        point(ONE, policy="spec:4", label="tuned", rate=rate, provenance=replace(PROVENANCE, max_requests=most))
        for rate, most in ((1.0, 4), (2.0, 16))
    ]
    found = measured([folder(point(ONE), point(ONE, rate=2.0), *tuned)])
    assert found.policies == ("ar", "spec:4 (tuned)")
    assert found.sources == ("run",)


def test_relative_targets_of_another_baseline_within_a_run_are_warned_of():
    slower = replace(PROVENANCE, baseline_s=0.06)
    found = measured([folder(point(ONE), point(ONE, rate=2.0, provenance=slower))])
    (said,) = (item.text for item in warnings(found).items)
    assert said.endswith("multiples of 50.0 ms at some of its points, and of 60.0 ms at others.")
    near = replace(PROVENANCE, baseline_s=0.051)
    assert not warnings(measured([folder(point(ONE), point(ONE, rate=2.0, provenance=near))])).items
