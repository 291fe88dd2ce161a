"""What requests may ask, what is refused, and what is told to a step; the effect on logits is tests/runtime's."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future

import numpy as np
import pytest

from adaserve_jax.constraints.bad_words import BadWords, spellings
from adaserve_jax.constraints.constraints import ConstrainedSequence, Constraints
from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.constraints.masks import all_but, forbid, num_words
from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.errors import RequestError
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.sampling import Thinking, ToolCalls
from adaserve_jax.types import DraftTrees, SamplingParams, Sequence, StepPlan
from tests.constrained import constrain
from tests.constraints.definition import VOCAB, Letters
from tests.constraints.grammar_texts import EOS, V, ids_of
from tests.plans import step_plan, trees_of

PROMPT = np.array([2, 3, 3], np.int32)


class Counting:
    """A grammar of exactly `schema` tokens (a number), and nothing after. Notes whom it was told of."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.filled: list[tuple[str, list[int], list[int]]] = []

    def prepare(self, schema: str, kind: str = "json_schema") -> Future[int]:
        start: Future[int] = Future()
        if schema.isdigit():
            start.set_result(int(schema))
        else:
            start.set_exception(RequestError("no number", param="json_schema", code="invalid_schema"))
        return start

    def add(self, sequence_id: str, start: int) -> None:
        self.left[sequence_id] = start

    def discard(self, sequence_id: str) -> None:
        self.left.pop(sequence_id, None)

    def advance(self, sequence_id: str, token_ids: abc.Sequence[int]) -> bool:
        self.left[sequence_id] -= len(token_ids)
        return self.left[sequence_id] <= 0

    def fill(self, sequence_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> None:
        self.filled.append((sequence_id, tokens.tolist(), parents.tolist()))
        masks[:] = all_but(VOCAB, range(0, VOCAB, 2))


def request(name: str = "a/0", stops: frozenset[int] = frozenset(), **asked: object) -> Sequence:
    return Sequence(name, PROMPT, SamplingParams(**asked), 0, 0.0, stop_token_ids=stops)  # type: ignore[arg-type]


def decode_step(tokens: list[int], parents: list[int], rows: list[int]) -> tuple[StepPlan, DraftTrees]:
    return step_plan(rows[-1] + 1), trees_of(rows, tokens, parents)


def allowed(mask: np.ndarray) -> set[int]:
    return {32 * word + bit for word, value in enumerate(mask.tolist()) for bit in range(32) if value >> bit & 1}


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 2048])
def test_masks_hold_the_vocabulary_and_no_more(vocab_size: int) -> None:
    without = {0, vocab_size - 1, vocab_size + 5}
    mask = all_but(vocab_size, without)
    assert (mask.dtype, len(mask)) == (np.uint32, num_words(vocab_size))
    assert allowed(mask) == set(range(vocab_size)) - without
    mask = all_but(vocab_size)
    forbid(mask, vocab_size - 1)
    assert allowed(mask) == set(range(vocab_size - 1))


def test_who_asks_for_nothing_costs_nothing() -> None:
    constraints = Constraints(VOCAB, Letters())
    constraints.check(SamplingParams(temperature=0.5, top_k=3, stop=("a",)))
    constrain(constraints, request(max_tokens=3, seed=1))
    assert not constraints.active
    assert constraints.push("a/0", [3]) is None


