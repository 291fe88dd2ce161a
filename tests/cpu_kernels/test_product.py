"""The C++ products against float64, for every type of weight and around every size at which they do something else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from adaserve_jax.cpu_kernels.product import MAX_COLUMNS, multiplies, multiply, multiply_groups

TYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}
COLUMNS = (1, 2, 7, 8, 9, 16, 17, 32, 33, MAX_COLUMNS)
SIZES = ((1, 1), (7, 33), (8, 128), (64, 129), (203, 1100), (1031, 96))
"""Outputs and inputs: less than a tile, whole tiles, tiles and a rest, more than one sum, and work for two threads."""


def made(name: str, outputs: int, inputs: int) -> np.ndarray:
    rng = np.random.default_rng(outputs)
    if name == "int8":
        return rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    return rng.standard_normal((outputs, inputs)).astype(TYPES[name])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_equal_float64(name: str, size: tuple[int, int]) -> None:
    weight = made(name, *size)
    largest = float(np.abs(weight.astype(np.float64)).max())
    for columns in COLUMNS:
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
@pytest.mark.parametrize("size", [(7, 33), (203, 1100), (96, 64)], ids=str)
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
