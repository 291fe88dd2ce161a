"""Greedy text over quantised checkpoints, target and draft, is that of transformers' generate over their values: by
plain decoding, by trees, in chunks, after a prefix hit, and on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.greedy_texts import check_texts
from tests.models.quantized_checkpoints import write_quantized


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), [("fp8_blocks", "qwen3_window"), ("gptq", "llama")])
def test_greedy_text_equals_generate(name: str, family: str, tmp_path: Path) -> None:
    check_texts(*write_quantized(tmp_path, family, name))