def test_what_can_never_be_done_is_refused() -> None:
    constraints = Constraints(VOCAB, Letters(), Counting())
    constraints.check(SamplingParams(logit_bias=((VOCAB - 1, 1.0),), json_schema="3"))
    with pytest.raises(RequestError, match=f"token ids from 0 to {VOCAB - 1}, got {VOCAB}") as caught:
        constraints.check(SamplingParams(logit_bias={VOCAB: 1.0}))
    assert (caught.value.param, caught.value.code) == ("logit_bias", "invalid_value")
    with pytest.raises(RequestError, match="no number") as caught:
        constrain(constraints, request(json_schema="x"))
    assert (caught.value.code, constraints.active) == ("invalid_schema", False)
    with pytest.raises(RequestError, match="without structured output") as caught:
        Constraints(VOCAB, Letters()).check(SamplingParams(json_schema="3"))
    assert caught.value.code == "unsupported_parameter"
    several = Constraints(VOCAB, Letters(), refusal="several processes")
    several.check(SamplingParams())
    for name, value in (("presence_penalty", 1.0), ("min_tokens", 2), ("logprobs", 0), ("bad_words", ("a",))):
        with pytest.raises(RequestError, match=f"{name} must be left out, got .*: several processes") as caught:
            several.check(SamplingParams(**{name: value}))
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_only_listed_tokens_are_allowed_at_every_node() -> None:
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, request("a/0", allowed_token_ids=[3, 5, 39], bad_words=("c",)))
    edits = constraints.edits(*decode_step([4, 5, 6], [-1, 0, 0], [0, 0, 0]), ["a/0"])
    assert edits is not None and edits.allowed is not None and edits.changed.all()
    banned = {Letters().spell(text)[0] for text in ("c",)}
    assert [allowed(mask) for mask in edits.allowed] == [{3, 5, 39} - banned] * 3


def test_words_are_banned_by_themselves_and_behind_a_space() -> None:
    a, b, space = Letters().spell("ab ")
    assert spellings(Letters(), ["a", " a", "ab"]) == {(a,), (space, a), (a, b), (space, a, b)}
    words = BadWords([(a,), (a, b, a), (b, b)])
    assert words.always == {a}
    tree = np.array([b, a, b, b], np.int32), np.array([-1, 0, 1, 0], np.int32)
    assert words.completions([a, b], *tree) == [(0, a), (0, b), (2, a), (2, b), (3, b)]
    assert words.completions([], np.array([b], np.int32), np.array([-1], np.int32)) == []


def test_words_are_spelled_and_prompts_read_once_per_request() -> None:
    class Noting(Letters):
        spelled = 0

        def spell(self, text: str) -> list[int]:
            self.spelled += 1
            return super().spell(text)

    tokenizer = Noting()
    constraints = Constraints(VOCAB, tokenizer)
    asked = {"bad_words": ("b", "cd"), "presence_penalty": 1.0, "logit_bias": {3: 0.5, 7: 1.0}, "max_tokens": 4}
    shared = constraints.check(SamplingParams(**asked), PROMPT.tolist())  # type: ignore[arg-type]
    assert shared is not None
    sequences = [ConstrainedSequence(request(f"a/{index}", **asked), shared, VOCAB) for index in range(3)]
    assert tokenizer.spelled == 4
    sequences[1].push([5, 3])
    columns = [sequence.columns.columns() for sequence in sequences if sequence.columns is not None]
    assert [column.tolist() for column in columns[0]] == [[3, 7, 2], [0, 0, 0], [True, False, True], [0.5, 1.0, 0.0]]
    assert [column.tolist() for column in columns[1]][:2] == [[3, 7, 2, 5], [1, 0, 0, 1]]
    assert [column.tolist() for column in columns[2]] == [column.tolist() for column in columns[0]]


def test_the_prompt_is_no_part_of_a_word() -> None:
    constraints = Constraints(VOCAB, Letters())
    b, c = PROMPT[-1], 4
    constrain(constraints, request(bad_words=("bc",)))
    plan = step_plan(0, [PROMPT], prefill_final=np.array([True]))
    assert constraints.edits(plan, trees_of([], [], []), ["a/0"]) is None
    constraints.push("a/0", [b])
    edits = constraints.edits(*decode_step([b], [-1], [0]), ["a/0"])
    assert edits is not None and edits.allowed is not None
    assert allowed(edits.allowed[0]) == set(range(VOCAB)) - {c}


def test_min_tokens_counts_the_path_and_then_costs_nothing() -> None:
    constraints = Constraints(VOCAB, Letters())
    constrain(constraints, request(stops=frozenset({0, 9, 4000}), min_tokens=3, max_tokens=5))
    step = decode_step([5, 6, 7], [-1, 0, 1], [0, 0, 0])
    constraints.push("a/0", [5])
    edits = constraints.edits(*step, ["a/0"])
    assert edits is not None and edits.allowed is not None
    without = set(range(VOCAB)) - {0, 9}
    assert [allowed(mask) for mask in edits.allowed] == [without, without, set(range(VOCAB))]
    assert edits.changed.tolist() == [True, True, False]
    constraints.push("a/0", [6, 7])
    assert constraints.edits(*step, ["a/0"]) is None


