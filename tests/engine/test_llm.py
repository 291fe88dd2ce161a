"""The Python API over a simulated engine: batches of any size, whose fault an error is, what it says of bad prompts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import EngineDeadError, RequestError
from tests.engine.simulated import Machine, expected
from tests.slow import slow_after
from tests.waiting import wait_until

SHORT = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


@pytest.mark.parametrize("choices", slow_after(2, [1, 3, 8]))
def test_a_batch_larger_than_the_queue(engine: LocalEngine, choices: int) -> None:
    """The engine of these tests lets 8 wait."""
    prompts = [[2 + index % 30] * (1 + index % 5) for index in range(40)]
    outputs = LLM.over(engine).generate(prompts, replace(SHORT, n=choices))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        for index, choice in enumerate(output.choices):
            want = expected(GenerateRequest("", prompt, SHORT), index, 3, 48)
            assert (choice.token_ids, choice.text, choice.finish_reason) == (want.token_ids, want.text, "length")
            assert choice.metrics is not None
            assert choice.metrics.output_tokens == 4


def test_one_bad_prompt_stops_the_others(engine: LocalEngine) -> None:
    llm = LLM.over(engine)
    with pytest.raises(RequestError, match="maximum context length is 48 tokens"):
        llm.generate([[3], [3], [3] * 48], replace(SHORT, max_tokens=40))
    wait_until(lambda: not engine.stats().scheduler.pages_used)
    assert llm.generate("go on", SHORT)[0].finish_reason == "length"


def test_an_engine_that_dies_is_not_the_requests_fault(engine: LocalEngine, machines: list[Machine]) -> None:
    def fail() -> None:
        raise RuntimeError("lost the device")

    llm = LLM.over(engine)
    streamed = llm.stream("abc", replace(SHORT, max_tokens=40))
    next(streamed)
    machines[0].before_step = fail
    with pytest.raises(EngineDeadError, match="lost the device"):
        list(streamed)
    with pytest.raises(EngineDeadError, match="lost the device"):
        llm.generate("abc", SHORT)


def test_leaving_a_stream_early_stops_the_request(engine: LocalEngine, machines: list[Machine]) -> None:
    machines[0].before_step = lambda: time.sleep(0.002)
    for chunk in LLM.over(engine).stream("abc", replace(SHORT, max_tokens=40)):
        assert chunk.finish_reason is None
        break
    wait_until(lambda: not engine.stats().scheduler.running)
    assert engine.stats().scheduler.finished == {"abort": 1}


def test_token_ids_may_be_numpys(engine: LocalEngine) -> None:
    llm = LLM.over(engine)
    ids = np.array([3, 4, 5])
    wanted = llm.generate([3, 4, 5], SHORT)[0].token_ids
    assert llm.generate(ids, SHORT)[0].token_ids == wanted
    assert [output.token_ids for output in llm.generate([ids, [3, 4, 5]], SHORT)] == [wanted, wanted]
    assert llm.generate([], SHORT) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be texts or lists of token ids, got None"),
        ([None], "prompt must be a text or a list of token ids, got None"),
        ([[1.5]], "prompt must be a text or a list of token ids, got"),
        (["a", 5], "prompt must be a text or a list of token ids, got 5"),
        ("", "at least one token, got none"),
        ([[]], "at least one token, got none"),
        ([[3, -1]], "token ids must be from 0 to 39, got -1"),
    ],
)
def test_bad_prompts(engine: LocalEngine, prompts, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM.over(engine).generate(prompts, SHORT)


def test_one_value_for_all_or_one_per_prompt(engine: LocalEngine) -> None:
    llm = LLM.over(engine)
    outputs = llm.generate([[3], [3]], [SHORT, replace(SHORT, max_tokens=2)], slo=[SLO(tpot_ms=5), SLO(relative=2)])
    assert [len(output.token_ids) for output in outputs] == [4, 2]
    assert [output.metrics.tpot_slo_s for output in outputs] == [0.005, 2 * engine.info.baseline_s]
    with pytest.raises(RequestError, match=r"slo must be one for all or one per prompt \(2\), got 1"):
        llm.generate([[3], [3]], SHORT, slo=[SLO()])
    with pytest.raises(RequestError, match=r"slo must be one for all or one per prompt \(1\), got 0"):
        llm.generate([[3]], SHORT, slo=[])
    with pytest.raises(RequestError, match=r"sampling_params must be one for all or one per prompt \(1\), got 0"):
        llm.generate([[3]], [])
    with pytest.raises(RequestError, match=r"slo must be an SLO, such as SLO\(tpot_ms=40\), got 40"):
        llm.generate([[3]], SHORT, slo=40)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, got 'short'"):
        llm.generate([[3]], "short")  # type: ignore[arg-type]
