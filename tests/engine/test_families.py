"""Greedy text of the engine is that of transformers' generate, for each family, with trees from a draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.greedy_texts import check_texts
from tests.models.torch_checkpoints import FAMILIES, write_family

DIVIDED = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "gemma3", "phi3", "gpt_oss", "granite",
    "smollm3", "seed_oss", "glm4", "ernie4_5", "ministral3", "qwen2_moe", "glm4_moe", "exaone4",
    "olmo2", "olmo3", "olmoe", "minimax_m2", "hunyuan_dense",
)  # fmt: skip
"""Families whose texts are compared on two devices as well."""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_generate(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "target", name)
    check_texts(folder, folder, on_two=name in DIVIDED)
