"""Replicas on one timeline: one is the plain loop, several lose and repeat nothing, a router knows only the past."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.bench.simulate import simulate_all
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.routing.fleet import Assigned, Fleet
from adaserve_jax.routing.routers import find_router
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.replica import Replica, run_cluster
from adaserve_jax.sim.simulation import ALWAYS_WAITS, SimulationPlan, simulate
from adaserve_jax.types import CostSamples, Limits, SamplingParams, Sequence
from adaserve_jax.workloads.traces import Trace, fluctuating_trace
from tests.scheduler.harness import run_step

MACHINE = load_machine("llama-70b")


def short_trace(count: int, *, rate: float = 3.0, output: int = 24) -> Trace:
    trace = fluctuating_trace(seed=5, rate_rps=rate, ttft_slo_s=4.0)
    requests = tuple(replace(r, output_tokens=output + i % 5) for i, r in enumerate(trace.requests[:count]))
    return Trace("short", "", requests)


def plain_loop(policy: str, trace: Trace, seed: int, drain_s: float) -> tuple[list[tuple], float]:
    """One engine and one clock: arrivals that are due, then a whole step, then again. What ended, and when."""
    clock, limits = VirtualClock(), MACHINE.limits()
    samples = MACHINE.samples(limits)
    seeds = np.random.default_rng(seed).integers(0, 2**63, len(trace.requests)).tolist()
    chance = {s: MACHINE.acceptance_of(r.slo_class) for s, r in zip(seeds, trace.requests, strict=True)}
    executor = SimExecutor(limits, samples, lambda rows: np.array([chance[s] for s in rows.tolist()]), clock)
    config = EngineConfig(policy=policy, seed=seed, max_waiting=ALWAYS_WAITS, prefix_cache=False)
    scheduler = Scheduler(config, limits, samples)
    ended, arrived = [], 0
    while arrived < len(trace.requests) or scheduler.has_work:
        while arrived < len(trace.requests) and trace.requests[arrived].due_s <= clock.now():
            asked = trace.requests[arrived]
            sampling = SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True)
            targets = {"tpot_slo_s": asked.slo.tpot_s(MACHINE.baseline_s), "ttft_slo_s": asked.slo.ttft_s}
            prompt = np.zeros(asked.prompt_tokens, np.int32)
            name, kind = f"{policy}-{arrived}", asked.slo_class
            scheduler.add(
                Sequence(name, prompt, sampling, seeds[arrived], asked.due_s, slo_class=kind, **targets)
            )  # fmt: skip
            arrived += 1
        result = run_step(scheduler, executor, clock.now)
        if result is None:
            clock.advance(max(trace.requests[arrived].due_s - clock.now(), 0.0))
            continue
        for update in result.updates:
            if update.metrics is not None:
                m = update.metrics
                ended.append((update.sequence_id, m.ttft_s, m.tpot_s, m.output_tokens, m.accepted_tokens))
        if clock.now() > trace.duration_s + drain_s:
            break
    return ended, clock.now()


def as_ended(records: list[RequestRecord]) -> list[tuple]:
    finished = [r for r in records if r.status == "finished"]
    return [(r.request_id, r.ttft_s, r.tpot_s, r.output_tokens, r.accepted_tokens) for r in finished]


@pytest.mark.parametrize(("policy", "drain_s"), [("spec:3", 600.0), ("adaserve", 600.0), ("exp3spec", 0.2)])
def test_one_replica_is_the_plain_loop(policy: str, drain_s: float) -> None:
    trace = short_trace(20, rate=6.0, output=10)
    expected, wall_s = plain_loop(policy, trace, 3, drain_s)
    found = simulate(policy, SimulationPlan((), seed=3, drain_s=drain_s, router="slo-aware"), MACHINE, trace)
    assert sorted(as_ended(found.records)) == sorted(expected)  # records are in the order of arrival
    assert found.wall_s == wall_s
    assert len(found.records) == 20


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "slo-aware"])
def test_every_request_ends_once_on_one_replica(router: str) -> None:
    trace = short_trace(24, rate=9.0, output=8)
    plan = SimulationPlan(("spec:2",), replicas=(3,), router=router)
    found = simulate("spec:2", plan, MACHINE, trace, replicas=3)
    assert sorted(r.request_id for r in found.records) == sorted(f"spec:2-{i}" for i in range(24))
    assert {r.replica for r in found.records} == {0, 1, 2}
    assert all(r.status == "finished" and r.ttft_s > 0 for r in found.records)
    assert {r.request_id: r.output_tokens for r in found.records} == {
        f"spec:2-{i}": request.output_tokens for i, request in enumerate(trace.requests)
    }
    assert found.wall_s == pytest.approx(
        max(r.due_s + r.ttft_s + r.token_offsets_s[-1] for r in found.records), abs=1e-9
    )


def test_rows_say_how_many_replicas_and_who_assigned() -> None:
    plan = SimulationPlan(
        ("spec:2",), max_requests=40, max_prefill_tokens=256, replicas=(1, 2), router="least-loaded",
        keep_token_times=False,
    )  # fmt: skip
    rows = [row for row in simulate_all(plan, MACHINE, [short_trace(20, output=8)]) if row.slo_class == ALL_CLASSES]
    assert [(row.replicas, row.router) for row in rows] == [(1, None), (2, "least-loaded")]
    assert {(row.max_requests, row.max_prefill_tokens, row.label) for row in rows} == {(40, 256, None)}
    assert {row.itl_p50_s for row in rows} == {None}
    assert rows[1].ttft_p99_s < rows[0].ttft_p99_s


class Watching:
    """A router that takes the replica given for each number, and notes what it was shown."""

    def __init__(self, choices: list[int]):
        self.choices = choices
        self.seen: list[list[list[tuple[float, int]]]] = []

    def choose(self, request: Assigned, replicas: list[list[Assigned]], now: float) -> int:
        self.seen.append([[(a.arrival_s, a.received) for a in assigned] for assigned in replicas])
        return self.choices[len(self.seen) - 1]

    def ended(self, request: Assigned) -> None: ...


LIMITS = Limits(8, (1, 8, 16), 16, 256, 64, 32, 2, 1)
SAMPLES = CostSamples(
    verify_s={(1, 8): 1.0, (8, 8): 1.0, (16, 8): 2.0}, catchup_s={16: 0.0}, draft_level_s={(8, 1): 0.125}
)


def test_a_router_sees_what_steps_have_brought_by_then_and_nothing_of_those_in_flight() -> None:
    """Steps of 1 s without a draft. Prompts of 4 tokens: the first token comes with the first step."""
    router = Watching([0, 0, 1, 0])
    ends: list[tuple[int, str, float]] = []

    def on_end(replica, request_id, known, metrics, status, token_offsets_s) -> None:  # type: ignore[no-untyped-def]
        ends.append((replica.index, request_id, replica.clock.now()))

    replicas, fleet = [], Fleet(2)
    for index in range(2):
        clock = VirtualClock()
        scheduler = Scheduler(EngineConfig(policy="ar"), LIMITS, SAMPLES)
        executor = SimExecutor(LIMITS, SAMPLES, 0.5, clock)
        replicas.append(Replica(index, scheduler, executor, clock, on_end, fleet=fleet))
    arrivals = [Assigned("a", 4, at, None, None) for at in (1.0, 1.5, 2.0, 3.25)]

    def deliver(number: int, known: Assigned, replica: Replica) -> None:
        asked = SamplingParams(max_tokens=2, ignore_eos=True)
        replica.add(Sequence(str(number), np.zeros(4, np.int32), asked, number, known.arrival_s), known)

    wall_s = run_cluster(replicas, router, fleet, arrivals, deliver, drain_s=100.0)
    assert router.seen == [
        [[], []],
        [[(1.0, 0)], []],  # its step is in flight from 1.0 to 2.0
        [[(1.0, 1), (1.5, 0)], []],  # ended at 2.0, which is now
        [[(1.5, 1)], [(2.0, 1)]],  # the first one ended at 3.0; the steps from 3.0 to 4.0 are in flight
    ]
    assert sorted(ends) == [(0, "0", 3.0), (0, "1", 4.0), (0, "3", 6.0), (1, "2", 4.0)]
    assert wall_s == 6.0


def router(name: str):
    return find_router(name)(CostTable(SAMPLES, LIMITS), LIMITS)


def test_round_robin_takes_turns() -> None:
    turns = router("round-robin")
    asked = Assigned("a", 4, 0.0, None, None)
    assert [turns.choose(asked, [[], [], []], 0.0) for _ in range(5)] == [0, 1, 2, 0, 1]


def work_s(loads, *requests: Assigned) -> float:
    return loads.loads_s(Fleet.of([list(requests)]))[0]


def test_least_loaded_weighs_prompts_and_expected_outputs_by_cost() -> None:
    """The table's slope: (2 - 1) s / (16 - 1) tokens = 1/15 s a prompt token; an output token 1/15 + 1/8 s."""
    loads = router("least-loaded")
    assert loads.prompt_token_s == pytest.approx(1 / 15)
    assert loads.output_token_s == pytest.approx(1 / 15 + 1 / 8)
    fresh = Assigned("a", 30, 0.0, None, None)
    assert work_s(loads, fresh) == pytest.approx(30 / 15 + 256 * (1 / 15 + 1 / 8))
    going = Assigned("a", 30, 0.0, None, None, received=250)
    assert work_s(loads, going) == pytest.approx(6 * (1 / 15 + 1 / 8))
    loads.ended(Assigned("a", 30, 0.0, None, None, received=56))
    assert loads.expected_output("a") == (256 + 56) / 2
    assert work_s(loads, going) == pytest.approx(1 / 15 + 1 / 8)  # longer than expected: at least one token is left
    long_prompt = Assigned("b", 3000, 0.0, None, None)
    assert loads.choose(fresh, [[long_prompt], [fresh, fresh], [going] * 3], 0.0) == 2
    assert loads.choose(fresh, [[long_prompt], [fresh, fresh]], 0.0) == 1
    assert loads.choose(fresh, [[fresh], [fresh]], 0.0) == 0


