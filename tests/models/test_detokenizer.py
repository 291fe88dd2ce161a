"""The pieces of an incrementally decoded text make the whole text, cut at the first stop string."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaserve_jax.models.detokenizer import IncrementalDetokenizer
from adaserve_jax.models.tokenizer import Tokenizer
from tests.models.checkpoints import byte_tokenizer, metaspace_tokenizer, write_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FIRST_BYTE = 3  # in both tokenizers ids 0, 1, 2 are special and the 256 bytes follow


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, byte_tokenizer())
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("metaspace")
    write_tokenizer(folder, metaspace_tokenizer())
    return Tokenizer.from_folder(folder)


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, int] | None:
    """By brute force: the text before the stop string that completes first, and where that one ends."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], end
    return None


def stream(detokenizer: IncrementalDetokenizer, pushes: list[list[int]]) -> tuple[list[str], int | None]:
    """Every piece, finish included, and how many tokens were kept in all when a stop string ended the text."""
    pieces, before = [], 0
    for tokens in pushes:
        piece, kept = detokenizer.push(tokens)
        pieces.append(piece)
        if kept is not None:
            assert detokenizer.push(tokens) == ("", 0)
            assert detokenizer.finish() == ""
            return pieces, before + kept
        before += len(tokens)
    return [*pieces, detokenizer.finish()], None


def split(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pushes, at = [], 0
    for size in sizes:
        pushes.append(tokens[at : at + size])
        at += size
    return [*pushes, tokens[at:]]


def check(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...], sizes: list[int]) -> None:
    whole = tokenizer.decode(tokens)
    pieces, kept = stream(IncrementalDetokenizer(tokenizer, [], stop), split(tokens, sizes))
    expected = first_stop(whole, stop)
    if expected is None:
        assert ("".join(pieces), kept) == (whole, None)
        return
    text, end = expected
    assert "".join(pieces) == text
    if kept is not None:  # None: the stop string became certain only at the end of the text
        assert len(tokenizer.decode(tokens[:kept])) >= end
        one_less = tokenizer.decode(tokens[: kept - 1]).rstrip(REPLACEMENT)
        assert len(one_less) < end or REPLACEMENT in whole


sizes = st.lists(st.integers(0, 5), max_size=30)
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
WORDS = ["the", " cat", " a", ".", "é", "😀", FAMILY, "\n\n", "in", "ing", " ", REPLACEMENT]
STOPS = ["cat", " a", "a.", "é", "😀", "the the", "\n\n", "ingin", "c", REPLACEMENT]
words = st.lists(st.sampled_from(WORDS), max_size=20)
stops = st.lists(st.sampled_from(STOPS), max_size=3)


@given(words, stops, sizes)
def test_pieces_make_the_text(bytewise: Tokenizer, words: list[str], stop: list[str], sizes: list[int]) -> None:
    check(bytewise, bytewise.encode("".join(words)), tuple(stop), sizes)


@given(st.lists(st.integers(0, 300), max_size=40), stops, sizes)
@example([0xF0 - 0x21 + FIRST_BYTE] * 40, [REPLACEMENT], [])
def test_pieces_make_the_text_of_any_tokens(
    bytewise: Tokenizer, tokens: list[int], stop: list[str], sizes: list[int]
) -> None:
    """Invalid bytes, special tokens and ids without a token included."""
    check(bytewise, [t for t in tokens if t < 3 or bytewise.has_text(t)], tuple(stop), sizes)


@given(st.lists(st.sampled_from([word for word in WORDS if word != REPLACEMENT]), max_size=20), stops, sizes)
def test_pieces_make_the_text_with_byte_fallback(
    metaspace: Tokenizer, words: list[str], stop: list[str], sizes: list[int]
) -> None:
    """A U+FFFD that is meant cannot be told from a cut character here, where every byte of one shows as U+FFFD."""
    check(metaspace, metaspace.encode("".join(words)), tuple(stop), sizes)


