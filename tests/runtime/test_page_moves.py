"""Page moves against plain loops, bit by bit; and the target is updated in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.runtime.absent_engine import copies_of
from adaserve_jax.runtime.page_moves import check_moves, move_pages

TARGET_PAGES, SOURCE_PAGES, ENTRIES = 8, 5, 4
MOVE = jax.jit(move_pages)


def pool(pages: int, dtype: Any, rng: np.random.Generator, rest: tuple[int, ...] = (1, 2, 4)) -> np.ndarray:
    """Random bits, NaN among them: [2, pages, *rest]."""
    words = rng.integers(0, 256, (2, pages, *rest, np.dtype(dtype).itemsize), np.uint8)
    return words.view(dtype)[..., 0]


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@given(
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]),
    to_pages=st.lists(st.integers(-2, TARGET_PAGES + 1), min_size=ENTRIES, max_size=ENTRIES),
    seed=st.integers(0, 999),
)
def test_random_moves_and_padding(dtype: Any, to_pages: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, source = pool(TARGET_PAGES, dtype, rng), pool(SOURCE_PAGES, dtype, rng)
    to = np.array([page if to_pages.index(page) == i else -1 for i, page in enumerate(to_pages)], np.int32)
    live = (to >= 0) & (to < TARGET_PAGES)
    read = np.where(live, rng.integers(0, SOURCE_PAGES, ENTRIES), rng.integers(-9, 99, ENTRIES)).astype(np.int32)
    check_moves(read, to, target_pages=TARGET_PAGES, source_pages=SOURCE_PAGES)
    expected = target.copy()
    for each, written in zip(read[live].tolist(), to[live].tolist(), strict=True):
        expected[:, written] = source[:, each]
    np.testing.assert_array_equal(bits(MOVE(target, source, read, to)), bits(expected))


def compiled(*, donated: bool) -> Any:
    target, source = (jax.ShapeDtypeStruct((2, pages, 2, 8, 16), jnp.float32) for pages in (64, 32))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    return jax.jit(move_pages, donate_argnums=(0,) if donated else ()).lower(target, source, ids, ids).compile()


def test_no_pool_is_copied_and_one_page_is_held() -> None:
    program = compiled(donated=True)
    assert copies_of(program.as_text(), (2, 64, 2, 8, 16)) == []
    assert copies_of(program.as_text(), (2, 32, 2, 8, 16)) == []
    page_bytes = 2 * 2 * 8 * 16 * 4
    assert program.memory_analysis().temp_size_in_bytes < 2 * page_bytes
    assert program.memory_analysis().alias_size_in_bytes == 64 * page_bytes


def test_the_copy_check_sees_a_copy() -> None:
    """Without donation the target must be copied once, and the check must say so."""
    assert len(copies_of(compiled(donated=False).as_text(), (2, 64, 2, 8, 16))) == 1


def test_a_16_bit_pool_is_not_moved_as_integers_on_a_gpu() -> None:
    """The detour that a CPU needs costs passes over the pool; no other device takes it."""
    pools, ids = jax.ShapeDtypeStruct((2, 8, 2, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.jit(move_pages).trace(pools, pools, ids, ids)
    assert "bitcast_convert" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "bitcast_convert" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("from_pages", "to_pages", "message"),
    [
        ([0, 1], [5, 5], "moves write pages more than once: 5"),
        ([0, 4], [5, 6], "moves read pages that the source does not have: 4; it has 4 pages"),
        ([-1], [5], "moves read pages that the source does not have: -1; it has 4 pages"),
        ([0, 1], [2], r"must be one list each, as long: \(2,\), \(1,\)"),
        (range(4, 24), range(20), r"not have: 4, 5, 6, 7, 8, 9, 10, 11, \.\.\.; it"),
    ],
)
def test_check_moves_names_the_clash(from_pages: Any, to_pages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_moves(np.array(from_pages), np.array(to_pages), target_pages=20, source_pages=4)


def test_wrong_pools_are_refused() -> None:
    whole, ids = jnp.zeros((2, 4, 1, 8, 16)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"number of pages only: target float32\(2, 4, 1, 8, 16\), source float32\(1,"):
        move_pages(whole, whole[:1], ids, ids)
    with pytest.raises(ValueError, match=r"number of pages only: target float32.*source bfloat16"):
        move_pages(whole, whole.astype(jnp.bfloat16), ids, ids)