def test_a_grammar_sees_each_tree_and_ends_a_text_where_it_is_complete() -> None:
    grammars = Counting()
    constraints = Constraints(VOCAB, Letters(), grammars)
    constrain(constraints, request("a/0", json_schema="4"))
    constrain(constraints, request("c/0", logprobs=2))
    assert constraints.push("a/0", [5]) is None
    step = decode_step([4, 5, 6, 7, 8], [-1, 0, -1, 2, 2], [0, 0, 1, 1, 1])
    edits = constraints.edits(*step, ["c/0", "a/0"])
    assert grammars.filled == [("a/0", [6, 7, 8], [-1, 0, 0])]
    assert edits is not None and edits.allowed is not None
    assert [len(allowed(mask)) for mask in edits.allowed] == [VOCAB, VOCAB] + 3 * [VOCAB // 2]
    assert edits.logprobs.tolist() == [2, -1]
    assert constraints.push("a/0", [5, 5, 6, 7]) == 3
    constraints.discard("a/0")
    constraints.discard("c/0")
    assert not constraints.active and not grammars.left


@pytest.mark.parametrize("asked", [{"regex": "[a-z ]*"}, {"tool_calls": ToolCalls("hermes", (("say", "{}"),))}])
def test_a_text_under_a_form_ends_whatever_ignore_eos_says(
    grammars: Grammars, tokenizer: Tokenizer, asked: dict[str, object]
) -> None:
    constraints = Constraints(V, tokenizer, grammars)
    constrain(constraints, request(ignore_eos=True, **asked))
    word = tokenizer.encode("the")
    assert constraints.push("a/0", [*word, EOS, *word]) == len(word) + 1


OPENING, CLOSING = 2046, 2047
TOOL = ("say", '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}')
AFTER_THINKING: list[dict[str, object]] = [
    {"json_schema": '{"enum": ["a", "aa", 1]}'},
    *({"tool_calls": ToolCalls(form, (TOOL,), required)} for form in FORMATS for required in (False, True)),
]


@pytest.mark.parametrize("asked", AFTER_THINKING, ids=str)
def test_a_tree_that_thinks_has_the_masks_of_plain_decoding(
    grammars: Grammars, tokenizer: Tokenizer, asked: dict[str, object]
) -> None:
    """White space, thinking and answer at any node, whatever part of them is committed."""
    blank = tokenizer.encode("\n")[0]
    sampling = SamplingParams(thinking=Thinking(OPENING, CLOSING, blanks=(blank,)), **asked)  # type: ignore[arg-type]
    constraints = Constraints(V, tokenizer, grammars)

    def masks(committed: list[int], tokens: list[int], parents: list[int]) -> list[set[int]]:
        sequence = Sequence("a/0", PROMPT, sampling, 0, 0.0, stop_token_ids=frozenset({EOS}))
        constrain(constraints, sequence)
        constraints.push("a/0", committed)
        edits = constraints.edits(*decode_step(tokens, parents, [0] * len(tokens)), ["a/0"])
        constraints.discard("a/0")
        every = [set(range(V))] * len(tokens)
        return every if edits is None or edits.allowed is None else [ids_of(mask) for mask in edits.allowed]

    rng = np.random.default_rng(4)
    for _ in range(12):
        paths: list[list[int]] = [[]]
        tokens, parents = [blank], [-1]
        for node in range(1, 12):
            parent = int(rng.integers(max(0, node - 3), node))
            ids = sorted(masks(paths[parent], [0], [-1])[0])
            likely = [token for token in (OPENING, CLOSING, blank) if token in ids]
            token = int(rng.choice(likely if likely and rng.random() < 0.7 else ids))
            tokens, parents, paths = [*tokens, token], [*parents, parent], [*paths, [*paths[parent], token]]
        assert masks([], tokens, parents) == [masks(path, [0], [-1])[0] for path in paths]
