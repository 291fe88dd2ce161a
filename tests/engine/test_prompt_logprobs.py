"""Log probabilities of prompts through the whole engine, beside a forward over the whole prompt at once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.special import log_softmax

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.engine.llm import Completion
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import resolve_folder
from tests.oracles.llama import oracle_logits

ASKED = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True, prompt_logprobs=3)


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 500, length).tolist()


@cache
def expected_of(prompt: tuple[int, ...]) -> np.ndarray:
    """Return the oracle's log probabilities after each token of a prompt, f64[T, V]."""
    return log_softmax(oracle_logits(resolve_folder("demo", "target"), list(prompt)), axis=1)


def check(prompt: list[int], choice: Completion, top: int, within: float = 1e-4) -> None:
    """Check every position against the oracle."""
    told = choice.prompt_logprobs
    assert [each.token_id for each in told] == prompt[1:]
    if not told:
        return
    for each, row in zip(told, expected_of(tuple(prompt)), strict=False):
        assert abs(each.logprob - row[each.token_id]) < within
        better, not_worse = (int((row > row[each.token_id] + by).sum()) for by in (within, -within))
        assert better < each.rank <= max(not_worse, better + 1)
        assert len(each.top) == top
        np.testing.assert_allclose([value for _, value in each.top], np.sort(row)[::-1][:top], atol=within)
        np.testing.assert_allclose([row[token] for token, _ in each.top], np.sort(row)[::-1][:top], atol=2 * within)


@pytest.mark.parametrize("policy", ["adaserve", pytest.param("ar", marks=pytest.mark.slow)])
def test_every_position_has_the_log_softmax_of_a_whole_forward(deterministic: LLM, policy: str) -> None:
    """Prompts shorter and longer than a step, of one token too, beside one whose text is the same without."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 2, 17, 33, 97, 120))]
    asked = [replace(ASKED, prompt_logprobs=top, n=1 + top % 2, top_k=top) for top in (0, 1, 2, 3, 20, 5)]
    without = [replace(each, prompt_logprobs=None) for each in asked]
    deterministic.set_policy(policy)
    plain = deterministic.generate([*prompts, prompts[3]], [*without, asked[3]])
    outputs = deterministic.generate([*prompts, prompts[3]], [*asked, without[3]])
    for output, other in zip(outputs, plain, strict=True):
        assert [choice.token_ids for choice in output.choices] == [choice.token_ids for choice in other.choices]
    assert outputs[-1].choices[0].prompt_logprobs == plain[0].choices[0].prompt_logprobs == []
    for prompt, output, each in zip(prompts, outputs, asked, strict=False):
        for choice in output.choices:
            check(prompt, choice, each.prompt_logprobs or 0)
    deterministic.set_policy("adaserve")


def test_they_go_together_with_edits_and_logprobs_of_the_output(deterministic: LLM) -> None:
    prompt = prompt_of(7, 40)
    edits = replace(ASKED, logprobs=2, presence_penalty=1.0, allowed_token_ids=tuple(range(50)), min_tokens=3)
    together, alone = deterministic.generate([prompt] * 2, [edits, replace(edits, prompt_logprobs=None)])
    assert together.choices[0].logprobs == alone.choices[0].logprobs and len(alone.choices[0].logprobs) == 6
    check(prompt, together.choices[0], 3)


def test_a_prompt_that_is_scored_takes_nothing_from_the_prefix_cache_and_leaves_its_own(deterministic: LLM) -> None:
    prompt, plain = prompt_of(11, 64), replace(ASKED, prompt_logprobs=None)
    first, again = (deterministic.generate([prompt], [plain])[0] for _ in range(2))
    scored = deterministic.generate([prompt], [ASKED])[0]
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens, scored.metrics.cached_tokens) == (0, 48, 0)
    assert first.token_ids == again.token_ids == scored.token_ids
    check(prompt, scored.choices[0], 3)
    other = prompt_of(12, 64)
    assert deterministic.generate([other], [ASKED])[0].metrics.cached_tokens == 0
    assert deterministic.generate([other], [plain])[0].metrics.cached_tokens == 48


@pytest.mark.parametrize(
    "policy", ["adaserve", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ar", "spec:4"))]
)
@pytest.mark.slow
def test_each_position_is_told_once_whoever_is_preempted(demo_engine: LocalEngine, policy: str) -> None:
    """16 requests that grow to 150 tokens each, in a pool of 1,024 and steps of 64."""
    llm = LLM.over(demo_engine)
    llm.set_policy(policy)
    prompts = [prompt_of(20 + seed, 100 + seed) for seed in range(16)]
    params = [replace(ASKED, max_tokens=50, prompt_logprobs=1) for _ in prompts]
    outputs = llm.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert [len(output.token_ids) for output in outputs] == [50] * 16
    for prompt, output in list(zip(prompts, outputs, strict=True))[::3]:
        check(prompt, output.choices[0], 1, within=1e-3)
    llm.set_policy("adaserve")


def test_pieces_come_before_the_first_token(deterministic: LLM) -> None:
    """The engine keeps no more than a step's positions: each step's are sent as they come."""
    chunks = list(deterministic.stream(prompt_of(3, 100), ASKED))
    pieces = [len(chunk.prompt_logprobs) for chunk in chunks]
    first = next(place for place, chunk in enumerate(chunks) if chunk.token_ids)
    assert sum(pieces[:first]) == 99 and not any(pieces[first:])
    assert first >= 4 and max(pieces) <= 32
