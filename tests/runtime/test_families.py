"""Every family that transformers writes gives transformers' logits through the packed programs: chunked prefill over
600 tokens (past the window, past the context before scaling) and trees on top."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.runtime.model import DeviceModel
from tests.models.torch_checkpoints import FAMILIES, VOCABULARY, torch_logits, torch_model, write_family
from tests.runtime.packed_model import LENGTH, TREE_PARENTS, TREE_TOKENS, build, plan_of, run, trees

TOLERANCE = 1e-4
QUICK = {
    "llama_yarn-blocks", "mistral-blocks", "qwen3_window-canonical", "mixtral-blocks", "qwen3_moe_mixed-blocks",
    "gemma2-blocks", "phi4_mini-blocks", "gpt_oss-blocks", "gemma3-canonical",
}  # fmt: skip
CASES = [f"{name}-blocks" for name in FAMILIES] + [
    "mistral-canonical",
    "qwen3_window-canonical",
    "qwen3_moe-canonical",
    "gemma2-canonical",
    "gemma3-canonical",
    "gpt_oss-canonical",
]
PARAMS = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.torch
@pytest.mark.parametrize("case", PARAMS)
def test_prefill_chunks_and_trees_equal_transformers(case: str, tmp_path: Path) -> None:
    name, attention = case.split("-")
    folder = write_family(tmp_path, name)
    theirs = torch_model(folder)
    model = build(folder, attention == "canonical")
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, LENGTH).tolist()
    expected = torch_logits(theirs, sequence)
    assert expected.std() > 0.5
    start, errors = 0, []
    for size in (1, 7, 63, 96, 96, 41, 96, 96, 96, 8):
        stop = start + size
        scores = run(model, plan_of(start, sequence[start:stop]), trees([], []))[:size]
        errors.append(np.abs(scores - expected[start:stop]).max())
        start = stop
        if start in (1, 71, LENGTH):
            errors.append(tree_error(model, theirs, sequence[:start]))
    assert start == LENGTH
    print(f"max abs logit difference, {case}: {max(errors):.1e}")
    model.close()
    assert max(errors) < TOLERANCE


def tree_error(model: DeviceModel, theirs, context: list[int]) -> float:
    """Largest difference of any node to its own path, decoded plainly after the context."""
    scores = run(model, plan_of(len(context), []), trees(TREE_TOKENS, TREE_PARENTS))
    errors = []
    for node in range(len(TREE_TOKENS)):
        path, at = [], node
        while at >= 0:
            path.append(TREE_TOKENS[at])
            at = TREE_PARENTS[at]
        errors.append(np.abs(scores[node] - torch_logits(theirs, context + path[::-1])[-1]).max())
    return max(errors)
