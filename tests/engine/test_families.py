"""Greedy text of the engine is that of transformers' generate, for each family, with trees from a draft."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from tests.engine.greedy_texts import check_texts
from tests.models.torch_checkpoints import FAMILIES, VOCABULARY, torch_greedy, torch_model, write_family

TOKENS = 128
DIVIDED = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3", "phi3", "gpt_oss", "granite",
    "smollm3", "seed_oss", "glm4", "ernie4_5", "ministral3", "qwen2_moe", "glm4_moe", "exaone4",
    "olmo2", "olmo3", "olmoe", "minimax_m2", "hunyuan_dense",
)  # fmt: skip
"""Families whose texts are compared on two devices as well."""
PROMPTS = [90, 7]  # tokens; with the first, the window and the context before scaling are left behind at once


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_generate(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "target", name)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, length).tolist() for length in PROMPTS]
    theirs = torch_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    expected = [torch_greedy(theirs, prompt, TOKENS) for prompt in prompts]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    # The model drafts for itself: a draft that is not accepted whole means that the two programs see different windows.
    with LLM(
        str(folder), str(folder), policy="spec:4", max_requests=2, max_context=256, page_size=16, token_edges=(32,),
        row_edges=(2,), max_tree_tokens=32, max_depth=4, max_width=1,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, sampling, slo=SLO(tpot_ms=1))
        (hit,) = llm.generate(prompts[:1], sampling, slo=SLO(tpot_ms=1))
        sampled = SamplingParams(max_tokens=32, temperature=0.8, seed=7, ignore_eos=True)
        by_trees = llm.generate(prompts, sampled, slo=SLO(tpot_ms=1))
        llm.set_policy("ar")
        by_itself = llm.generate(prompts, sampled, slo=SLO(tpot_ms=1))
        llm.set_policy("spec:4")
        (by_default,) = llm.generate(prompts[1], slo=SLO(tpot_ms=1))
        compiles = llm.stats().compiles_after_ready
    assert [output.token_ids for output in outputs] == expected
    assert hit.token_ids == expected[0] and hit.metrics.cached_tokens == 80
    assert [output.token_ids for output in by_trees] == [output.token_ids for output in by_itself]
    assert all(output.metrics.verify_steps <= TOKENS / 5 + 2 for output in outputs)
    assert by_default.token_ids == expected[1][: len(by_default.token_ids)]
    assert compiles == 0


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", DIVIDED)
def test_greedy_text_on_two_devices_equals_generate(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "target", name)
    check_texts(folder, folder)
