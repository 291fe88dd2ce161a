"""Every family that transformers writes gives transformers' logits through the packed programs: chunked prefill over
600 tokens (past the window, past the context before scaling) and trees on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.torch_checkpoints import FAMILIES, WITH_IMAGES, torch_model, write_family, write_with_images
from tests.runtime.against_transformers import largest_error
from tests.runtime.packed_model import build

TOLERANCE = 1e-4
QUICK = {"qwen3_window-canonical", "gpt_oss-blocks"}
CASES = [
    *(f"{name}-blocks" for name in FAMILIES), *(f"{name}-images" for name in WITH_IMAGES), "mistral-canonical",
    "qwen3_window-canonical", "qwen3_moe-canonical", "gemma2-canonical", "gemma3-canonical", "gpt_oss-canonical",
    "glm4_moe-canonical",
]  # fmt: skip
assert set(CASES) >= QUICK, "an entry that names no case runs nothing"
PARAMS = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.torch
@pytest.mark.parametrize("case", PARAMS)
def test_prefill_chunks_and_trees_equal_transformers(case: str, tmp_path: Path) -> None:
    name, kind = case.split("-")
    with_images = kind == "images"  # beside the text model
    folder = (write_with_images if with_images else write_family)(tmp_path, name)
    model = build(folder, kind == "canonical")
    error = largest_error(model, torch_model(folder, with_images=with_images))
    print(f"max abs logit difference, {case}: {error:.1e}")
    model.close()
    assert error < TOLERANCE
