"""Greedy text over quantised checkpoints, target and draft, is that of transformers' generate over their values: by
plain decoding, by trees, in chunks, after a prefix hit, and on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.greedy_texts import check_texts
from tests.models.quantized_checkpoints import FORMATS, write_quantized
from tests.oracles.quantized import dequantized_checkpoint

CASES = [(name, recipe.families[0]) for name, recipe in FORMATS.items()]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), CASES)
def test_greedy_text_equals_generate(name: str, family: str, tmp_path: Path) -> None:
    check_texts(*write_quantized(tmp_path, family, name))


def packed_modules(folder: Path) -> set[str]:
    """Return the names of the matrices that a file has in integers."""
    from safetensors.torch import load_file

    ends = ("weight", "weight_packed", "qweight")
    names = {
        name.rpartition(".")
        for name, value in load_file(folder / "model.safetensors").items()
        if not value.is_floating_point()
    }
    return {f"{module}.weight" for module, _, end in names if end in ends}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", ["awq", "gptq_in_turn"])
def test_int4_writes_the_text_of_the_stored_values(name: str, tmp_path: Path) -> None:
    """Layers are those of the file; embedding, head, and what the file has in full precision are rounded."""
    quantized, plain = write_quantized(tmp_path, "llama", name)
    rounded = dequantized_checkpoint(plain, tmp_path / "rounded", packed_modules(quantized), "int4")
    check_texts(quantized, rounded, "int4")
