"""Schemas that are prepared while others are served, and grammars that break: what that costs, and whom."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax import LLM
from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.engine.build import Assembly
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import AdaServeError, QueueFullError, RequestError
from adaserve_jax.types import SamplingParams
from tests.engine.simulated import VOCAB, Machine, Spelling
from tests.engine.test_local import Reader, request_of
from tests.waiting import wait_until

PLAIN = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
ASKING = replace(PLAIN, json_schema="a")


class Panic(BaseException):
    """As native code raises it."""


class Grammars:
    """Allows everything. A schema is prepared when the test says so, and the one called "broken" fails where told."""

    def __init__(self) -> None:
        self.starts: dict[str, Future[str]] = {}
        self.ids: dict[str, str] = {}
        self.breaks_in = ""
        self.error: BaseException = ValueError("a bug")

    def prepare(self, schema: str, kind: str = "json_schema") -> Future[str]:
        return self.starts.setdefault(schema, Future())

    def add(self, request_id: str, start: str) -> None:
        self.follow("add", start)
        self.ids[request_id] = start

    def discard(self, request_id: str) -> None:
        self.ids.pop(request_id, None)

    def advance(self, request_id: str, token_ids: Sequence[int]) -> bool:
        self.follow("advance", self.ids[request_id])
        return False

    def fill(self, request_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> str | None:
        self.follow("fill", self.ids[request_id])
        if self.ids[request_id] == "costly" or (self.ids[request_id] == "costly to one" and request_id.endswith("0")):
            masks[:] = 0
            return "too many states"
        return None

    def follow(self, where: str, schema: str) -> None:
        if schema == "broken" and where == self.breaks_in:
            raise self.error

    def is_ready(self, schema: str) -> None:
        self.prepare(schema).set_result(schema)


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    made = Grammars()
    monkeypatch.setattr(Assembly, "constraints", lambda *_: Constraints(VOCAB, Spelling(), made))
    return made


def test_a_schema_that_is_being_prepared_holds_nobody_up(grammars: Grammars, engine: LocalEngine) -> None:
    waiting, left, plain = Reader(), Reader(), Reader()
    engine.submit(request_of("waiting", replace(ASKING, n=2)), waiting)
    engine.submit(request_of("left", replace(ASKING, n=5)), left)
    engine.submit(request_of("plain", PLAIN), plain)
    assert plain.end().finish_reason == "length"
    waits = engine.stats().scheduler
    assert (waits.waiting, waits.waiting_new, waits.preparing) == (7, 7, 7)  # they have their places in the queue
    with pytest.raises(QueueFullError, match="7 requests wait"):
        engine.submit(request_of("late", replace(PLAIN, n=2)), plain)
    with pytest.raises(RequestError, match="in flight already"):
        engine.submit(request_of("waiting", PLAIN), plain)
    engine.abort("left")
    ends = [left.end() for _ in range(5)]
    assert {end.finish_reason for end in ends} == {"abort"}
    assert all(end.metrics is not None and end.metrics.prompt_tokens == 3 for end in ends)
    engine.submit(request_of("left", PLAIN), left)  # the name is free again
    assert left.end().finish_reason == "length"
    assert waiting.chunks == []
    grammars.is_ready("a")
    assert [waiting.end().finish_reason for _ in range(2)] == ["length"] * 2
    assert engine.stats().scheduler.finished == {"length": 4}
    assert len([chunk for chunk in left.chunks if chunk.finish_reason]) == 6


def test_a_request_that_is_being_added_counts_once(
    grammars: Grammars, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the scheduler has its choices already, but is not done with it, others ask for room."""
    counts: list[int] = []
    asked = Reader()

    def ask() -> None:
        counts.append(engine.stats().scheduler.waiting_new)
        engine.submit(request_of("late", replace(PLAIN, n=2)), asked)
        counts.append(2)

    asking = threading.Thread(target=ask)

    def add(request_id: str, start: str) -> None:
        grammars.ids[request_id] = start
        if len(grammars.ids) == 4:
            asking.start()
            asking.join(0.5)  # it may have to wait for the end of this

    monkeypatch.setattr(grammars, "add", add)
    grammars.is_ready("a")
    adding = Reader()
    engine.submit(request_of("adding", replace(ASKING, n=4)), adding)
    assert {adding.end().finish_reason for _ in range(4)} == {"length"}
    asking.join()
    assert len(counts) == 2 and counts[0] <= 4
    assert {asked.end().finish_reason for _ in range(2)} == {"length"}


def test_a_refused_schema_is_told_as_the_answer(grammars: Grammars, engine: LocalEngine) -> None:
    reader = Reader()
    engine.submit(request_of("q", ASKING), reader)
    grammars.prepare("a").set_exception(RequestError("no such type", param="response_format", code="invalid_schema"))
    end = reader.end()
    assert (end.finish_reason, end.error, end.error_code, end.error_param, end.metrics) == (
        "error", "no such type", "invalid_schema", "response_format", None,
    )  # fmt: skip
    with pytest.raises(RequestError, match="no such type"):
        LLM.over(engine).generate([[3], [4]], [PLAIN, ASKING])
    with pytest.raises(RequestError, match="no such type"):
        next(LLM.over(engine).stream([3], ASKING))