def off_pace(slo_aware, requests: list[Assigned]) -> tuple[int, float]:
    off, fullness = slo_aware.off_pace(Fleet.of([requests]), np.zeros(1, np.int64), 0.0)
    return off[0], fullness[0]


def test_slo_aware_counts_who_a_step_can_keep_on_pace() -> None:
    """The steps: 1 s up to 8 tokens and 2 s up to 16, each level of the draft 0.125 s; a chain of 1 brings 1.7 tokens.

    A target of 0.8 s needs 1.125 / 0.8 = 1.41 tokens of a step with a chain of 1: a root and a node. So a step of 8
    tokens keeps 4 of them on pace, and that of 16, at 2.125 s, none: 2.66 tokens, more than a chain of 2 brings.
    """
    slo_aware = router("slo-aware")
    tight = Assigned("tight", 1, 0.0, 0.8, None, received=1, first_token_s=0.0)
    assert off_pace(slo_aware, []) == (0, 0.0)
    assert off_pace(slo_aware, [tight] * 2) == (0, 4 / 8)
    assert off_pace(slo_aware, [tight] * 4) == (0, 8 / 8)
    assert off_pace(slo_aware, [tight] * 5)[0] == 2  # five roots leave three nodes
    loose = Assigned("loose", 1, 0.0, 4.0, None, received=1, first_token_s=0.0)
    assert off_pace(slo_aware, [loose] * 8) == (0, 8 / 16)
    lost = Assigned("lost", 1, 0.0, 0.8, None, received=2, first_token_s=-100.0)
    assert off_pace(slo_aware, [lost])[0] == 1
    free = Assigned("free", 1, 0.0, None, None, received=1, first_token_s=0.0)
    assert off_pace(slo_aware, [free])[0] == 0


