"""Greedy texts of a checkpoint that drafts for itself, on one device or two: by plain decoding, by trees, in chunks,
and after a prefix hit; and texts that are drawn, which are the same by plain decoding and by trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax import LLM, SLO, SamplingParams
from tests.conftest import ROOT
from tests.models.torch_checkpoints import VOCABULARY, torch_greedy, torch_model

TOKENS, PAGE = 128, 16
LENGTHS = [90, 7]
"""Tokens of the prompts; the first goes in chunks of the step's 32."""


def check_texts(folder: Path, plain: Path, quantize: str = "none", *, on_two: bool = True) -> None:
    """Compare the texts on one device, and on two, with those of transformers. plain: the weights that `folder`, held
    as `quantize` says, stands for."""
    expected = [torch_greedy(torch_model(plain), prompt, TOKENS) for prompt in prompts()]
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    check(texts_of(folder, 1, quantize), expected, whole=quantize == "none")
    if not on_two:
        return
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.greedy_texts", folder, quantize],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), expected, whole=quantize == "none")


def check(found: dict[str, Any], expected: list[list[int]], *, whole: bool) -> None:
    """Compare the texts. whole: the draft has the target's weights, and so is accepted whole."""
    assert found["ar"] == found["adaserve"] == found["spec"] == expected
    assert found["ar again"] == found["adaserve again"] == expected[0]
    assert found["cached"] == LENGTHS[0] // PAGE * PAGE
    assert found["ar drawn"] == found["adaserve drawn"]
    assert found["by default"] == expected[1][: len(found["by default"])]
    if whole:  # else the two programs see different windows
        assert found["most steps"] <= TOKENS / 5 + 2


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCABULARY, length).tolist() for length in LENGTHS]


def texts_of(folder: Path, tp: int, quantize: str) -> dict[str, Any]:
    """The texts by policy, and of the first prompt once more, of which whole pages are there."""
    sampling, slo = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True), SLO(tpot_ms=1)
    drawn = SamplingParams(max_tokens=32, temperature=0.8, seed=7, ignore_eos=True)
    with LLM(
        str(folder), str(folder), tp=tp, quantize=quantize, max_requests=2, max_context=256, page_size=PAGE,
        token_edges=(32,), row_edges=(2,), max_tree_tokens=32, max_depth=4, max_width=2,
    ) as llm:  # fmt: skip
        found: dict[str, Any] = {}
        for policy in ("ar", "adaserve"):
            llm.set_policy(policy)
            before = llm.stats().scheduler.accepted_tokens
            found[policy] = [output.token_ids for output in llm.generate(prompts(), sampling, slo=slo)]
            assert (llm.stats().scheduler.accepted_tokens > before) == (policy == "adaserve")
            (hit,) = llm.generate(prompts()[:1], sampling, slo=slo)
            found[f"{policy} again"], found["cached"] = hit.token_ids, hit.metrics.cached_tokens
            found[f"{policy} drawn"] = [output.token_ids for output in llm.generate(prompts(), drawn, slo=slo)]
        llm.set_policy("spec:4")
        outputs = llm.generate(prompts(), sampling, slo=slo)
        found["spec"] = [output.token_ids for output in outputs]
        found["most steps"] = max(output.metrics.verify_steps for output in outputs)
        found["by default"] = llm.generate(prompts()[1], slo=slo)[0].token_ids
        assert llm.stats().compiles_after_ready == 0
    return found


if __name__ == "__main__":
    print(json.dumps(texts_of(Path(sys.argv[1]), 2, sys.argv[2])))
