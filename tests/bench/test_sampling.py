"""Samples of an engine that is measured, and of one that is simulated."""

import time
from itertools import count, pairwise

import pytest

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import Sampler, run_bench
from adaserve_jax.results.run_folder import RunResults
from adaserve_jax.results.samples import SAMPLE_S
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimSampler, SimulationPlan, simulate, together
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from adaserve_jax.workloads.workload import load_workload

ABOUT = {"run_id": "r", "point": "p"}


class Clock:
    """Each wait ends so much too late, the last one because it is over."""

    def __init__(self, *late_s: float):
        self.now_s, self.late_s = 50.0, iter(late_s)

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        late_s = next(self.late_s, None)
        self.now_s += seconds / 2 if late_s is None else seconds + late_s
        return late_s is None


@pytest.mark.parametrize(
    ("late", "times"),
    [
        ((0.0, 0.0, 0.0), (1.0, 2.0, 3.0, 3.5)),
        ((0.0, 0.4, 0.0), (1.0, 2.4, 3.0, 3.5)),
        ((0.0, 2.7, 0.0), (1.0, 4.7, 5.0, 5.5)),
        ((), (0.5,)),
    ],
)
def test_samples_come_at_their_times_and_none_is_made_up_for(late: tuple[float, ...], times: tuple[float, ...]):
    """Times in SAMPLE_S: one at each, and one at the end."""
    steps, clock = count(100, 10), Clock(*(each * SAMPLE_S for each in late))
    with Sampler(lambda: StepStats(steps=next(steps)), now=clock.now, wait=clock.wait) as sampler:
        pass
    samples = sampler.samples(**ABOUT, start_s=50.0)
    assert [s.steps for s in samples] == [10 * (i + 1) for i in range(len(samples))]
    assert [s.t_s / SAMPLE_S for s in samples] == pytest.approx(times, abs=1e-6)


def test_samples_of_a_real_clock_end_with_what_is_measured():
    steps = count()
    with Sampler(lambda: StepStats(steps=next(steps))) as sampler:
        start_s = time.monotonic()
        time.sleep(1.5 * SAMPLE_S)
        ended_s = time.monotonic()
    samples = sampler.samples(**ABOUT, start_s=start_s)
    assert len(samples) >= 2 and all(b.t_s > a.t_s for a, b in pairwise(samples))
    assert samples[-1].t_s >= ended_s - start_s - 1e-6 and samples[0].run_id == "r"


def test_what_goes_wrong_while_sampling_is_raised():
    answers = iter([StepStats()])
    with pytest.raises(RuntimeError, match="StopIteration"), Sampler(lambda: broken(answers)):
        pass
    with pytest.raises(ValueError, match="of the run itself"), Sampler(lambda: broken(iter([StepStats()]))):
        raise ValueError("of the run itself")


def broken(answers) -> StepStats:
    try:
        return next(answers)
    except StopIteration as error:
        raise RuntimeError(repr(error)) from error


def test_an_engine_that_cannot_be_seen_has_no_samples():
    with Sampler(lambda: None) as sampler:
        pass
    assert sampler.samples(**ABOUT, start_s=0.0) == []


def test_a_bench_writes_the_samples_of_each_point_without_its_warm_up(make_bench, tmp_path):
    engine = make_bench("ar")
    steps = count()
    engine.stats = lambda: StepStats(steps=next(steps), running=2)
    began_s = time.monotonic()
    run_bench(BenchPlan(("ar", "spec:4"), (60.0,), 0.25), load_workload(), lambda: engine, tmp_path)
    took_s, folder = time.monotonic() - began_s, RunResults.load(tmp_path)
    assert {point for _, point in folder.samples} == {"ar@60/s", "spec:4@60/s"}
    for samples in folder.samples.values():
        assert [s.steps for s in samples] == list(range(1, len(samples) + 1)), "counts begin with the point"
        assert samples[0].running == 2 and samples[-1].t_s <= took_s


def trace(requests: int) -> Trace:
    made = tuple(TraceRequest(0.1 * i, 50, 40, SLO(tpot_ms=50), "chat") for i in range(requests))
    return Trace("made", "0" * 64, made)


@pytest.mark.parametrize("replicas", [1, 3])
def test_samples_of_a_simulation_add_up_to_what_its_records_say(replicas: int):
    machine = load_machine("llama-70b")
    done = simulate("spec:4", SimulationPlan(("spec:4",)), machine, trace(40), replicas=replicas, sample=True, **ABOUT)
    samples = done.samples
    assert all(b.t_s >= a.t_s + SAMPLE_S - 1e-6 or int(b.t_s / SAMPLE_S) > int(a.t_s / SAMPLE_S)
               for a, b in pairwise(samples[:-1]))  # fmt: skip
    assert len(samples) <= done.wall_s / SAMPLE_S + 2
    last = samples[-1]
    tokens, accepted = (sum(getattr(r, name) for r in done.records) for name in ("output_tokens", "accepted_tokens"))
    assert (last.t_s, last.generation_tokens, last.accepted_tokens) == (pytest.approx(done.wall_s), tokens, accepted)
    assert last.steps == sum(stats.steps for stats in done.stats) and last.running == 0
    for earlier, later in pairwise(samples):
        assert later.steps > earlier.steps and later.verify_s > earlier.verify_s
    assert max(s.running for s in samples) > 1 and all(s.depth in (0, 4) for s in samples)
    assert all(s.plan_s == s.select_s == s.commit_s == 0 for s in samples)
    assert all(s.pages_total == replicas * samples[0].pages_total // replicas and s.draft_resident for s in samples)
    assert simulate("spec:4", SimulationPlan(("spec:4",)), machine, trace(4)).samples == []


def test_of_several_replicas_counts_are_added_and_depths_the_greatest():
    replicas = [
        StepStats(
            steps=3,
            running=2,
            last_depth=4,
            last_verified_tree_tokens=9,
            draft_resident=True,
            elastic_moves={"expand": 1},
        ),
        StepStats(
            steps=5,
            running=1,
            last_depth=2,
            last_verified_tree_tokens=6,
            draft_resident=False,
            elastic_moves={"expand": 2},
        ),
    ]
    every = together(replicas)
    assert (every.steps, every.running, every.last_depth, every.last_verified_tree_tokens) == (8, 3, 4, 15)
    assert not every.draft_resident and sum(every.elastic_moves.values()) == 3


def test_samples_of_a_long_simulation_are_further_apart():
    sampler = SimSampler(lambda: [StepStats()], **ABOUT, duration_s=24 * 3600.0)
    for step in range(1000):
        sampler.note(step * 0.1)
    assert 35 <= len(sampler.samples) <= 42  # 86400 s in 36000: every 2.4 s of 100 s
