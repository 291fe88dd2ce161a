"""A text divided at its marks, however it comes in pieces, beside the division of the whole list of tokens; and the
limit of the thinking at every node of a tree, beside the definition read from each node's whole text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.models.thinking_detokenizer import ThinkingDetokenizer
from adaserve_jax.sampling import SamplingParams, Thinking
from adaserve_jax.types import DraftTrees, Sequence, StepPlan
from tests.constrained import constrain
from tests.models.test_detokenizer import first_stop
from tests.plans import packed_trees, step_plan

OPENING, CLOSING, BLANK = 4, 5, 6
SPELLED = {1: "a", 2: "b", 3: "c", OPENING: "<", CLOSING: ">", BLANK: " "}
VOCAB = 8
TEXTS = st.lists(st.sampled_from(sorted(SPELLED)), max_size=14)
STOPS = st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2).map(tuple)


class Letters:
    """A tokenizer of one character per token."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(SPELLED[token] for token in token_ids)

    def has_text(self, token_id: int) -> bool:
        return True

    def spell(self, text: str) -> list[int]:
        return [{spelled: token for token, spelled in SPELLED.items()}[character] for character in text]


def parts(tokens: list[int], *, started: bool) -> tuple[list[int], list[int] | None, list[int]]:
    """Blanks before the opening mark, thought tokens and those of the answer; the second is None for a text that did
    not think (its answer has the blanks too)."""
    before: list[int] = []
    rest = list(tokens)
    if not started:
        while rest and rest[0] == BLANK:
            before.append(rest.pop(0))
        if not rest or rest[0] != OPENING:
            return [], None, list(tokens)
        rest = rest[1:]
    if CLOSING not in rest:
        return before, rest, []
    return before, rest[: rest.index(CLOSING)], rest[rest.index(CLOSING) + 1 :]


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, int | None]:
    """Return `first_stop`, or the whole text if there is none."""
    return first_stop(text, stop) or (text, None)


def divided(tokens: list[int], stop: tuple[str, ...], *, started: bool) -> tuple[str, int, str, int | None]:
    """Thought text, count of thought tokens, answer, and how many tokens a stop string keeps."""
    letters = Letters()
    before, thought, answer = parts(tokens, started=started)
    blanks, ended = cut(letters.decode(before), stop)
    if ended is not None:
        return "", 0, blanks, ended
    first = len(before) + (0 if started or thought is None else 1)
    if thought is None:
        text, ended = cut(letters.decode(answer), stop)
        return "", 0, text, ended
    thinking, ended = cut(letters.decode(thought), stop)
    if ended is not None:
        return thinking, ended, "", first + ended
    text, ended = cut(letters.decode(answer), stop)
    return thinking, len(thought), text, None if ended is None else first + len(thought) + 1 + ended


@given(TEXTS, STOPS, st.booleans(), st.data())
def test_a_text_in_pieces_is_divided_as_a_whole(
    tokens: list[int], stop: tuple[str, ...], started: bool, data: st.DataObject
) -> None:
    marks = Thinking(OPENING, CLOSING, started=started, blanks=(BLANK,))
    detokenizer = ThinkingDetokenizer(Letters(), Letters(), [1], stop, marks)
    shown, thought, count, read, ended = "", "", 0, 0, None
    while read < len(tokens) and ended is None:
        piece = tokens[read : read + data.draw(st.integers(1, 5))]
        text, kept = detokenizer.push(piece)
        shown += text
        ended = None if kept is None else read + kept
        read += len(piece)
        if data.draw(st.booleans()):
            more, added = detokenizer.take()
            thought, count = thought + more, count + added
    if ended is None:
        shown += detokenizer.finish()
    more, added = detokenizer.take()
    assert (thought + more, count + added, shown, ended) == divided(tokens, stop, started=started)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree, the root first."""
    size = draw(st.integers(1, 8))
    tokens = draw(st.lists(st.sampled_from(sorted(SPELLED)), min_size=size, max_size=size))
    return tokens, [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def plan_of(tokens: list[int], parents: list[int]) -> tuple[StepPlan, DraftTrees]:
    """One row with its tree."""
    return step_plan(1), packed_trees([(tokens, parents)])


@given(TEXTS.filter(bool), trees(), st.integers(0, 4), st.booleans())
def test_the_limit_leaves_the_closing_mark_alone_where_it_is_reached(
    output: list[int], tree: tuple[list[int], list[int]], most: int, started: bool
) -> None:
    """The root is the last token of the output; what may follow a node is what its whole text says."""
    marks = Thinking(OPENING, CLOSING, started=started, blanks=(BLANK,))
    sampling = SamplingParams(max_tokens=50, thinking=marks, max_thinking_tokens=most)
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, Sequence("a/0", np.array([1], np.int32), sampling, 0, 0.0))
    for token in output:
        constraints.push("a/0", [token])
    tokens, parents = tree
    tokens[0] = output[-1]
    edits = constraints.edits(*plan_of(tokens, parents), ["a/0"])
    for node in range(len(tokens)):
        path, at = [], node
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        text = [*output, *path]
        _, thought, answer = parts(text, started=started)
        is_open = thought is not None and not answer and text[-1:] != [CLOSING]
        if thought is not None and CLOSING in text[text.index(OPENING) + 1 if not started else 0 :]:
            is_open = False
        expected = {CLOSING} if is_open and len(thought or []) >= most else set(range(VOCAB))
        if edits is None or edits.allowed is None:
            assert expected == set(range(VOCAB))
        else:
            assert {token for token in range(VOCAB) if edits.allowed[node, 0] >> token & 1} == expected
