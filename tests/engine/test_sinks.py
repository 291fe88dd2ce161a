"""Who gets which chunks: order, ends, sinks that fail."""

from __future__ import annotations

from adaserve_jax.engine.client import GenerateRequest, OutputChunk, Sinks
from adaserve_jax.types import SamplingParams


def chunk(request_id: str, choice: int, text: str, *, ends: bool = False) -> OutputChunk:
    return OutputChunk(request_id, choice, text, [1], "length" if ends else None)


def asked(request_id: str, choices: int) -> GenerateRequest:
    return GenerateRequest(request_id, [1], SamplingParams(n=choices))


def test_a_choice_that_has_ended_gets_nothing_more() -> None:
    sinks, given = Sinks(), list[str]()
    sinks.open(asked("a", 2), lambda chunk: given.append(chunk.text))
    batch = [chunk("a", 0, "x"), chunk("a", 0, "y", ends=True), chunk("a", 0, "late"), chunk("nobody", 0, "?")]
    assert sinks.deliver([*batch, chunk("a", 2, "no such choice"), chunk("a", 1, "z")]) == []
    assert given == ["x", "y", "z"] and "a" in sinks
    assert sinks.deliver([chunk("a", 0, "late"), chunk("a", 1, "end", ends=True)]) == []
    assert given == ["x", "y", "z", "end"] and len(sinks) == 0


def test_a_sink_that_fails_gets_nothing_more_and_its_request_is_open_until_it_has_ended() -> None:
    sinks, given, good = Sinks(), list[str](), list[str]()

    def broken(chunk: OutputChunk) -> None:
        given.append(chunk.text)
        raise ValueError("a reader's bug")

    sinks.open(asked("bad", 2), broken)
    sinks.open(asked("good", 1), lambda chunk: good.append(chunk.text))
    assert sinks.deliver([chunk("bad", 0, "x"), chunk("good", 0, "y"), chunk("bad", 1, "z")]) == ["bad"]
    assert sinks.deliver([chunk("bad", 0, "x", ends=True), chunk("good", 0, "z")]) == []
    assert (given, good) == (["x"], ["y", "z"])
    assert "bad" in sinks
    sinks.fail("bad", "the engine ended", "engine_error", None)
    assert given == ["x"] and "bad" not in sinks and "good" in sinks


def test_what_is_left_of_requests_ends_with_an_error() -> None:
    sinks, given = Sinks(), list[OutputChunk]()
    for name, choices in (("a", 3), ("b", 1)):
        sinks.open(asked(name, choices), given.append)
    sinks.deliver([chunk("a", 1, "", ends=True)])
    given.clear()
    sinks.fail_all("the engine ended", "engine_dead", "prompt")
    assert [(end.request_id, end.choice) for end in given] == [("a", 0), ("a", 2), ("b", 0)]
    assert {(end.finish_reason, end.error, end.error_code, end.error_param) for end in given} == {
        ("error", "the engine ended", "engine_dead", "prompt")
    }
    assert len(sinks) == 0
