"""Routers that read columns choose as those that look at every request, on traffic of every kind and at every size."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.routing.fleet import Assigned, Fleet
from adaserve_jax.routing.routers import LeastLoaded, SloAware, find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.workloads.traces import Trace, fluctuating_trace
from tests.oracles import routers as oracles

MACHINE = load_machine("llama-70b")
LIMITS = MACHINE.limits(8)
COSTS = CostTable(MACHINE.samples(LIMITS), LIMITS)
KINDS = (
    ("code", 0.036, 4.0),
    ("chat", 0.05, None),
    ("free", None, None),
    ("summary", 0.15, 1.0),
    ("never", 0.001, 0.1),
)


def arrival(rng: np.random.Generator, now: float) -> Assigned:
    name, tpot_s, ttft_s = KINDS[rng.integers(len(KINDS))]
    return Assigned(name, int(rng.integers(1, 2000)), now, tpot_s, ttft_s)


class Traffic:
    """Requests that come, get tokens and end at random on a few replicas, as columns and nowhere else."""

    def __init__(self, replicas: int, seed: int):
        self.rng, self.now = np.random.default_rng(seed), 0.0
        self.fleet = Fleet(replicas, places=2)
        self.places: list[dict[int, int]] = [{} for _ in range(replicas)]  # tokens that are left, by place

    def passes(self) -> list[Assigned]:
        """Steps end on some replicas; returns the requests that ended with them."""
        self.now += float(self.rng.exponential(0.03))
        ended = []
        for replica in np.flatnonzero(self.rng.random(len(self.fleet)) < 0.4).tolist():
            places = [place for place in self.places[replica] if self.rng.random() < 0.8]
            if not places:
                continue
            tokens = self.rng.integers(1, 5, len(places))
            self.fleet.take(replica, np.array(places), tokens, self.now)
            for place, count in zip(places, tokens.tolist(), strict=True):
                self.places[replica][place] -= count
                if self.places[replica][place] <= 0:
                    del self.places[replica][place]
                    known = self.fleet[replica][list(self.fleet._open[replica]).index(place)]
                    self.fleet.end(replica, place)
                    ended.append(known)
        self.fleet.check_integrity()
        return ended

    def comes(self, request: Assigned, replica: int) -> None:
        self.places[replica][self.fleet.add(replica, request)] = int(self.rng.integers(1, 40))


@pytest.mark.parametrize("seed", range(2))
def test_least_loaded_chooses_as_one_that_looks_at_every_request(seed: int) -> None:
    """Of two loads that differ by rounding alone either may be chosen: they are added up in another order."""
    traffic, fast, slow = Traffic(5, seed), LeastLoaded(COSTS, LIMITS), oracles.LeastLoaded(COSTS, LIMITS)
    for _ in range(150):
        for known in traffic.passes():
            fast.ended(known)
            slow.ended(known)
        request = arrival(traffic.rng, traffic.now)
        loads = [sum(map(slow.work_s, replica)) for replica in traffic.fleet]
        assert fast.loads_s(traffic.fleet) == pytest.approx(loads, rel=1e-12, abs=1e-12)
        chosen = fast.choose(request, traffic.fleet, traffic.now)
        assert loads[chosen] == pytest.approx(min(loads), rel=1e-12, abs=1e-12)
        assert fast.choose(request, list(traffic.fleet), traffic.now) == chosen  # lists, as in front of real servers
        traffic.comes(request, chosen if traffic.rng.random() < 0.7 else int(traffic.rng.integers(5)))


@pytest.mark.parametrize("seed", range(2))
def test_slo_aware_chooses_as_one_that_looks_at_every_step_and_request(seed: int) -> None:
    traffic, fast, slow = Traffic(4, seed), SloAware(COSTS, LIMITS), oracles.SloAware(COSTS, LIMITS)
    everyone = np.arange(4)
    for _ in range(50):
        traffic.passes()
        request, replicas = arrival(traffic.rng, traffic.now), list(traffic.fleet)
        off, fullness = fast.off_pace(traffic.fleet, everyone, traffic.now)
        slowly = [slow.off_pace(replica, traffic.now) for replica in replicas]
        assert off.tolist() == [each for each, _ in slowly]
        assert fullness == pytest.approx([each for _, each in slowly], rel=1e-9)
        chosen = fast.choose(request, traffic.fleet, traffic.now)
        assert chosen == slow.choose(request, replicas, traffic.now)
        assert chosen == fast.choose(request, replicas, traffic.now)
        traffic.comes(request, chosen if traffic.rng.random() < 0.7 else int(traffic.rng.integers(4)))


@pytest.mark.parametrize(("e2e_slo_s", "off_pace"), [(None, 0), (1e6, 0), (10.001, 1)])
def test_a_deadline_that_no_step_can_keep_puts_its_request_off_pace(e2e_slo_s: float | None, off_pace: int) -> None:
    """256 tokens are expected, in 1 ms: no step of the machine brings 256,000 tokens per second."""
    fleet = Fleet.of([[Assigned("chat", 10, 0.0, None, None, received=1, first_token_s=9.0, e2e_slo_s=e2e_slo_s)]])
    found, _ = SloAware(COSTS, LIMITS).off_pace(fleet, np.zeros(1, np.int64), 10.0)
    assert found.tolist() == [off_pace]


def test_a_sample_of_all_replicas_is_all_and_a_smaller_one_its_best() -> None:
    """What is chosen is the best of some d replicas, another d each time, the same when it is done again."""
    traffic, every = Traffic(6, 1), SloAware(COSTS, LIMITS)
    for _ in range(60):
        traffic.passes()
        traffic.comes(arrival(traffic.rng, traffic.now), int(traffic.rng.integers(6)))
    requests = [arrival(traffic.rng, traffic.now) for _ in range(40)]
    whole = [every.choose(each, traffic.fleet, traffic.now) for each in requests]

    def choices(name: str) -> list[int]:
        router = find_router(name)(COSTS, LIMITS)
        return [router.choose(each, traffic.fleet, traffic.now) for each in requests]

    assert choices("slo-aware:6") == choices("slo-aware:900") == whole
    assert choices("slo-aware:2") == choices("slo-aware:2") != whole
    ones, twos = choices("slo-aware:1"), choices("slo-aware:2")
    assert set(ones) == set(range(6))
    agree = [sum(a == b for a, b in zip(few, whole, strict=True)) for few in (ones, twos, choices("slo-aware:5"))]
    assert agree == sorted(agree)


@pytest.mark.parametrize("name", ["slo-aware:", "slo-aware:0", "slo-aware:-1", "slo-aware:two", "slo-aware:²"])
def test_a_sample_of_no_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="d is how many replicas are looked at, at least 1, got"):
        find_router(name)


def test_rows_without_records_are_those_of_the_records() -> None:
    trace = fluctuating_trace(seed=2, rate_rps=9.0, ttft_slo_s=4.0)
    trace = Trace("short", "", tuple(replace(each, output_tokens=9) for each in trace.requests[:30]))
    plan = SimulationPlan((), router="least-loaded", max_requests=8, keep_token_times=False)
    kept = simulate("spec:2", plan, MACHINE, trace, replicas=3)
    columns = simulate("spec:2", replace(plan, keep_records=False), MACHINE, trace, replicas=3)
    assert columns.records == [] and columns.columns is columns.outcomes and kept.outcomes is kept.records
    assert columns.wall_s == kept.wall_s
    for one, other in zip(*(summarize(each.outcomes, wall_s=1.0) for each in (kept, columns)), strict=True):
        for name, value in asdict(one).items():
            is_number = isinstance(value, float)
            assert asdict(other)[name] == (pytest.approx(value, rel=1e-12) if is_number else value), name
