"""The engine thread around a simulated machine: failures, ends, aborts, and what is refused before anything runs."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine import build as assembly
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.engine.llm import LLM
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from adaserve_jax.types import CostSamples, Progress, SamplingParams, Sequence
from tests.engine.simulated import Machine, Spelling
from tests.waiting import PATIENCE_S, wait_until

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


class Reader:
    """A sink that keeps what it gets, and fails at one chunk when asked to."""

    def __init__(self, fails_at: int = -1):
        self.chunks: list[OutputChunk] = []
        self.ends: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        self.fails_at = fails_at

    def __call__(self, chunk: OutputChunk) -> None:
        self.chunks.append(chunk)
        if len(self.chunks) - 1 == self.fails_at:
            raise ValueError("a reader's bug")
        if chunk.finish_reason is not None:
            self.ends.put(chunk)

    def end(self) -> OutputChunk:
        return self.ends.get(timeout=PATIENCE_S)


def request_of(name: str, sampling: SamplingParams = LONG, prompt: int = 3) -> GenerateRequest:
    return GenerateRequest(name, [5] * prompt, sampling)


def fail() -> None:
    raise RuntimeError("out of device memory")


@pytest.mark.parametrize("step", [0, 5])
def test_a_failing_executor_ends_every_request_and_refuses_more(
    engine: LocalEngine, machines: list[Machine], step: int
) -> None:
    gate, left = threading.Event(), iter(range(step + 1))

    def hold_then_fail() -> None:
        gate.wait(PATIENCE_S)
        if next(left, step) == step:
            fail()

    machines[0].before_step = hold_then_fail
    readers = [Reader(), Reader(fails_at=0) if step == 0 else Reader(), Reader()]
    for index, reader in enumerate(readers):
        engine.submit(request_of(f"q{index}", replace(LONG, n=2)), reader)
    gate.set()
    for reader in (readers[0], readers[2]):
        ends = [reader.end(), reader.end()]
        assert [end.finish_reason for end in ends] == ["error", "error"]
        assert {end.choice for end in ends} == {0, 1}
        assert ends[0].error == "the engine stopped: RuntimeError: out of device memory"
    assert not engine.is_alive()
    with pytest.raises(EngineDeadError, match="out of device memory"):
        engine.submit(request_of("late"), Reader())
    engine.abort("q0")
    assert engine.stats().compiles_after_ready == 0


def test_a_failing_sink_costs_its_own_request_only(engine: LocalEngine) -> None:
    bad, good = Reader(fails_at=1), Reader()
    engine.submit(request_of("bad"), bad)
    engine.submit(request_of("good"), good)
    assert good.end().finish_reason == "length"
    assert len(bad.chunks) == 2
    wait_until(lambda: engine.stats().scheduler.pages_used == 0)
    assert engine.stats().scheduler.finished["abort"] == 1
    again = Reader()
    engine.submit(request_of("bad"), again)
    assert again.end().finish_reason == "length"


def test_closing_ends_open_requests_and_an_engine_starts_once(engine: LocalEngine, machines: list[Machine]) -> None:
    started, reader = threading.Event(), Reader()
    machines[0].before_step = lambda: (started.set(), time.sleep(0.005))
    engine.submit(request_of("q"), reader)
    assert started.wait(PATIENCE_S)
    engine.close()
    end = reader.end()
    assert (end.finish_reason, end.error) == ("error", "the engine was closed")
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit(request_of("late"), Reader())
    with pytest.raises(EngineDeadError, match="starts once"):
        engine.start()


def test_what_ended_in_the_last_step_before_a_close_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where text is decoded beside the next step, which does not come."""
    machine = Machine(EngineConfig())
    machine.leaves_host_free = True
    monkeypatch.setattr(assembly, "load_executor", lambda *_, **__: machine)
    monkeypatch.setattr(assembly, "Tokenizer", SimpleNamespace(from_folder=lambda folder: Spelling()))
    engine, long, short = LocalEngine(EngineConfig()), Reader(), Reader()
    began, both, steps = threading.Event(), threading.Event(), iter(range(9))
    closing = threading.Thread(target=engine.close)

    def close_in_the_second_step() -> None:
        if next(steps) == 0:
            began.set()
            both.wait(PATIENCE_S)
        else:
            closing.start()
            wait_until(lambda: not engine.is_alive())

    engine.start()
    machine.before_step = close_in_the_second_step
    engine.submit(request_of("long"), long)
    assert began.wait(PATIENCE_S)
    engine.submit(request_of("short", replace(LONG, max_tokens=1)), short)
    both.set()
    assert long.end().error == "the engine was closed"
    end = short.end()
    assert end.finish_reason == "length" and len(end.token_ids) == 1
    closing.join(PATIENCE_S)


