"""Weights in int8 and int4: rounding by hand, products and whole models against float64, the same bytes from every
layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models import tensors as tensor_files
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import attend_dense, decode, init_params, logits, param_specs
from adaserve_jax.models.export import convert
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.quantize import SCALE, ZERO, Int4Groups, int4_product, int8_product, quantize_rows
from tests.models.checkpoints import CONFIG, MIXTRAL, assert_same, load, random_tensors, write_checkpoint, write_tensors
from tests.oracles.llama import oracle_logits
from tests.oracles.quantized import dequantized_checkpoint, group_size, rounded, rounded_in_groups
from tests.slow import slow_after

TOKENS = np.random.default_rng(1).integers(0, 320, 12)


def causal_logits(config: ModelConfig, params: dict[str, jax.Array]) -> np.ndarray:
    """f32[T, V] over TOKENS."""

    def run(params: dict[str, jax.Array]) -> jax.Array:
        hidden = decode(params, config, TOKENS.astype(np.int32), jnp.arange(len(TOKENS)), attend_dense(config))
        return logits(params, config, hidden)

    return np.asarray(jax.jit(run)(params))


def test_a_row_is_rounded_half_to_even_at_its_own_scale() -> None:
    row = np.array([127, 0.5, 1.5, 2.5, -0.5, -126.5])
    weight, scale = quantize_rows(np.stack([row, row * 2**-9, np.zeros(6), np.full(6, 1e-39)]))
    expected = [127, 0, 2, 2, 0, -126]
    np.testing.assert_array_equal(weight, [expected, expected, [0] * 6, [0] * 6])
    np.testing.assert_array_equal(scale, [1, 2**-9, 1, 1])
    assert (weight.dtype, scale.dtype) == (np.int8, np.float32)


def in_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight, scale and zero, filled in two blocks of rows."""
    outputs, inputs = weight.shape
    groups = inputs // group_size(inputs)
    parts = np.zeros((outputs, inputs // 2), np.int8), np.zeros((outputs, groups), np.float16)
    rows = Int4Groups("w", *parts, np.zeros((outputs, groups), np.int8))
    for part in (slice(0, outputs // 2), slice(outputs // 2, outputs)):
        rows[part] = weight[part]
    return rows.weight, rows.scale, rows.zero


def widened(weight: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """f64[out, in]: two inputs of a byte, the first in its low bits."""
    both = weight.view(np.uint8)
    values = np.stack([both & 15, both >> 4], axis=2).reshape(*scale.shape, -1).astype(np.float64)
    return ((values - zero[..., None]) * scale[..., None].astype(np.float64)).reshape(len(weight), -1)


def test_a_group_is_rounded_half_to_even_between_its_extremes() -> None:
    """In groups of two: both signs, one sign, which zero joins, nothing, and what f16 cannot divide."""
    row = np.array([-5.0, 2.5, 15.0, 2.5, -15.0, -4.0, 0.0, 0.0, 1e-9, -1e-9, 6.5, 15.0, 1.5, -13.5, 30.0, 1.0])
    weight, scale, zero = in_int4(row.reshape(2, 8))
    np.testing.assert_array_equal(scale, [[0.5, 1, 1, 1], [1, 1, 1, 2]])
    np.testing.assert_array_equal(zero, [[10, 0, 15, 0], [0, 0, 14, 0]])
    expected = [-5.0, 2.5, 15.0, 2.0, -15.0, -4.0, 0.0, 0.0, 0.0, 0.0, 6.0, 15.0, 1.0, -14.0, 30.0, 0.0]
    np.testing.assert_array_equal(widened(weight, scale, zero), np.reshape(expected, (2, 8)))


@pytest.mark.parametrize("inputs", [2, 32, 44, 256, 1376])
def test_int4_equals_an_oracle_and_errs_by_little_more_than_half_a_step(inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    rows = rng.standard_normal((60, inputs)) * np.exp(rng.uniform(-6, 6, (60, 1)))
    weight, scale, zero = in_int4(rows)
    found = widened(weight, scale, zero)
    np.testing.assert_allclose(found, rounded_in_groups(rows), rtol=1e-6)
    steps = np.repeat(scale.astype(np.float64), inputs // scale.shape[1], axis=1)
    error = np.abs(found - rows) / steps
    assert error.max() <= 0.51 and np.mean(error <= 0.5) > 0.9


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_the_error_is_at_most_half_a_step(dtype: type) -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((200, 33)) * np.exp(rng.uniform(-8, 8, (200, 1)))).astype(dtype)
    weight, scale = quantize_rows(rows)
    exact = np.asarray(rows, np.float64)
    error = np.abs(exact - weight * scale[:, None].astype(np.float64))
    assert (error <= scale[:, None] / 2 * (1 + 1e-4)).all()
    assert (np.abs(weight).max(axis=1) == 127).all()
    assert error.max(axis=1).mean() > scale.mean() / 4, "a coarser grid than the errors of this one"


@pytest.mark.parametrize(("outputs", "inputs", "columns"), [(300, 32, 80), (90, 5000, 80), (90, 5000, 4), (1, 7, 1)])
def test_the_product_equals_float64(outputs: int, inputs: int, columns: int) -> None:
    """Sizes on both sides of a block, and one whose last block takes rows of the one before."""
    rng = np.random.default_rng(2)
    weight, scale = quantize_rows(rng.standard_normal((outputs, inputs)))
    for dtype in (np.float32, jnp.bfloat16):
        x = rng.standard_normal((inputs, columns)).astype(dtype)
        found = jax.jit(int8_product)(weight, scale, x)
        assert found.dtype == jnp.float32
        expected = weight.astype(np.float64) * scale[:, None] @ x.astype(np.float64)
        np.testing.assert_allclose(found, expected, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize(("outputs", "inputs", "columns"), [(300, 32, 80), (90, 4096, 80), (90, 4096, 4), (1, 6, 1)])
def test_the_product_of_int4_equals_float64(outputs: int, inputs: int, columns: int) -> None:
    rng = np.random.default_rng(2)
    given = in_int4(rng.standard_normal((outputs, inputs)))
    for dtype, tolerance in ((np.float32, 1e-5), (jnp.bfloat16, 2e-2)):  # XLA's weights are in bf16 then
        x = rng.standard_normal((inputs, columns)).astype(dtype)
        found = jax.jit(int4_product)(*given, x)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, widened(*given) @ x.astype(np.float64), atol=tolerance * inputs**0.5)


def test_a_cpu_never_widens_a_whole_weight() -> None:
    """It takes several times as long as the product itself: see int8_product. As many columns as XLA multiplies."""
    x, bytes_of = jnp.zeros((1024, 80)), partial(jnp.zeros, dtype=jnp.int8)
    int4 = bytes_of((512, 512)), jnp.ones((512, 32), jnp.float16), bytes_of((512, 32))
    with jax.default_device(jax.devices("cpu")[0]):
        program = jax.jit(int8_product).lower(bytes_of((512, 1024)), jnp.ones(512), x).compile().as_text()
        packed = jax.jit(int4_product).lower(*int4, x).compile().as_text()
    assert "s8[512,1024]" in program and "f32[128,1024]" in program
    assert "f32[512,1024]" not in program
    assert "s8[512,512]" in packed and "f32[128,512]" in packed and "f32[512,512]" not in packed


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("overrides", slow_after(1, [
    MIXTRAL | {"num_hidden_layers": 1}, {}, {"tie_word_embeddings": True},
]), ids=["experts", "untied", "tied"])  # fmt: skip
def test_a_model_equals_float64_over_its_rounded_weights(tmp_path: Path, overrides: dict[str, Any], kind: str) -> None:
    folder = write_checkpoint(tmp_path / "given", **overrides)
    config = ModelConfig.from_folder(folder)
    ours = causal_logits(config, load_params(folder, config, quantize=kind))
    expected = oracle_logits(dequantized_checkpoint(folder, tmp_path / "rounded", kind=kind), TOKENS)
    assert np.abs(ours - expected).max() < 1e-4
    assert np.abs(ours - oracle_logits(folder, TOKENS)).max() > 1e-3, "the weights were not rounded"


@pytest.mark.slow
def test_biases_and_norms_of_heads_stay_as_they_are() -> None:
    """A model with every kind of weight gives in int8 what its rounded weights give in f32."""
    config = ModelConfig(320, 32, 48, 1, 4, 2, 16, 1e4, 1e-5, False, 128)
    config = replace(config, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    rng = np.random.default_rng(3)
    given = {name: np.asarray(value) for name, value in init_params(config, seed=4).items()}
    given |= {
        name: rng.standard_normal(value.shape).astype(np.float32) for name, value in given.items() if value.ndim < 2
    }
    int8, plain = dict(given), dict(given)
    for name in [name for name, value in given.items() if value.ndim == 2]:
        int8[name], int8[name + SCALE] = quantize_rows(given[name])
        plain[name] = rounded(given[name])
    assert int8.keys() == param_specs(config, "int8").keys()
    np.testing.assert_allclose(causal_logits(config, int8), causal_logits(config, plain), atol=1e-4)


@pytest.mark.parametrize("stored", ["f16", "bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_the_stored_rows_whatever_the_layout_and_the_blocks(
    tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "given", dtype=stored, shards=2)
    convert(folder, tmp_path / "converted")
    params, int4 = load(folder, quantize="int8"), load(folder, quantize="int4")
    numpy_type = {"f16": np.float16, "bf16": jnp.bfloat16, "f32": np.float32}[stored]
    tensors = random_tensors(CONFIG, seed=0)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    weight, scale = quantize_rows(np.concatenate(parts).astype(numpy_type))
    np.testing.assert_array_equal(params["layers.1.qkv"], weight)
    np.testing.assert_array_equal(params["layers.1.qkv.scale"], scale)
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 8 * 32 * 3)  # three rows of most weights
    for kind, expected in (("int8", params), ("int4", int4)):
        for other in (load(folder, quantize=kind), load(tmp_path / "converted", quantize=kind)):
            assert_same(other, expected)
    found = widened(*(int4[f"layers.1.qkv{suffix}"] for suffix in ("", SCALE, ZERO)))
    np.testing.assert_allclose(found, rounded_in_groups(np.concatenate(parts).astype(numpy_type)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_specs_name_every_scale_and_the_axis_of_its_rows(tmp_path: Path, dtype: type) -> None:
    folder = write_checkpoint(tmp_path, dtype="bf16")
    plain, specs = (param_specs(ModelConfig.from_folder(folder), kind) for kind in ("none", "int8"))
    assert plain == {name: spec for name, spec in specs.items() if not name.endswith(SCALE)}
    assert {name[: -len(SCALE)] for name in specs.keys() - plain.keys()} == {
        n for n, (s, _) in plain.items() if len(s) == 2
    }
    params = load(folder, dtype, "int8")
    assert {name: shape for name, (shape, _) in specs.items()} == {name: x.shape for name, x in params.items()}
    for name, value in params.items():
        if name + SCALE in specs:
            assert value.dtype == np.int8
            assert specs[name + SCALE] == (specs[name][0][:1], specs[name][1][:1])
        else:
            assert value.dtype == (np.float32 if name.endswith(SCALE) else dtype)


def test_specs_of_int4_are_the_arrays(tmp_path: Path) -> None:
    """Embedding and head are in int8; norms keep their type."""
    folder = write_checkpoint(tmp_path)
    specs, params = param_specs(ModelConfig.from_folder(folder), "int4"), load(folder, quantize="int4")
    assert {name: shape for name, (shape, _) in specs.items()} == {name: x.shape for name, x in params.items()}
    packed = {name.removesuffix(ZERO) for name in specs if name.endswith(ZERO)}
    assert packed == {name for name in params if name.startswith("layers.") and name + SCALE in params}
    types = {name: [params[name + end].dtype for end in ("", SCALE, ZERO)] for name in packed}
    assert all(each == [np.int8, np.float16, np.int8] for each in types.values())
    assert params["embed"].dtype == np.int8 and params["embed.scale"].dtype == np.float32
    assert params["layers.0.attn_norm"].dtype == np.float32


@pytest.mark.slow
def test_products_are_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    """bf16 loads the same int8 weights, and its logits stay near those of f32."""
    folder = write_checkpoint(tmp_path)
    config = ModelConfig.from_folder(folder)
    wide, narrow = (load_params(folder, config, dtype, quantize="int8") for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_array_equal(wide["layers.0.down"], narrow["layers.0.down"])
    error = causal_logits(config, narrow) - causal_logits(config, wide)
    assert 1e-4 < np.sqrt((error**2).mean()) < 0.1


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e300])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, bad: float, kind: str) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = random_tensors(CONFIG, seed=0)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = bad
    write_tensors(folder, tensors)
    with pytest.raises(
        CheckpointError, match=rf"weight layers\.1\.qkv has a value that is not finite, which {kind} cannot"
    ):
        load(folder, quantize=kind)


def test_progress_counts_weights_and_not_scales(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = ModelConfig.from_folder(folder)
    calls: list[tuple[str, int, int]] = []
    load_params(folder, config, progress=lambda *call: calls.append(call), quantize="int8")
    count = len(param_specs(config))
    assert calls == [("loading", done, count) for done in range(1, count + 1)]
