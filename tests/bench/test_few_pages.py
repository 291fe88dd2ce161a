"""Simulated machines with few KV pages: what the draft's memory is worth as pages, and what the command says of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.simulate import simulate_all
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.sim.executor import ElasticTimes
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import Simulated, SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace

MACHINE = replace(load_machine("llama-70b"), acceptance={"chat": 0.2})
"""With a draft that is hardly of use."""
FEW = SimulationPlan(("nightjar",), num_pages=120, extension_pages=40, keep_token_times=False)


def trace(rate: float = 4.0, count: int = 90, prompt: int = 250, output: int = 160) -> Trace:
    """Poisson; each request takes six or seven pages of 64 tokens at its end."""
    due = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    requests = tuple(TraceRequest(float(at), prompt, output, SLO(), "chat") for at in due)
    return Trace("made", "0" * 64, requests)


def mean_running(simulated: Simulated) -> float:
    """Requests that hold a slot, on average."""
    busy_s = sum(
        record.ttft_s - record.queue_s + (record.output_tokens - 1) * record.tpot_s for record in simulated.records
    )
    return busy_s / simulated.wall_s


def test_under_load_more_requests_run_at_once_and_more_tokens_come_than_where_the_draft_stays() -> None:
    """A third more pages: measured, a fifth more of both."""
    on, off = (simulate("nightjar", replace(FEW, elastic=each), MACHINE, trace()) for each in ("on", "off"))
    assert mean_running(on) > 1.1 * mean_running(off)
    tokens = 90 * 160
    assert tokens / on.wall_s > 1.08 * tokens / off.wall_s
    assert on.stats[0].elastic_moves["expand"] >= 1 and off.stats[0].elastic_moves == {}
    assert on.stats[0].generation_tokens == off.stats[0].generation_tokens == tokens


def test_without_a_number_pages_never_run_out_and_nothing_swaps() -> None:
    plan = replace(FEW, num_pages=0, extension_pages=40, elastic="on")
    simulated = simulate("nightjar", plan, MACHINE, trace(count=30))
    assert simulated.stats[0].elastic_moves == {} and simulated.stats[0].preemptions == 0
    assert plan.limits(MACHINE).num_pages == 64 * 64, "64 requests of 4096 tokens"


def test_the_rule_that_a_plan_carries_is_the_one_in_force() -> None:
    """A window that no run is long enough for."""
    plan = replace(FEW, elastic="on", elastic_rule=ElasticRule(persist_steps=10**6))
    assert simulate("nightjar", plan, MACHINE, trace(count=60)).stats[0].elastic_moves == {}


def test_a_pool_that_the_longest_request_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages must hold the longest request of made, which takes 7 pages of 64"):
        simulate("ar", replace(FEW, num_pages=6), MACHINE, trace(count=3))


def test_a_prompt_longer_than_the_machines_context_is_refused_before_anything_runs() -> None:
    long = trace(count=3)
    long = replace(long, requests=(*long.requests[:2], replace(long.requests[2], prompt_tokens=4096)))
    expected = "made has a prompt of 4096 tokens, but the machine's context holds 4096, and an output needs one"
    with pytest.raises(ConfigError, match=expected):
        simulate_all(replace(FEW, policies=("ar",)), MACHINE, [trace(count=3), long], lambda *_: pytest.fail("it ran"))


def test_rows_say_how_many_pages_there_were() -> None:
    rows = simulate_all(replace(FEW, policies=("ar",), elastic="off"), MACHINE, [trace(count=5)])
    assert {(row.num_pages, row.extension_pages, row.elastic) for row in rows} == {(120, 40, "off")}


class TestSwapTimes:
    def test_of_packaged_machines_are_published_and_by_the_size_of_the_draft(self) -> None:
        assert load_machine("llama-70b").elastic_times == ElasticTimes(0.1439, 0.0119, 0.125)
        assert load_machine("qwen-32b").elastic_times == ElasticTimes(0.1439, 0.0119, 0.05)

    def test_that_a_machine_does_not_say_are_the_published_ones(self) -> None:
        assert replace(MACHINE, swap_ms={"load": 1000.0}).elastic_times == ElasticTimes(load_s=1.0)

    @pytest.mark.parametrize(("swap_ms", "got"), [('{"reload": 3}', "{'reload': 3}"), ('{"load": -1}', "{'load': -1}")])
    def test_wrong_ones_are_refused(self, tmp_path: Path, swap_ms: str, got: str) -> None:
        packaged = Path(load_machine.__code__.co_filename).parent / "data" / "machines" / "llama-70b.json"
        values, _, _ = packaged.read_text().partition('"swap_ms"')
        path = tmp_path / "machine.json"
        path.write_text(f'{values}"swap_ms": {swap_ms}}}')
        with pytest.raises(ConfigError, match=f"at least 0 for some of expand, contract, load, got {got}"):
            load_machine(str(path))
