"""An engine whose attention, of target and draft, goes through the operands of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.paged_tree_attention import mosaic_tpu
from adaserve_jax.runtime.sizing import OWN_KERNEL
from tests.pallas_kernels import plain

PROMPTS = ["def add(a, b):\n", "import os\n" * 9, "Question: Tom has 3 apples."]
SMALL = {
    "max_requests": 4, "max_context": 128, "page_size": 16, "token_edges": (32,), "row_edges": (4,),
    "max_tree_tokens": 32, "max_depth": 3, "max_width": 2,
}  # fmt: skip


@pytest.mark.slow
def test_text_is_that_of_xla(demo_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trees of several depths, a prompt longer than a chunk and than a page, three rows at once, greedy and not."""
    samplings = [SamplingParams(max_tokens=20, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
    expected = LLM.over(demo_engine).generate(PROMPTS, samplings)
    plain.put_in_place_of(mosaic_tpu, monkeypatch)
    monkeypatch.setitem(OWN_KERNEL, "cpu", "mosaic_tpu")
    with LLM(compile_cache=str(tmp_path), **SMALL) as llm:  # programs are found by the package's sources alone
        outputs = llm.generate(PROMPTS, samplings, slo=SLO(tpot_ms=0.5))
        stats = llm.stats()
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert stats.scheduler.accepted_tokens > 0
    assert stats.compiles_after_ready == 0


def test_mosaic_needs_its_device() -> None:
    with pytest.raises(ConfigError, match="attention 'mosaic' needs a GPU or a TPU, and jax sees 'cpu'"):
        LLM(attention="mosaic")