def test_an_engine_that_is_closed_meanwhile_says_so(grammars: Grammars, engine: LocalEngine) -> None:
    reader = Reader()
    engine.submit(request_of("q", ASKING), reader)
    engine.close()
    assert reader.end().error == "the engine was closed"
    grammars.is_ready("a")
    assert len(reader.chunks) == 1


@pytest.mark.parametrize("where", ["add", "fill", "advance"])
@pytest.mark.parametrize("error", [ValueError("a bug"), Panic("index out of bounds")], ids=["error", "panic"])
def test_a_grammar_that_breaks_ends_its_own_choices_only(
    grammars: Grammars, engine: LocalEngine, where: str, error: BaseException
) -> None:
    grammars.breaks_in, grammars.error = where, error
    aborted = engine.stats().scheduler.finished.get("abort", 0)
    broken, good = Reader(), Reader()
    engine.submit(request_of("broken", replace(ASKING, n=2, json_schema="broken")), broken)
    engine.submit(request_of("good", ASKING), good)
    grammars.is_ready("broken")
    grammars.is_ready("a")
    ends = [broken.end() for _ in range(2)]
    assert {(end.finish_reason, end.error_code) for end in ends} == {("error", "engine_error")}
    assert all(end.error is not None and "json_schema; it goes on" in end.error for end in ends)
    assert good.end().finish_reason == "length"
    assert engine.is_alive() and not grammars.ids
    wait_until(lambda: engine.stats().scheduler.pages_used == 0)
    assert engine.stats().scheduler.finished.get("abort", 0) == aborted, "an error is no abort"


def test_a_schema_that_costs_too_much_says_so(grammars: Grammars, engine: LocalEngine) -> None:
    reader = Reader()
    engine.submit(request_of("q", replace(ASKING, json_schema="costly")), reader)
    grammars.is_ready("costly")
    end = reader.end()
    assert (end.error_code, end.error_param) == ("no_token_allowed", "response_format")
    assert end.error is not None and end.error.endswith("make it simpler: too many states")


def test_one_choice_that_cannot_go_on_does_not_stop_a_batch(grammars: Grammars, engine: LocalEngine) -> None:
    grammars.is_ready("costly")
    stuck, whole = LLM.over(engine).generate([[3], [4]], [replace(ASKING, json_schema="costly"), PLAIN])
    (choice,) = stuck.choices
    assert (choice.finish_reason, choice.error_code) == ("error", "no_token_allowed")
    assert choice.error is not None and choice.metrics is not None
    assert (len(whole.token_ids), whole.finish_reason, whole.choices[0].error) == (20, "length", None)


def test_one_choice_that_cannot_go_on_does_not_stop_a_stream(grammars: Grammars, engine: LocalEngine) -> None:
    grammars.is_ready("costly to one")
    ends: dict[int, OutputChunk] = {}
    counts = [0, 0, 0]
    with pytest.raises(RequestError, match="too many states") as caught:
        for chunk in LLM.over(engine).stream([3], replace(ASKING, n=3, json_schema="costly to one")):
            counts[chunk.choice] += len(chunk.token_ids)
            ends |= {chunk.choice: chunk} if chunk.finish_reason else {}
    assert caught.value.code == "no_token_allowed"
    assert [ends[choice].finish_reason for choice in range(3)] == ["error", "length", "length"]
    assert ends[0].error == str(caught.value) and ends[0].metrics is not None
    assert counts == [0, 20, 20]
    assert engine.stats().scheduler.finished == {"error": 1, "length": 2}


def test_a_batch_of_more_schemas_than_may_wait(
    grammars: Grammars, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_at_a_time(schema: str, kind: str) -> Future[str]:
        start: Future[str] = Future()
        if schema not in grammars.starts and not all(other.done() for other in grammars.starts.values()):
            start.set_exception(QueueFullError("too many"))
        elif (start := grammars.starts.setdefault(schema, start)) and not start.done():
            threading.Timer(0.005, start.set_result, [schema]).start()
        return start

    monkeypatch.setattr(grammars, "prepare", one_at_a_time)
    asked = [replace(PLAIN, json_schema=str(number)) for number in range(8)]
    outputs = LLM.over(engine).generate([[3]] * 8, asked)
    assert [output.finish_reason for output in outputs] == ["length"] * 8


def test_a_panic_of_the_machine_is_told_to_all(engine: LocalEngine, machines: list[Machine]) -> None:
    def panic() -> None:
        raise Panic("index out of bounds")

    machines[0].before_step = panic
    reader = Reader()
    engine.submit(request_of("q", PLAIN), reader)
    assert reader.end().error == "the engine stopped: Panic: index out of bounds"
    assert not engine.is_alive()


def test_words_are_spelled_before_submit_returns(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def spell(self: Spelling, text: str) -> list[int]:
        raise RequestError("half of a character", param="bad_words")

    monkeypatch.setattr(Spelling, "spell", spell)
    with pytest.raises(AdaServeError, match="half of a character"):
        engine.submit(request_of("q", replace(PLAIN, bad_words=("a",))), Reader())
