"""The C++ products against float64, for every type of weight and around every size at which they do something else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from adaserve_jax.cpu_kernels.product import (
    MAX_COLUMNS,
    multiplies,
    multiply,
    multiply_groups,
    multiply_groups_int4,
    multiply_int4,
)
from tests.slow import slow_after

TYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}
COLUMNS = (1, 2, 7, 8, 9, 16, 17, 32, 33, MAX_COLUMNS)
FEW_COLUMNS = (1, 9, MAX_COLUMNS)
SIZES = ((7, 33), (203, 1100), (1031, 96), (1, 1), (8, 128), (64, 129))
"""Outputs and inputs: less than a tile, more than one sum, work for two threads; one, whole tiles, tiles and a rest."""


def made(name: str, outputs: int, inputs: int) -> np.ndarray:
    rng = np.random.default_rng(outputs)
    if name == "int8":
        return rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    return rng.standard_normal((outputs, inputs)).astype(TYPES[name])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", slow_after(3, SIZES), ids=str)
def test_products_equal_float64(name: str, size: tuple[int, int]) -> None:
    weight = made(name, *size)
    largest = float(np.abs(weight.astype(np.float64)).max())
    for columns in COLUMNS if size == SIZES[0] else FEW_COLUMNS:
        x = np.random.default_rng(columns).standard_normal((size[1], columns)).astype(np.float32)
        found = multiply(jnp.asarray(weight), jnp.asarray(x))
        assert found.dtype == jnp.float32
        expected = weight.astype(np.float64) @ x.astype(np.float64)
        np.testing.assert_allclose(found, expected, atol=5e-6 * largest * size[1] ** 0.5)


@pytest.mark.parametrize("name", TYPES)
def test_a_column_has_the_same_bits_whatever_its_company(name: str) -> None:
    """From two columns on, so that a token's logits do not depend on who shares its step."""
    weight = jnp.asarray(made(name, 77, 1300))
    x = np.random.default_rng(0).standard_normal((1300, MAX_COLUMNS)).astype(np.float32)
    whole = np.asarray(multiply(weight, jnp.asarray(x)))
    for columns in (2, 5, 8, 13, 31):
        np.testing.assert_array_equal(multiply(weight, jnp.asarray(x[:, :columns])), whole[:, :columns])


