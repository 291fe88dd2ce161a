"""Drafting from text already seen changes no text, speaks of nobody else's, and works where there is no draft."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from tests.conftest import compiling
from tests.engines import PLAIN, seeded_texts
from tests.slow import longer_when_slow

REPEATS = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n" * 2
PROMPTS = [REPEATS + "class Queue:\n    def", "x = [1, 2, 1, 2, 1,", "for i in range(10):\n    for i in", "a b a b a b"]
TOKENS = 24
FEW_SOURCES = ("ar", "adaserve@suffix", "adaserve@suffix+model", "spec:3@suffix")
SOURCES = (
    "ar", "adaserve@suffix", "adaserve@model", "adaserve@suffix+model", "spec:3@suffix", "nightjar@suffix",
    "nightjar@suffix+model",
)  # fmt: skip


@pytest.mark.parametrize(
    ("temperature", "sources"), longer_when_slow([(0.9, FEW_SOURCES), (0.9, SOURCES), (0.0, SOURCES)], several=True)
)
def test_deterministic_texts_are_the_same_whatever_drafts(
    deterministic: LLM, temperature: float, sources: tuple[str, ...]
) -> None:
    found = {}
    for policy in sources:
        deterministic.set_policy(policy)
        found[policy] = [
            seeded_texts(deterministic, PROMPTS, temperature, TOKENS) for _ in range(2)
        ]  # again, with the texts that were kept
        stats = deterministic.stats().scheduler
        assert (stats.suffix_accepted_tokens > 0) == ("suffix" in policy)
        assert (stats.suffix_kept_tokens > 0) == ("suffix" in policy)
    assert all(each == found["ar"][0] for both in found.values() for each in both)


@pytest.mark.slow
def test_texts_are_the_same_with_choices_penalties_and_grammars(demo_engine: LocalEngine) -> None:
    llm = LLM.over(demo_engine)
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}}, "minItems": 3}
    for changes in (
        {"n": 3}, {"frequency_penalty": 0.4, "repetition_penalty": 1.1}, {"json_schema": json.dumps(schema)},
    ):  # fmt: skip
        found = []
        for policy in ("ar", "adaserve@suffix"):
            llm.set_policy(policy)
            found.append(seeded_texts(llm, PROMPTS, 0.0, TOKENS, **changes))
        assert sum(a != b for a, b in zip(*found, strict=True)) <= 1, "but for near-ties"
    llm.set_policy("adaserve")


@pytest.mark.slow
def test_another_salts_texts_change_neither_text_nor_what_is_drafted(demo_engine: LocalEngine) -> None:
    """Ask for a text that another salt has just written: steps, drafted and accepted tokens are as if it had not."""
    llm = LLM.over(demo_engine)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def ask(salt: str, learn: bool = True) -> tuple[list[int], int, int, int]:
        (output,) = llm.generate(["def total(values):\n"], params, cache_salt=salt, learn=learn)
        metrics = output.metrics
        return output.token_ids, metrics.verify_steps, metrics.drafted_tokens, metrics.accepted_tokens

    def after(*salts: tuple[str, bool]) -> tuple[list[int], int, int, int]:
        llm.set_policy("adaserve@suffix")  # a scheduler that has seen nothing
        for salt, learn in salts:
            llm.generate(["unlike"], SamplingParams(max_tokens=8, ignore_eos=True), cache_salt="spy")
            ask(salt, learn)
        return ask("spy")

    alone, beside, own, unkept = after(), after(("victim", True)), after(("spy", True)), after(("spy", False))
    assert own[1] < alone[1], "its own text helps"
    assert beside[0] == alone[0] == own[0]
    # the chances of acceptance are learned from all texts, so that what is drafted may differ, but never by the text
    assert beside[3] <= alone[3] + 2 and unkept[3] <= alone[3] + 2
    llm.set_policy("adaserve")


def test_an_engine_without_a_draft_speculates() -> None:
    with compiling("demo"):
        made = LLM(**PLAIN, policy="adaserve")
    with made as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        metrics, stats = output.metrics, llm.stats()
        assert metrics.accepted_tokens > 0 and metrics.verify_steps < 30
        assert stats.scheduler.suffix_accepted_tokens == metrics.accepted_tokens
        assert stats.compiles_after_ready == 0
        llm.set_policy("ar")
        (plain,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
        assert plain.metrics.drafted_tokens == 0
        assert np.array_equal(plain.token_ids, output.token_ids)
