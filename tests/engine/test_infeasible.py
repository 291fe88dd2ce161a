"""Targets out of reach through the thread mode and the Python API, in both settings. A step takes 10 ms and 0.1 ms a
token: one token alone takes 10.1 ms."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import RequestError
from tests.engine.simulated import Machine
from tests.engine.test_core import core_of
from tests.waiting import PATIENCE_S

SHORT = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
LEAST = r"slo_tpot_ms must be at least 10\.1 ms, .* got 5 ms; ask for a longer time"
Start = Callable[[str], LocalEngine]


@pytest.fixture
def start(machines: list[Machine]) -> Iterator[Start]:
    started: list[LocalEngine] = []

    def begin(infeasible_slo: str) -> LocalEngine:
        started.append(LocalEngine(EngineConfig(max_waiting=8, policy="ar", infeasible_slo=infeasible_slo)))
        started[-1].start()
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


def refusing_core() -> EngineCore:
    return core_of("ar", infeasible_slo="refuse")


def test_best_effort_serves_and_says_so(start: Start) -> None:
    llm = LLM.over(start("best_effort"))
    slos = [SLO(tpot_ms=5), SLO(tpot_ms=60_000), SLO(), SLO(relative=0.1), SLO(ttft_ms=1)]
    outputs = llm.generate([[3]] * 5, SHORT, slo=slos)
    assert [output.metrics.slo_feasible for output in outputs] == [False, True, None, False, False]
    assert outputs[0].metrics.tpot_slo_s == 0.005
    assert len({tuple(output.token_ids) for output in outputs}) == 1 and len(outputs[0].token_ids) == 4
    (last,) = [c for c in llm.stream([3], SHORT, slo=SLO(tpot_ms=5)) if c.metrics is not None]
    assert last.metrics is not None and last.metrics.slo_feasible is False


def test_refusing_raises_what_could_be_had_and_the_engine_goes_on(start: Start) -> None:
    """The least target is exact before the first step; later it has the overhead of a busy machine in it."""
    engine = start("refuse")
    llm = LLM.over(engine)
    with pytest.raises(RequestError, match=LEAST):
        list(llm.stream([3], SHORT, slo=SLO(tpot_ms=5)))
    assert llm.generate([3], SHORT, slo=SLO(tpot_ms=10.1))[0].metrics.slo_feasible is True
    later = r"slo_tpot_ms must be at least [\d.]+ ms, .* got 5 ms; ask for a longer time"
    with pytest.raises(RequestError, match=later) as caught:
        llm.generate([[3], [3]], SHORT, slo=[SLO(tpot_ms=60_000), SLO(tpot_ms=5)])
    assert (caught.value.code, caught.value.param) == ("slo_infeasible", "slo_tpot_ms")
    assert llm.generate([3], SHORT)[0].metrics.slo_feasible is None
    assert engine.stats().scheduler.pages_used == 0


def test_every_choice_of_a_refused_request_ends_with_the_reason(start: Start) -> None:
    ends: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
    sampling = SamplingParams(max_tokens=4, n=3)
    start("refuse").submit(GenerateRequest("q", [3], sampling, SLO(tpot_ms=5)), ends.put)
    chunks = [ends.get(timeout=PATIENCE_S) for _ in range(3)]
    assert sorted(chunk.choice for chunk in chunks) == [0, 1, 2]
    assert {(c.finish_reason, c.error_code, c.error_param) for c in chunks} == {
        ("error", "slo_infeasible", "slo_tpot_ms")
    }
    assert ends.empty()


def test_a_refused_request_leaves_nothing_behind() -> None:
    core = refusing_core()
    with pytest.raises(RequestError, match=LEAST):
        core.add(GenerateRequest("q", [3], SamplingParams(n=4), SLO(tpot_ms=5)), 0.0)
    assert (core.num_open, core.has_work, core.scheduler.stats.finished) == (0, False, {})
    core.add(GenerateRequest("q", [3], SamplingParams(n=4), SLO(tpot_ms=50)), 0.0)
    assert core.num_open == 4


def test_a_relative_target_is_refused_by_the_name_that_it_was_asked_by(start: Start) -> None:
    said = r"slo_relative 0\.1 is out of reach: slo_tpot_ms must be at least 10\.1 ms, .* got"
    with pytest.raises(RequestError, match=said) as caught:
        list(LLM.over(start("refuse")).stream([3], SHORT, slo=SLO(relative=0.1)))
    assert (caught.value.code, caught.value.param) == ("slo_infeasible", "slo_relative")


@pytest.mark.parametrize(("deadline_ms", "min_tokens", "feasible"), [(30, 0, True), (30, 4, False), (41, 4, True)])
def test_a_deadline_is_judged_by_the_fewest_tokens_of_the_output(
    start: Start, deadline_ms: float, min_tokens: int, feasible: bool
) -> None:
    """A prompt of one token and each token take some 10 ms."""
    sampling = replace(SHORT, min_tokens=min_tokens)
    output = LLM.over(start("best_effort")).generate([3], sampling, slo=SLO(e2e_ms=deadline_ms))[0]
    assert output.metrics.slo_feasible is feasible