GROUPS = ([0, 1, 0, 3, 9], [40, 0, 1], [0, 0], [5])
"""Columns of each group, 2 more than which there are: none at all, one, several, and more than a tile."""


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", slow_after(1, [(203, 1100), (7, 33), (96, 64)]), ids=str)
def test_grouped_products_equal_float64(name: str, size: tuple[int, int]) -> None:
    for sizes in GROUPS:
        weight = np.stack([made(name, *size) * (group + 1) // 1 for group in range(len(sizes))]).astype(TYPES[name])
        x = np.random.default_rng(1).standard_normal((size[1], sum(sizes) + 2)).astype(np.float32)
        found = np.asarray(multiply_groups(jnp.asarray(weight), jnp.asarray(x), jnp.asarray(sizes)))
        group = np.repeat(np.arange(len(sizes)), sizes)
        expected = np.zeros_like(found, np.float64)
        for column, each in enumerate(group):
            expected[:, column] = weight[each].astype(np.float64) @ x[:, column].astype(np.float64)
        largest = float(np.abs(weight.astype(np.float64)).max())
        np.testing.assert_allclose(found, expected, atol=5e-6 * largest * size[1] ** 0.5)


@pytest.mark.parametrize("name", TYPES)
def test_a_column_has_the_same_bits_whatever_the_size_of_its_group(name: str) -> None:
    weight = jnp.asarray(np.stack([made(name, 77, 1300)] * 2))
    x = np.random.default_rng(0).standard_normal((1300, 40)).astype(np.float32)
    whole = np.asarray(multiply_groups(weight, jnp.asarray(x), jnp.asarray([0, 40])))
    for first in (1, 2, 9, 39):
        found = multiply_groups(weight, jnp.asarray(x), jnp.asarray([first, 40 - first]))
        np.testing.assert_array_equal(found, whole)


def in_int4(outputs: int, inputs: int, group: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Random weights in int4, i8[out, in / 2] with scales and zeros, and f64[out, in] that they stand for."""
    rng = np.random.default_rng(outputs)
    packed = rng.integers(-128, 128, (outputs, inputs // 2)).astype(np.int8)
    scale = (rng.standard_normal((outputs, inputs // group)) * 10.0 ** rng.integers(-7, 2)).astype(np.float16)
    zero = rng.integers(0, 16, scale.shape).astype(np.int8)
    both = packed.view(np.uint8)
    values = np.stack([both & 15, both >> 4], axis=2).reshape(*scale.shape, group).astype(np.float64)
    return (packed, scale, zero), ((values - zero[..., None]) * scale[..., None]).reshape(outputs, inputs)


SIZES_OF_INT4 = ((7, 36, 4), (203, 1120, 16), (1, 2, 2), (8, 128, 32), (1031, 96, 32))


@pytest.mark.parametrize("size", slow_after(2, SIZES_OF_INT4), ids=str)
def test_products_of_int4_equal_float64(size: tuple[int, int, int]) -> None:
    """Outputs, inputs, and inputs that share a scale: whole words of eight values, and less; small and negative f16."""
    given, weight = in_int4(*size)
    largest = float(np.abs(weight).max())
    for columns in COLUMNS if size == SIZES_OF_INT4[0] else FEW_COLUMNS:
        x = np.random.default_rng(columns).standard_normal((size[1], columns)).astype(np.float32)
        found = multiply_int4(*map(jnp.asarray, given), jnp.asarray(x))
        np.testing.assert_allclose(found, weight @ x.astype(np.float64), atol=5e-6 * largest * size[1] ** 0.5)


def test_a_column_of_int4_has_the_same_bits_whatever_its_company() -> None:
    given = [jnp.asarray(part) for part in in_int4(77, 1280, 32)[0]]
    x = np.random.default_rng(0).standard_normal((1280, 40)).astype(np.float32)
    whole = np.asarray(multiply_int4(*given, jnp.asarray(x)))
    for columns in (2, 5, 13, 31):
        np.testing.assert_array_equal(multiply_int4(*given, jnp.asarray(x[:, :columns])), whole[:, :columns])
    for sizes in ([40], [9, 31]):
        experts = [jnp.concatenate([part] * len(sizes)) for part in given]
        np.testing.assert_array_equal(multiply_groups_int4(*experts, jnp.asarray(x), jnp.asarray(sizes)), whole)


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_grouped_products_of_int4_equal_float64(sizes: list[int]) -> None:
    found = [in_int4(203 + group, 64, 8) for group in range(len(sizes))]
    given = [np.concatenate([parts[index][:203] for parts, _ in found]) for index in range(3)]
    x = np.random.default_rng(1).standard_normal((64, sum(sizes) + 2)).astype(np.float32)
    product = multiply_groups_int4(*map(jnp.asarray, given), jnp.asarray(x), jnp.asarray(sizes))
    expected, first = np.zeros((203, sum(sizes) + 2)), 0
    for size, (_, weight) in zip(sizes, found, strict=True):
        expected[:, first : first + size] = weight[:203] @ x[:, first : first + size].astype(np.float64)
        first += size
    largest = max(float(np.abs(weight).max()) for _, weight in found)
    np.testing.assert_allclose(product, expected, atol=5e-5 * largest)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_gradients_are_those_of_a_product(name: str) -> None:
    weight = jnp.asarray(made(name, 9, 40))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((40, 6)), jnp.float32)
    ours = jax.grad(lambda w, x: jnp.sum(jnp.sin(multiply(w, x))), argnums=(0, 1))(weight, x)
    slope = np.cos(np.asarray(weight, np.float64) @ np.asarray(x, np.float64))
    expected = slope @ np.asarray(x, np.float64).T, np.asarray(weight, np.float64).T @ slope
    for found, wanted, dtype in zip(ours, expected, (weight.dtype, x.dtype), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.astype(jnp.float32), wanted, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-4, atol=1e-4
        )


def test_other_types_and_more_columns_are_left_to_xla() -> None:
    x = jnp.zeros((4, MAX_COLUMNS + 1))
    assert multiplies(jnp.zeros((3, 4)), x[:, :-1])
    assert not multiplies(jnp.zeros((3, 4)), x) and not multiplies(jnp.zeros((3, 4)), x[:, :0])
    assert not multiplies(jnp.zeros((3, 4), jnp.float16), x[:, :2])