@given(st.lists(st.integers(0, 280), max_size=40), sizes)
def test_any_byte_tokens_give_whole_characters(metaspace: Tokenizer, tokens: list[int], sizes: list[int]) -> None:
    """The decoder may take back a character when invalid bytes follow it; what was shown stays, and nothing breaks."""
    pieces, kept = stream(IncrementalDetokenizer(metaspace, []), split(tokens, sizes))
    shown, whole = "".join(pieces), metaspace.decode(tokens)
    assert kept is None
    if REPLACEMENT not in whole:
        assert shown == whole
    assert len(shown.replace(REPLACEMENT, "")) >= len(whole.replace(REPLACEMENT, ""))


@given(st.lists(st.integers(3, 280), max_size=40), sizes)
def test_grouping_of_tokens_does_not_matter(metaspace: Tokenizer, tokens: list[int], sizes: list[int]) -> None:
    grouped, _ = stream(IncrementalDetokenizer(metaspace, []), split(tokens, sizes))
    single, _ = stream(IncrementalDetokenizer(metaspace, []), [[token] for token in tokens])
    assert "".join(grouped) == "".join(single)


def test_a_character_appears_when_it_is_whole(bytewise: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(bytewise, [])
    tokens = bytewise.encode("a 😀!")
    assert [detokenizer.push([token])[0] for token in tokens] == ["a", " ", "", "", "😀", "!"][-len(tokens) :]


def test_text_continues_the_prompt(metaspace: Tokenizer) -> None:
    """The space before a word is kept after a prompt, and stripped where a text begins or a special token ends it."""
    prompt, cat = metaspace.encode("the"), metaspace.encode("cat")
    assert metaspace.decode(cat) == "cat"
    assert IncrementalDetokenizer(metaspace, prompt).push(cat)[0] == " cat"
    assert IncrementalDetokenizer(metaspace, [*prompt, 2]).push(cat)[0] == "cat"
    assert IncrementalDetokenizer(metaspace, []).push(cat)[0] == "cat"


def test_a_prompt_that_ends_inside_a_character_is_left_alone(bytewise: Tokenizer) -> None:
    emoji = bytewise.encode("x😀")
    detokenizer = IncrementalDetokenizer(bytewise, emoji[:-1])
    assert detokenizer.push([emoji[-1]])[0] + detokenizer.finish() == REPLACEMENT


def test_numpy_tokens_are_tokens(bytewise: Tokenizer) -> None:
    prompt, tokens = (np.array(bytewise.encode(text), np.int32) for text in ("the", " cat"))
    assert IncrementalDetokenizer(bytewise, prompt).push(tokens)[0] == " cat"


def test_a_possible_stop_string_is_held_back_and_released(bytewise: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(bytewise, [], ("\n\ndef",))
    assert detokenizer.push(bytewise.encode("x\n\nde")) == ("x", None)
    assert detokenizer.push(bytewise.encode("x")) == ("\n\ndex", None)
    assert detokenizer.push(bytewise.encode("\n")) == ("", None)
    assert detokenizer.finish() == "\n"


def test_tokens_after_the_stop_string_are_not_kept(bytewise: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(bytewise, [], ("end", "nd."))
    assert detokenizer.push(bytewise.encode("the e")) == ("the ", None)
    more = bytewise.encode("nd. more")
    assert detokenizer.push(more) == ("", 2)


class _Counting:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.decoded, self.has_text = tokenizer, 0, tokenizer.has_text

    def decode(self, token_ids: list[int]) -> str:
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", ["the cat", "😀", None], ids=["words", "emoji", "invalid bytes"])
def test_work_per_token_does_not_grow(bytewise: Tokenizer, text: str | None) -> None:
    tokens = [0xFF - 0x21 + FIRST_BYTE] * 600 if text is None else (bytewise.encode(text) * 600)[:600]
    counting = _Counting(bytewise)
    detokenizer = IncrementalDetokenizer(counting, [])
    shown = "".join(detokenizer.push([token])[0] for token in tokens) + detokenizer.finish()
    assert shown == bytewise.decode(tokens)
    assert counting.decoded < 40 * len(tokens)
