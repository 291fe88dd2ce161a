"""Texts made for lengths: how many tokens they have, what they share, and that nothing else decides what they say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from adaserve_jax.bench.local_client import LocalBenchEngine
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.prompt_text import PromptWriter, about_tokens
from adaserve_jax.workloads.workload import load_workload
from tests.models.checkpoints import byte_tokenizer, metaspace_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(resolve_folder("demo", "target"))


def counted_by(tokenizer: Tokenizer):
    return lambda text: len(tokenizer.encode(text))


def test_the_demos_tokens_are_as_many_as_asked_for(demo: Tokenizer):
    count, choose = counted_by(demo), random.Random(0)
    writer = PromptWriter(count)
    for seed in range(60):
        tokens = choose.randrange(1, 700)
        blocks = tuple(choose.randrange(9) for _ in range(-(-tokens // 40)))
        assert count(writer.write(Lengths(tokens, 1), seed)) == tokens
        assert count(writer.write(Lengths(tokens, 1, blocks, 40), seed)) == tokens
    assert count(writer.write(Lengths(6000, 1), 1)) == 6000


@pytest.mark.parametrize("made", [byte_tokenizer, metaspace_tokenizer])
def test_so_are_those_of_other_kinds_of_tokenizers(tmp_path: Path, made):
    write_tokenizer(tmp_path, made())
    count = counted_by(Tokenizer.from_folder(tmp_path))
    writer = PromptWriter(count)
    for tokens in (1, 2, 3, 10, 99, 400):
        assert count(writer.write(Lengths(tokens, 1), tokens)) == tokens
        assert count(writer.write(Lengths(tokens, 1, tuple(range(-(-tokens // 30))), 30), 0)) == tokens


def test_special_tokens_count_too():
    for extra in (1, 2):
        writer = PromptWriter(lambda text, extra=extra: extra + about_tokens(text))
        assert about_tokens(writer.write(Lengths(30, 1), 0)) == 30 - extra
        assert writer.write(Lengths(1, 1), 0) == ""


@pytest.mark.parametrize("counter", ["demo", "about"])
def test_equal_blocks_make_equal_beginnings_whatever_the_seed(demo: Tokenizer, counter: str):
    count = about_tokens if counter == "about" else counted_by(demo)
    one = PromptWriter(count).write(Lengths(512 + 512 + 300, 9, (7, 3, 11)), 1)
    same = PromptWriter(count).write(Lengths(512 + 512 + 300, 2, (7, 3, 11)), 2)
    other = PromptWriter(count).write(Lengths(512 + 512 + 300, 9, (7, 3, 12)), 1)
    longer = PromptWriter(count).write(Lengths(512 + 512 + 512 + 8, 9, (7, 3, 11, 4)), 1)
    elsewhere = PromptWriter(count).write(Lengths(512 + 512 + 300, 9, (8, 3, 11)), 1)
    assert one == same
    assert about_alike(count, one, other) in range(1020, 1030)
    assert about_alike(count, one, longer) in range(1300, 1325), "the last block, begun only"
    assert about_alike(count, one, elsewhere) < 10


def about_alike(count, one: str, other: str) -> int:
    """Tokens of what both begin with."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return count(one[:same])


def test_prompts_without_blocks_begin_each_in_its_own_way_and_are_repeatable(demo: Tokenizer):
    count = counted_by(demo)
    writer = PromptWriter(count)
    texts = [writer.write(Lengths(120, 1), seed) for seed in range(40)]
    assert texts == [PromptWriter(count).write(Lengths(120, 1), seed) for seed in range(40)]
    assert len({text[:7] for text in texts}) == 40
    assert writer.write(Lengths(90, 1), -5), "any seed that a request may have"


def test_words_are_those_of_the_packaged_workload():
    known = {word for item in load_workload().items for word in (item.prompt or "").split()}
    words = PromptWriter(about_tokens).write(Lengths(300, 1), 3).split()
    assert set(words[2:-16]) <= known
    assert len(set(words)) > 60


def test_about_tokens_is_one_for_a_word_and_for_a_sign():
    assert about_tokens("") == 0
    assert about_tokens("The store, again.") == 5
    assert about_tokens("incomprehensible") == 2


def by_length(tokens: int) -> WorkloadItem:
    return WorkloadItem(None, (), 8, "default", SLO(), 1.0, None, None, Lengths(tokens, 8))


def test_the_engine_of_this_process_encodes_as_many_tokens_as_the_trace_says(demo: Tokenizer):
    engine = object.__new__(LocalBenchEngine)  # without loading models
    engine.tokenizer = demo
    assert len(engine.encode(by_length(333), seed=4)) == 333
    assert engine.encode(by_length(333), seed=4) != engine.encode(by_length(333), seed=5)
    packaged = load_workload().items[0]
    assert engine.encode(packaged) == demo.encode(packaged.prompt or "")
