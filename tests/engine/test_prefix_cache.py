"""The prefix cache on real models: the same text as without it, and less of a prompt computed."""

from __future__ import annotations

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import RequestError

PAGE = 16
SHARED = "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
PROMPTS = [SHARED + tail for tail in ("        self", "        if item", "        # Add", "        return")]
POLICIES = ("ar", "spec:4", "adaserve")


@pytest.fixture
def computed(demo_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens of each step that the shared engine runs."""
    counts: list[int] = []
    verify = demo_engine.executor.verify

    def counted(plan, *arguments):
        counts.append(plan.num_prefill_tokens)
        return verify(plan, *arguments)

    monkeypatch.setattr(demo_engine.executor, "verify", counted)
    return counts


def serve(llm: LLM, temperature: float, salts: list[str]) -> tuple[list[list[int]], list[int]]:
    """Texts of all prompts, and how much of each was cached. A target that is hard to meet makes trees grow."""
    params = [SamplingParams(max_tokens=16, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)]
    outputs = llm.generate(PROMPTS, params, slo=SLO(tpot_ms=0.5), cache_salt=salts)
    return [output.token_ids for output in outputs], [output.metrics.cached_tokens for output in outputs]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_deterministic_texts_are_bitwise_those_of_cold_prompts(deterministic: LLM, temperature: float) -> None:
    texts = []
    for policy in POLICIES:
        deterministic.set_policy(policy)  # the cache begins empty
        cold, cached = serve(deterministic, temperature, ["a", "b", "c", "d"])
        assert cached == [0, 0, 0, 0]
        texts += [cold, serve(deterministic, temperature, ["a"] * 4)[0]]
        last, cached = serve(deterministic, temperature, ["a"] * 4)
        assert min(cached) > 0
        texts.append(last)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("policy", ["ar", pytest.param("spec:4", marks=pytest.mark.slow), "adaserve"])
def test_a_warm_prompt_computes_its_last_page_only(demo_engine: LocalEngine, computed: list[int], policy: str) -> None:
    llm = LLM.over(demo_engine)
    llm.set_policy(policy)
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    cold, _ = serve(llm, 0.0, ["a", "b", "c", "d"])
    assert sum(lengths) - 4 <= sum(computed) <= sum(lengths)  # a last token alone is no prefill
    serve(llm, 0.0, [""] * 4)
    computed.clear()
    warm, cached = serve(llm, 0.0, [""] * 4)
    assert cached == [(length - 1) // PAGE * PAGE for length in lengths]
    assert sum(computed) <= sum(lengths) - sum(cached) <= 4 * PAGE
    assert sum(a != b for a, b in zip(warm, cold, strict=True)) <= 1, "but for near-ties"
    stats = llm.stats().scheduler
    assert stats.cache_queried_tokens == 3 * sum(lengths)
    assert stats.cache_hit_tokens >= sum(cached)
    assert stats.pages_cached > 0 == stats.pages_used
    llm.set_policy("adaserve")


def test_a_salt_must_be_a_short_text(demo_engine: LocalEngine) -> None:
    llm = LLM.over(demo_engine)
    params = SamplingParams(max_tokens=1)
    for salt, text in (("x" * 257, "at most 256 characters, got 257 characters"), (3, "got 3")):
        with pytest.raises(RequestError, match=text) as caught:
            llm.generate("def", params, cache_salt=salt)  # type: ignore[arg-type]
        assert caught.value.param == "cache_salt"
    with pytest.raises(RequestError, match=r"one for all or one per prompt \(1\), got 2"):
        llm.generate("def", params, cache_salt=["a", "b"])
    assert llm.generate("def", params, cache_salt="\ud800")[0].finish_reason == "length"
