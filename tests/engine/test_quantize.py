"""An engine whose target is in int8 or int4: speculation changes nothing of the text, and the draft is as it was."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.runtime.executor import load_executor
from tests.engines import DEMO

PROMPTS = ["def add(a, b):\n", "import os\n", "Question: Tom has 3 apples.", "class Node:\n    def"]
SMALL = DEMO | {"token_edges": (64,)}


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_greedy_text_is_that_of_plain_decoding(quantize: str) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(quantize=quantize, **SMALL) as llm:
        texts = {}
        for policy in ("ar", "adaserve"):
            llm.set_policy(policy)
            before = llm.stats().scheduler.accepted_tokens
            texts[policy] = [output.token_ids for output in llm.generate(PROMPTS, sampling, slo=SLO(tpot_ms=0.5))]
            assert (llm.stats().scheduler.accepted_tokens > before) == (policy == "adaserve")
        assert llm.stats().compiles_after_ready == 0
    assert texts["ar"] == texts["adaserve"]


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_only_the_target_is_quantised(quantize: str) -> None:
    executor = load_executor(EngineConfig(quantize=quantize, **SMALL))
    assert executor.local_drafter is not None
    target, draft = executor.target.params, executor.local_drafter.model.params
    assert executor.target.pools.k.dtype == draft["embed"].dtype == jnp.float32
    assert target["embed"].dtype == (np.float32 if quantize == "none" else np.int8)
    assert ("embed.scale" in target, "embed.scale" in draft) == (quantize != "none", False)
    assert ("layers.0.out.zero" in target, "layers.0.out.zero" in draft) == (quantize == "int4", False)
    executor.close()


def test_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantize must be one of auto, none, int8, int4, got 'int2'"):
        LLM(resolve_folder("demo", "target"), quantize="int2")