def test_nothing_works_before_start() -> None:
    engine = LocalEngine(EngineConfig())
    for call in (
        lambda: engine.submit(request_of("q"), Reader()),
        lambda: engine.set_policy("ar"),
        lambda: engine.info,
    ):
        with pytest.raises(EngineDeadError, match="not ready: call start"):
            call()
    assert not engine.is_alive()
    engine.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(policy="fast"), "unknown policy 'fast'"),
        (EngineConfig(policy="spec:7"), "spec:7 needs max_depth of at least 7, but it is 6"),
        (
            EngineConfig(policy="spec:2", draft=None),
            "spec:2 needs a draft, but there is none; load one, or choose ar or spec:2@suffix",
        ),
    ],
)
def test_a_policy_that_cannot_run_is_refused_before_anything_loads(
    machines: list[Machine], config: EngineConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalEngine(config).start()
    assert machines == []


def test_a_start_that_fails_frees_the_device(machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: Machine, progress: Progress | None = None, samples: CostSamples | None = None) -> CostSamples:
        raise RuntimeError("no room to compile")

    monkeypatch.setattr(Machine, "warm_up", warm_up)
    engine = LocalEngine(EngineConfig())
    with pytest.raises(RuntimeError, match="no room"):
        engine.start()
    assert machines[0].closed == 1
    engine.close()
    assert machines[0].closed == 1


def test_an_engine_that_is_closed_while_it_starts_frees_the_device(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, warm_up = LocalEngine(EngineConfig()), Machine.warm_up

    def closing(*given: Any) -> CostSamples:
        engine.close()
        return warm_up(*given)

    monkeypatch.setattr(Machine, "warm_up", closing)
    with pytest.raises(EngineDeadError, match="the engine was closed while it started"):
        engine.start()
    assert machines[0].closed == 1 and not engine.is_alive()


def test_a_pool_smaller_than_the_baseline_measurement(machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "load_executor", lambda config, _, **__: Machine(config, page_size=8, num_pages=1))
    with_one_page = LocalEngine(EngineConfig())
    with_one_page.start()
    assert with_one_page.info.baseline_s > 0
    with_one_page.close()


def test_what_can_never_be_served_is_refused_at_once(engine: LocalEngine) -> None:
    with pytest.raises(RequestError, match=r"context length is 48 tokens, .*, got a prompt of 48"):
        engine.submit(request_of("long", prompt=48), Reader())
    with pytest.raises(RequestError, match="token ids must be from 0 to 39, got 40"):
        engine.submit(GenerateRequest("odd", [40]), Reader())
    with pytest.raises(RequestError, match="n must be at most 8") as caught:
        engine.submit(request_of("wide", replace(LONG, n=9)), Reader())
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")


def test_a_full_queue_and_a_second_request_of_the_same_id(engine: LocalEngine, machines: list[Machine]) -> None:
    gate = threading.Event()
    machines[0].before_step = lambda: gate.wait(PATIENCE_S)
    reader = Reader()
    engine.submit(request_of("first", replace(LONG, n=4)), reader)
    wait_until(lambda: engine.stats().scheduler.running == 4)
    with pytest.raises(RequestError, match="'first' is in flight already"):
        engine.submit(request_of("first"), reader)
    engine.submit(request_of("second", replace(LONG, n=8)), reader)
    with pytest.raises(QueueFullError, match="8 requests wait and at most 8 may"):
        engine.submit(request_of("third"), reader)
    with pytest.raises(ConfigError, match=r"needs an idle engine; 2 requests are open"):
        engine.set_policy("ar")
    gate.set()
    assert {reader.end().finish_reason for _ in range(12)} == {"length"}


def test_a_request_whose_preparation_cannot_begin_leaves_nothing(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "prepare", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.submit(request_of("q", replace(LONG, n=8)), Reader())
    reader = Reader()
    engine.submit(request_of("q", replace(LONG, n=8)), reader)
    assert {reader.end().finish_reason for _ in range(8)} == {"length"}
    engine.set_policy("ar")


def test_an_abort_of_an_ended_request_does_not_stop_a_change_of_policy(engine: LocalEngine) -> None:
    ended, gate = threading.Event(), threading.Event()

    def hold_at_the_end(chunk: OutputChunk) -> None:
        if chunk.finish_reason is not None:
            ended.set()
            gate.wait(PATIENCE_S)

    engine.submit(request_of("q"), hold_at_the_end)
    assert ended.wait(PATIENCE_S)
    engine.abort("q")  # stays in the inbox: the engine's thread is held
    engine.set_policy("ar")
    gate.set()
    reader = Reader()
    engine.submit(request_of("q"), reader)
    assert reader.end().finish_reason == "length"
    assert (engine.info.policy, engine.info.drafts) == ("ar", ("default",))


def test_a_refusal_after_submit_says_what_it_was(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: GenerateRequest, arrival_s: float, shared: object, draft: int) -> None:
        raise RequestError("too large after all", param="max_tokens", code="context_length_exceeded")

    monkeypatch.setattr(engine._core, "add", refuse)
    reader = Reader()
    engine.submit(request_of("q"), reader)
    end = reader.end()
    assert (end.error, end.error_code, end.error_param) == (
        "too large after all",
        "context_length_exceeded",
        "max_tokens",
    )


def test_a_request_that_cannot_be_added_does_not_stop_the_others(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = engine._core._tracker.add

    def fail_at_second(request_id: str, sequence: Sequence) -> None:
        if sequence.sequence_id == "q/1":
            raise KeyError("no such format")
        add(request_id, sequence)

    monkeypatch.setattr(engine._core._tracker, "add", fail_at_second)
    readers = [Reader(), Reader()]
    engine.submit(request_of("q", replace(LONG, n=2)), readers[0])
    engine.submit(request_of("other"), readers[1])
    end = readers[0].end()
    assert (end.finish_reason, end.error_code) == ("error", "engine_error")
    assert end.error == "the engine failed on this request's parameters; it goes on with the others"
    assert readers[1].end().finish_reason == "length"
    assert engine.is_alive() and engine.stats().scheduler.finished == {"length": 1}
    assert "the engine failed on a request's parameters" in caplog.text


def test_an_llm_loads_no_tokenizer_of_its_own(engine: LocalEngine) -> None:
    assert LLM.over(engine).tokenizer is engine.assembly.tokenizer


def test_stats_are_a_snapshot(engine: LocalEngine) -> None:
    before = engine.stats()
    reader = Reader()
    engine.submit(request_of("q"), reader)
    reader.end()
    assert (before.scheduler.steps, before.scheduler.finished) == (0, {})
    after = engine.stats().scheduler
    assert after.steps > 0 and after.finished == {"length": 1}


def test_a_step_after_a_long_idle_time_is_not_late(engine: LocalEngine, machines: list[Machine]) -> None:
    time.sleep(0.3)
    gate, entered = threading.Event(), threading.Event()
    machines[0].before_step = lambda: (entered.set(), gate.wait(PATIENCE_S))
    assert engine.stats().step_age_s == 0
    reader, submitted = Reader(), time.monotonic()
    engine.submit(request_of("q"), reader)
    assert entered.wait(PATIENCE_S)
    age = engine.stats().step_age_s
    assert 0 < age <= time.monotonic() - submitted
    wait_until(lambda: engine.stats().step_age_s > age + 0.1)
    gate.set()
    reader.end()


def test_an_abort_ends_all_choices_and_unknown_ids_are_ignored(engine: LocalEngine, machines: list[Machine]) -> None:
    gate = threading.Event()
    machines[0].before_step = lambda: gate.wait(PATIENCE_S)
    reader = Reader()
    engine.submit(request_of("q", replace(LONG, n=3)), reader)
    engine.abort("q")
    engine.abort("nobody")
    gate.set()
    assert [reader.end().finish_reason for _ in range(3)] == ["abort"] * 3
    wait_until(lambda: engine.stats().scheduler.pages_used == 0)
    assert all(chunk.metrics is not None for chunk in reader.chunks if chunk.finish_reason)
