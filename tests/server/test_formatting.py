"""Chunks become deltas: what ends inside a character is held back, names spell nothing, -inf is JSON."""

from __future__ import annotations

import json
import math

import pytest

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.sampling import Thinking
from adaserve_jax.server.formatting import ChatFormatter, ChoiceDelta, CompletionFormatter, DeltaBuilder, to_json
from adaserve_jax.types import TokenLogprob

SPELLED: dict[int, bytes | str] = {0: "<|end|>", 1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b" b"}


def chunk(text: str, ids: list[int], reason=None) -> OutputChunk:
    found = [TokenLogprob(token, -0.25 * token, ((1, -0.5), (0, -math.inf))) for token in ids]
    return OutputChunk("r", 0, text, ids, reason, logprobs=found)


def taken(*chunks: OutputChunk, **asked) -> list[ChoiceDelta | None]:
    deltas = DeltaBuilder(**asked)
    assert deltas.is_new(0)
    return [deltas.add(0, one) for one in chunks]


def test_a_name_in_the_middle_moves_no_offset():
    (piece,) = taken(chunk("a b", [1, 0, 4], "length"), spell=SPELLED.__getitem__)
    assert [one.offset for one in piece.logprobs] == [0, 1, 1]


@pytest.mark.parametrize(("texts", "offsets"), [
    (["b", "ab", ""], [0, 1, 2]),
    ([" b", "ab", ""], [0, 2, 3]),
    (["", "bab", ""], [0, 1, 2]),
    (["", "", " bab"], [0, 2, 3]),
])  # fmt: skip
def test_a_first_space_that_decoding_drops_moves_the_offsets(texts: list[str], offsets: list[int]):
    ids = ([4], [1, 4], [])
    pieces = taken(*map(chunk, texts, ids, [None, None, "stop"]), spell=SPELLED.__getitem__)
    assert [one.offset for piece in pieces if piece is not None for one in piece.logprobs] == offsets


OPENING, CLOSING = 7, 8
MARKS = {**SPELLED, 5: b"\n", OPENING: "<think>", CLOSING: "</think>"}
THINKING = Thinking(OPENING, CLOSING, blanks=(5,))


@pytest.mark.parametrize(("ids", "scored"), [
    ([[5], [5, 1], [4]], b"\n\na b"),
    ([[5], [5, OPENING, 1], [5, CLOSING, 5], [1]], b"\na"),
    ([[5, OPENING], [1]], b""),
    ([[5], [5]], b"\n\n"),
    ([[5], [5], []], b"\n\n"),
    ([[1, 5], [5]], b"a\n\n"),
])  # fmt: skip
def test_white_space_before_an_answer_is_scored_as_part_of_it(ids: list[list[int]], scored: bytes):
    """White space before the opening mark is not: the answer begins behind the closing mark."""
    chunks = [chunk("", each, "length" if at == len(ids) - 1 else None) for at, each in enumerate(ids)]
    *_, last = taken(*chunks, spell=MARKS.__getitem__, unscored=THINKING)
    assert b"".join(one.token for one in last.logprobs) == scored


def test_names_and_minus_infinity_on_the_wire():
    (piece,) = taken(chunk("\ufffd", [0, 2], "stop"), spell=SPELLED.__getitem__)
    chat = json.loads(to_json(ChatFormatter("m").event([piece])))["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in chat] == [("<|end|>", None), ("\\xc3", [195])]
    assert chat[0]["top_logprobs"][1] == {"token": "<|end|>", "logprob": -9999.0, "bytes": None}
    plain = json.loads(to_json(CompletionFormatter("m").event([piece])))["choices"][0]["logprobs"]
    assert plain["tokens"] == ["<|end|>", "bytes:\\xc3"]
    assert plain["top_logprobs"][1] == {"a": -0.5, "<|end|>": -9999.0, "bytes:\\xc3": -0.5}
