"""Commits of in-flight K/V against plain loops, bit by bit, in the way of each platform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve_jax.pallas_kernels.compat import compiling_for
from adaserve_jax.runtime.pools import NO_PAGE, InFlight, Pools, commit
from tests.slow import slow_after

LAYERS, PAGES, EXTENSION, HEADS, SLOTS, FEATURES, TOKENS = 2, 5, 3, 2, 16, 4, 12
PADDED = 6
"""D of the pools, whose last features are padding."""


def arrays(rng: np.random.Generator, dtype: Any, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random K and V, NaN among them."""
    values = rng.normal(size=(2, *shape))
    k, v = np.where(rng.random(values.shape) < 0.1, np.nan, values).astype(dtype)
    return k, v


def pools_of(rng: np.random.Generator, dtype: Any, extended: bool) -> Pools:
    base, extension = (
        Pools(*arrays(rng, dtype, LAYERS, pages, HEADS, SLOTS, PADDED))  # type: ignore[arg-type]
        for pages in (PAGES, EXTENSION)
    )
    return base._replace(extension=extension if extended else None)


def expected(pool: np.ndarray, new: np.ndarray, places: list[int], first_page: int) -> np.ndarray:
    """Return the pool with token after token written; places: page * SLOTS + slot of each."""
    out = pool.copy()
    for token, place in enumerate(places):
        page, slot = divmod(place, SLOTS)
        if 0 <= page - first_page < pool.shape[1]:
            out[:, page - first_page, :, slot] = 0
            out[:, page - first_page, :, slot, :FEATURES] = new[:, token]
    return out


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", slow_after(1, [jnp.bfloat16, jnp.float32]))
@pytest.mark.parametrize(
    ("platform", "extended"),
    slow_after(3, [("cpu", False), ("cpu", True), ("tpu", True), ("tpu", False)], several=True),
)
def test_a_commit_writes_the_kept_tokens_and_nothing_else(platform: str, dtype: Any, extended: bool) -> None:
    run = jax.jit(lambda pools, in_flight: commit(pools, in_flight))  # a function of its own: each platform is traced

    @settings(max_examples=20)
    @given(
        places=st.lists(st.integers(0, (PAGES + EXTENSION) * SLOTS - 1), max_size=TOKENS, unique=True),
        seed=st.integers(0, 999),
    )
    def check(places: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        pools, (k, v) = pools_of(rng, dtype, extended), arrays(rng, dtype, LAYERS, TOKENS, HEADS, FEATURES)
        kept = places + [NO_PAGE * SLOTS] * (TOKENS - len(places))
        order = rng.permutation(TOKENS)
        kept = [kept[index] for index in order]
        page = np.array([place // SLOTS for place in kept], np.int32)
        slot = np.array([place % SLOTS for place in kept], np.int32)
        with compiling_for(platform):
            written = run(pools, InFlight(k, v, page, slot))  # type: ignore[arg-type]
        for slab, before, first in ((written, pools, 0), (written.extension, pools.extension, PAGES)):
            if before is not None:
                np.testing.assert_array_equal(bits(slab.k), bits(expected(before.k, k, kept, first)))
                np.testing.assert_array_equal(bits(slab.v), bits(expected(before.v, v, kept, first)))

    check()
