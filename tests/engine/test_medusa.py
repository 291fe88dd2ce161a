"""Medusa heads as the draft of an engine: the text is the target's own, and children are ranked with its noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.engine.llm import GenerateOutput
from adaserve_jax.errors import ConfigError
from tests.engines import DEMO
from tests.models.checkpoints import write_medusa

PROMPTS = ["def add(a, b):\n", "x = [1, 2, 3]\n" * 4, "Sara buys 4 pens for $2 each.", "a"]
TOKENS = 20


def _outputs(llm: LLM, policy: str) -> list[GenerateOutput]:
    llm.set_policy(policy)
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=100.0, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))
    ]
    return llm.generate(PROMPTS, params, slo=SLO(tpot_ms=0.5))


@pytest.mark.slow
def test_the_text_is_the_targets_and_heads_that_know_nothing_share_its_noise(tmp_path: Path) -> None:
    """Heads that find all tokens equally likely propose what the noise favours. At a high temperature the target draws
    just that, so nearly all of their chains are accepted."""
    heads = write_medusa(tmp_path, size=256, vocab_size=2048)
    tensors = load_file(heads / "model.safetensors")
    save_file({name: np.zeros_like(tensor) for name, tensor in tensors.items()}, heads / "model.safetensors")
    with LLM(draft=str(heads), **DEMO | {"max_width": 2, "token_edges": (16, 64)}) as llm:
        expected = [output.token_ids for output in _outputs(llm, "ar")]
        found = _outputs(llm, "spec:3")
        assert sum(output.token_ids != text for output, text in zip(found, expected, strict=True)) <= 1
        _outputs(llm, "adaserve")
    accepted = sum(output.metrics.accepted_tokens for output in found)
    assert accepted > 0.6 * sum(output.metrics.drafted_tokens for output in found) > 0


def test_a_chain_longer_than_there_are_heads_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    heads = write_medusa(tmp_path, size=256, vocab_size=2048, heads=3)
    with pytest.raises(ConfigError, match=r"at least 4, but it is 3; .*no deeper than there are heads"):
        LLM(draft=str(heads), policy="spec:4", **DEMO)
