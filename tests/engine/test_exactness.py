"""The text does not depend on the policy, the tree, or the load; and it follows the target's distribution.

The full size (64 prompts x 64 tokens) is `make bench-exactness`; here the same claims on fewer tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.scheduler.policies import POLICIES as NAMED
from tests.engines import seeded_texts
from tests.oracles.llama import oracle_logits
from tests.slow import slow_after

PROMPTS = [
    "def add(a, b):\n",
    "import os\n",
    "Question: Tom has 3 apples.",
    "class Node:\n    def",
    "for i in",
    "x = [",
    "# Sort the list",
    "Sara buys 4 pens for $2 each.",
]
POLICIES = ("ar", "spec:4", "adaserve")
TOKENS = 24


def texts(
    llm: LLM, temperature: float, at_once: int, *, prompts: list[str] = PROMPTS, tokens: int = TOKENS
) -> list[list[int]]:
    """Return the tokens of each prompt's text, of which `at_once` are written at a time."""
    found = []
    for start in range(0, len(prompts), at_once):
        found += seeded_texts(llm, prompts[start : start + at_once], temperature, tokens, seed=start)
    return found


@pytest.mark.parametrize("temperature", slow_after(1, [0.8, 0.0, 1.2]))
def test_deterministic_mode_is_bitwise_the_same_under_every_policy_and_load(
    deterministic: LLM, temperature: float
) -> None:
    results = {}
    for policy in POLICIES:
        deterministic.set_policy(policy)
        before = deterministic.stats().scheduler.accepted_tokens
        results[policy] = texts(deterministic, temperature, len(PROMPTS))
        if temperature == 0.8:
            alone = texts(deterministic, temperature, 1, prompts=PROMPTS[:3])
            assert alone == results[policy][:3]
        accepted = deterministic.stats().scheduler.accepted_tokens - before
        assert (accepted > 0) == (policy != "ar")
    first = results["ar"]
    assert all(len(tokens) == TOKENS for tokens in first)
    assert all(result == first for result in results.values())


def test_every_named_policy_gives_the_same_text(deterministic: LLM) -> None:
    results = {}
    for policy in NAMED:
        deterministic.set_policy(policy.replace("<k>", "3"))
        results[policy] = texts(deterministic, 0.8, len(PROMPTS), tokens=12)
    assert all(tokens == results["ar"] for tokens in results.values())


@pytest.mark.slow
def test_frequencies_follow_the_targets_softmax_with_speculation(demo_engine: LocalEngine) -> None:
    """The second token is sampled at a tree node whenever the first was drafted. Its frequencies, given the first,
    pass a chi-square test."""
    llm = LLM.over(demo_engine)
    llm.set_policy("spec:4")
    prompt = llm.tokenizer.encode("def add(a, b):\n    return")
    samples = [
        choice.token_ids
        for block in range(16)
        for choice in llm.generate(
            [prompt], SamplingParams(max_tokens=2, temperature=0.8, seed=1000 + block, n=64, ignore_eos=True)
        )[0].choices
    ]
    llm.set_policy("adaserve")
    folder = resolve_folder("demo", "target")
    assert chi_square_p([tokens[0] for tokens in samples], oracle_logits(folder, prompt)[-1] / 0.8) > 1e-3
    likeliest = int(np.bincount([tokens[0] for tokens in samples]).argmax())
    seconds = [tokens[1] for tokens in samples if tokens[0] == likeliest]
    assert len(seconds) >= 150
    assert chi_square_p(seconds, oracle_logits(folder, [*prompt, likeliest])[-1] / 0.8) > 1e-3


def chi_square_p(tokens: list[int], scaled: np.ndarray) -> float:
    """Tokens expected fewer than 5 times are counted together."""
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    counts, expected = np.bincount(tokens, minlength=len(probs)), probs * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    return float(scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
