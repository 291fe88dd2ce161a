"""The benchmark of the simulator runs, and its load is what it says."""

import numpy as np
import pytest

from adaserve_jax.sim.machines import load_machine
from tests.bench.scripts import imported


@pytest.fixture(scope="module")
def benchmark():
    with imported("engine.simulator_speed") as found:
        yield found["simulator_speed"]


def test_the_load_is_a_poisson_stream_of_200_tokens(benchmark):
    trace = benchmark.trace_of(4000, 6.0)
    assert trace.rate_rps == pytest.approx(6.0, rel=0.06)
    gaps = np.diff([request.due_s for request in trace.requests])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)
    assert {request.output_tokens for request in trace.requests} == {200}
    share = np.mean([request.slo_class == "code" for request in trace.requests])
    assert share == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("policy", ["ar", "spec:4", "adaserve"])
def test_every_figure_is_measured(benchmark, policy):
    machine = load_machine("llama-70b")
    rates = benchmark.requests_per_minute(machine, policy, 4, benchmark.trace_of(3, 6.0), 2)
    assert len(rates) == 2 and min(rates) > 0
    phases = benchmark.phases_us(machine, policy, 4, 5)
    assert list(phases) == ["plan", "select", "executor", "commit"]
    assert all(value > 0 for value in phases.values())