def test_slo_aware_reserves_what_prompts_need_by_their_target() -> None:
    """12 prompt tokens within 2 s: 6 in each step of 1 s, beside the roots of both requests."""
    slo_aware = router("slo-aware")
    waiting = Assigned("a", 12, 0.0, 4.0, 2.0)
    going = Assigned("b", 12, 0.0, 1.0, 2.0, received=1, first_token_s=0.0)
    assert off_pace(slo_aware, [waiting, going]) == (0, (2 + 6) / 8)
    assert off_pace(slo_aware, [replace(waiting, prompt_tokens=14), going])[0] == 1  # 2 s steps are too slow for b


def test_slo_aware_spreads_tight_targets_and_spares_those_on_pace() -> None:
    slo_aware = router("slo-aware")
    tight = Assigned("tight", 1, 0.0, 0.8, None, received=1, first_token_s=0.0)
    loose = Assigned("loose", 1, 0.0, 4.0, None, received=1, first_token_s=0.0)
    replicas: list[list[Assigned]] = [[], []]
    for request in (tight, tight, tight, tight):
        replicas[slo_aware.choose(request, replicas, 0.0)].append(request)
    assert [len(assigned) for assigned in replicas] == [2, 2]
    assert slo_aware.choose(tight, [[tight] * 4, [loose] * 5], 0.0) == 1  # least requests, but one would be late
    assert slo_aware.choose(loose, [[tight] * 4, [loose] * 5], 0.0) == 1


def test_an_unknown_router_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match="unknown router 'fast'; known routers are round-robin, least-loaded, slo-aware and slo-aware:<d>",
    ):
        find_router("fast")
