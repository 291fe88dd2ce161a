"""An engine whose attention, of target and draft, goes through the operands of the kernels."""

from __future__ import annotations

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.errors import ConfigError

PROMPTS = ["def add(a, b):\n", "import os\n" * 9, "Question: Tom has 3 apples."]
SMALL = {
    "max_requests": 4, "max_context": 128, "page_size": 16, "token_edges": (32,), "row_edges": (4,),
    "max_tree_tokens": 32, "max_depth": 3, "max_width": 2,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_xla(temperature: float) -> None:
    """Trees of several depths, prompts longer than a chunk and than a page, three rows at once."""
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=5, ignore_eos=True)
    texts, accepted = {}, {}
    for attention in ("xla", "plain"):
        with LLM(attention=attention, **SMALL) as llm:
            outputs = llm.generate(PROMPTS, sampling, slo=SLO(tpot_ms=0.5))
            texts[attention] = [output.token_ids for output in outputs]
            accepted[attention] = llm.stats().scheduler.accepted_tokens
            assert llm.stats().compiles_after_ready == 0
    assert texts["plain"] == texts["xla"]
    assert min(accepted.values()) > 0


def test_mosaic_needs_its_device() -> None:
    with pytest.raises(ConfigError, match="attention 'mosaic' needs a GPU or a TPU, and jax sees 'cpu'"):
        LLM(attention="mosaic")
