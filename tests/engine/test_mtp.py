"""An MTP layer as the draft of an engine: the text is the target's own under every policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from tests.engines import NARROW
from tests.models.checkpoints import write_mimo
from tests.models.torch_checkpoints import write_glm_mtp

PROMPTS = ["the cat", "a the a the a the", "in", "thing in the ring"]


def _texts(llm: LLM, policy: str) -> list[list[int]]:
    llm.set_policy(policy)
    params = [
        SamplingParams(max_tokens=40, temperature=0.5 * (seed % 2), seed=seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params, slo=SLO(tpot_ms=0.5))]


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_mimo, pytest.param(write_glm_mtp, marks=pytest.mark.torch)])
def test_the_text_is_the_targets(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    with LLM(target=str(write(tmp_path)), draft="mtp", **NARROW | {"max_context": 64}) as llm:
        expected = _texts(llm, "ar")
        for policy in ("spec:2", "adaserve", "adaserve@model", "adaserve@suffix+model"):
            assert _texts(llm, policy) == expected, policy
            assert llm.stats().scheduler.draft_tokens > 0
