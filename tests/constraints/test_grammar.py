"""Masks are the true sets of next tokens, in trees as in texts."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.models.tokenizer import Tokenizer
from tests.constraints.grammar_texts import EOS, FINITE, OBJECT, PERSON, V, Writer, assert_person, ids_of, write

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")


@pytest.fixture(scope="module")
def others(tokenizer: Tokenizer) -> Grammars:
    """Shares nothing with `grammars`."""
    return Grammars(tokenizer.backend_json(), V, (EOS,))


def test_what_must_follow_is_spelled_as_the_tokenizer_spells_it(grammars: Grammars, tokenizer: Tokenizer):
    value = {"temperature": "the next morning"}
    writer, ids = Writer(grammars, {"const": value}), []
    for _ in range(40):
        allowed = writer.allowed()
        token = max(allowed, key=lambda i: len(tokenizer.decode([i])))
        ids.append(token)
        if grammars.advance(writer.name, [token]):
            break
    assert json.loads(tokenizer.decode(ids)) == value
    assert ids[2:-2] == tokenizer.encode(tokenizer.decode(ids))[2:-2]


# ---- trees ----


def random_tree(rng: np.random.Generator, writer: Writer, size: int) -> tuple[list[int], list[int]]:
    """Nodes in any order behind the root; two of three tokens are allowed where they stand."""
    tokens, parents = [5], [-1]
    while len(tokens) < size:
        parent = int(rng.integers(len(tokens)))
        mask = writer.masks(tokens, parents)[parent]
        allowed = sorted(ids_of(mask))
        token = int(rng.choice(allowed)) if rng.random() < 0.67 else int(rng.integers(V))
        tokens.append(token)
        parents.append(parent)
    order = [0, *(1 + rng.permutation(size - 1)).tolist()]
    place = {old: new for new, old in enumerate(order)}
    return [tokens[old] for old in order], [-1 if old == 0 else place[parents[old]] for old in order]


@pytest.mark.parametrize(
    "schema", [FINITE["object"], FINITE["range"], PERSON, OBJECT], ids=["object", "range", "person", "any"]
)
def test_trees_get_the_masks_of_texts(grammars: Grammars, others: Grammars, schema: dict[str, Any]):
    rng = np.random.default_rng(3)
    writer, written = Writer(grammars, schema), []
    every = set(range(V))
    for _ in range(6):
        tokens, parents = random_tree(rng, writer, size=24)
        masks = writer.masks(tokens, parents)
        for node in range(len(tokens)):
            path, at = [], node
            while at != 0:
                path.insert(0, tokens[at])
                at = parents[at]
            fresh = Writer(others, schema)
            others.advance(fresh.name, written)
            reached = True
            for token in path:
                reached = reached and token in fresh.allowed()
                if reached:
                    others.advance(fresh.name, [token])
            assert ids_of(masks[node]) == (fresh.allowed() if reached else every), (written, path)
        before = writer.allowed()
        assert ids_of(masks[0]) == before
        steps = [int(rng.choice(sorted(before)))]
        written += steps
        grammars.advance(writer.name, steps)
        if EOS in written:
            break


# ---- whole texts ----


def test_whole_texts_are_json_of_their_schema(grammars: Grammars, tokenizer: Tokenizer):
    rng = np.random.default_rng(11)
    for _ in range(12):
        text = write(Writer(grammars, PERSON), tokenizer, rng)
        assert_person(json.loads(text))
        assert re.search(r"\s", re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[,:] ', "", text)) is None
    for _ in range(12):
        assert isinstance(json.loads(write(Writer(grammars, OBJECT), tokenizer, rng)), dict)


# ---- ids that are no text ----


def test_special_tokens_padding_ids_and_several_ends(tokenizer: Tokenizer):
    """The model's vocabulary is larger than the tokenizer's, and two ids end a text: one of them special to the
    tokenizer, the other, "!", an ordinary token that the strings must then do without."""
    exclamation = tokenizer.encode("!")[0]
    vocab_size = V + 37
    grammars = Grammars(tokenizer.backend_json(), vocab_size, (EOS, exclamation))
    writer = Writer(grammars, {"type": "string"}, vocab_size=vocab_size)
    grammars.advance(writer.name, tokenizer.encode('"'))
    inside = writer.allowed()
    assert len(inside) > 1500 and max(inside) < tokenizer.vocab_size
    assert not inside & {*tokenizer.special_ids, exclamation}
    assert grammars.advance(writer.name, tokenizer.encode('a"'))
    assert writer.allowed() == {EOS, exclamation}
    masks = writer.masks([5, exclamation, EOS, 9], [-1, 0, 1, 1])
    assert [ids_of(mask) for mask in masks[:3]] == [{EOS, exclamation}] * 3
    assert ids_of(masks[3]) == set(range(vocab_size))
    assert grammars.advance(writer.name, [exclamation]) and grammars.advance(writer.name, [EOS])
    assert writer.allowed() == {EOS, exclamation}


def test_a_forbidden_token_leaves_nothing_allowed(grammars: Grammars, tokenizer: Tokenizer):
    writer, neighbour = Writer(grammars, OBJECT), Writer(grammars, OBJECT, name="neighbour")
    assert not grammars.advance(writer.name, tokenizer.encode("x"))
    assert writer.allowed() == set()
    assert neighbour.allowed() != set()
    grammars.discard(writer.name)
    grammars.discard(writer.name)
    with pytest.raises(KeyError):
        grammars.advance(writer.name, [EOS])
