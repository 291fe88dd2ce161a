"""The grid of a run: which points there are, what they are called, and in which order they are measured."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from adaserve_jax.bench.plan import BenchPlan, load_all
from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.workload import load_workload

POLICIES = ("a", "b", "c")


def test_a_name_says_what_varies_and_nothing_else():
    names = [point.name for point in BenchPlan(("a",), (2.0, None), 1.0).points]
    assert names == ["a@2/s", "a@trace"]
    plan = BenchPlan(("a",), (2.0,), 1.0, urgent_shares=(0.6, 0.2), slo_scales=(1.2, None), repeats=2)
    assert [point.name for point in plan.points][:4] == [
        "a@2/s urgent=0.6 slo=1.2 #0", "a@2/s urgent=0.6 slo=as-is #0", "a@2/s urgent=0.2 slo=1.2 #0",
        "a@2/s urgent=0.2 slo=as-is #0",
    ]  # fmt: skip
    assert len(plan.points) == 8 and plan.points[-1].name == "a@2/s urgent=0.2 slo=as-is #1"
    plan = BenchPlan(("a",), (2.0,), 1.0, arrivals=("poisson", "trace"))
    assert [point.name for point in plan.points] == ["a@2/s poisson", "a@2/s trace"]


def test_policies_of_one_load_are_neighbours_and_all_get_every_load():
    plan = BenchPlan(POLICIES, (1.0, 2.0, 4.0), 1.0, slo_scales=(1.0, 2.0), repeats=3)
    points = plan.points
    assert len(points) == 3 * 3 * 2 * 3
    for start in range(0, len(points), 3):
        group = points[start : start + 3]
        assert {point.policy for point in group} == set(POLICIES)
        assert len({point.load for point in group}) == 1
    repeats = [point.load.repeat for point in points]
    assert repeats == sorted(repeats), "a repeat is over before the next begins"


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0)])
def test_over_the_repeats_each_policy_is_as_often_first_at_every_load(rates: tuple[float, ...]):
    """Also where the number of loads is a multiple of the number of policies."""
    points = BenchPlan(POLICIES, rates, 1.0, repeats=len(POLICIES)).points
    firsts = Counter((points[i].load.rate_rps, points[i].policy) for i in range(0, len(points), len(POLICIES)))
    assert set(firsts.values()) == {1} and len(firsts) == len(rates) * len(POLICIES)


def test_repeats_have_seeds_of_their_own_and_the_first_has_the_plans():
    loads = BenchPlan(("a",), (1.0,), 1.0, repeats=50).loads
    seeds = [load.seed(7) for load in loads]
    assert seeds[0] == 7 and len(set(seeds)) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [load.seed(7) for load in loads]
    assert set(seeds[1:]).isdisjoint(load.seed(8) for load in loads), "seeds in a row share no repeat"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "at least one policy"),
        ({"repeats": 0}, "at least one policy, rate, urgent share, SLO scale, arrival process and repeat"),
        ({"rates": (2.0, 2.0000001)}, "every point must be measured once, a@2/s is there twice"),
        ({"arrivals": ("rain",)}, "rain"),
        ({"rates": (None,), "duration_s": 0.0}, "duration must be a finite number of seconds above 0, got 0.0"),
        ({"duration_s": float("nan")}, "duration must be a finite number of seconds above 0, got nan"),
        ({"rates": (2.0, -1.0)}, "rates must be finite and above 0, got -1.0"),
        ({"drain_s": -1.0}, "drain must be a finite time of at least 0, got -1.0 s"),
        ({"max_late_s": float("nan")}, "max_late must be a finite time of at least 0, got nan s"),
        ({"warmup_requests": -1}, "warmup_requests must be at least 0, got -1"),
        ({"seed": -3}, "seed must be at least 0, got -3"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(BenchPlan(("a",), (1.0,), 1.0), **change)


def test_a_plan_is_known_again_by_its_settings():
    plan = BenchPlan(("a", "b"), (2.0, None), 1.5, seed=3, slo_scales=(1.2, None), repeats=2)
    assert BenchPlan.of(json.loads(json.dumps({**plan.settings(), "workload": "w"}))) == plan


def test_one_load_is_not_measured_twice_under_two_names(tmp_path):
    """A workload's own times are the same whatever process is named beside them."""
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "arrival_s": at}) + "\n" for at in (0.0, 0.4, 0.7)))
    workload = load_workload(path)
    plan = BenchPlan(("a",), (None,), 1.0, repeats=2)
    assert len(load_all(plan, workload)) == 2, "repeats differ by their seeds"
    with pytest.raises(ConfigError, match="the workload's own times with arrivals poisson and the workload's own times "
                                          "with arrivals trace are the same requests at the same times"):  # fmt: skip
        load_all(replace(plan, arrivals=("poisson", "trace")), workload)
    assert len(load_all(replace(plan, rates=(2.0, 4.0)), workload)) == 4


def test_a_class_is_not_called_as_the_rows_over_all_classes_are(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "a", "slo_class": "all"}\n')
    with pytest.raises(ConfigError, match=r"w.jsonl: no SLO class may be called 'all', as rows over every class are"):
        load_all(BenchPlan(("a",), (2.0,), 1.0), load_workload(path))
