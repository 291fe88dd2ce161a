"""Quantised checkpoints give the logits that transformers gives with their dequantised weights, through prefill chunks
and trees; in int8 and int4, those of the same weights in these, rounded where the file has others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.quantized_checkpoints import FORMATS, packed_modules, write_quantized
from tests.models.torch_checkpoints import VOCABULARY, torch_logits, torch_model
from tests.oracles.quantized import dequantized_checkpoint
from tests.runtime.against_transformers import largest_error
from tests.runtime.packed_model import build, plan_of, run, trees

TOLERANCE = 1e-4
CASES = [(name, family) for name, recipe in FORMATS.items() for family in recipe.families]
QUICK = {("fp8_blocks", "mixtral")}
PARAMS = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("name", "family"), PARAMS)
def test_prefill_chunks_and_trees_equal_transformers(name: str, family: str, tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, family, name)
    model = build(quantized, canonical=False)
    error = largest_error(model, torch_model(plain))
    print(f"max abs logit difference, {name} {family}: {error:.1e}")
    model.close()
    assert error < TOLERANCE


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name, recipe in FORMATS.items() if not recipe.stacks])
def test_quantised_weights_equal_transformers_over_the_rounded_ones(name: str, kind: str, tmp_path: Path) -> None:
    quantized, plain = write_quantized(tmp_path, "llama", name)
    sequence = np.random.default_rng(2).integers(2, VOCABULARY, 90).tolist()
    model = build(quantized, canonical=False, quantize=kind)
    scores = run(model, plan_of(0, sequence), trees([], []))[: len(sequence)]
    model.close()
    held = FORMATS[name].as_int8 if kind == "int8" else FORMATS[name].as_int4
    kept = packed_modules(quantized) if held else set()
    expected = torch_logits(torch_model(dequantized_checkpoint(plain, tmp_path / "rounded", kept, kind)), sequence)
    # compressed-tensors has scales in f32 here, and int4 holds them in f16
    at_f16 = kind == "int4" and held and name.startswith("ct")
    assert np.abs(scores - expected).max() < (2**-7 * expected.std() if at_f16 else TOLERANCE)
