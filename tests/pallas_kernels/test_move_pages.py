"""Every implementation of page moves against plain loops, bit by bit; and the target is updated in place."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.compat import DTYPES, gpu_interpret, tpu_interpret
from adaserve_jax.pallas_kernels.move_pages import api, mosaic_gpu, mosaic_tpu, reference
from adaserve_jax.pallas_kernels.move_pages.moves import check_moves
from adaserve_jax.pallas_kernels.move_pages.specs import FULL, TINY, MoveCase, MoveSpec, make_case
from tests.hlo import copies_of

KERNELS: dict[str, tuple[Any, Any]] = {
    "mosaic_gpu": (mosaic_gpu, gpu_interpret),
    "mosaic_tpu": (mosaic_tpu, tpu_interpret),
}
PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}


def expected(case: MoveCase) -> np.ndarray:
    """The oracle: page by page, all reads from copies made before."""
    before, after = (case.target if case.source is None else case.source).copy(), case.target.copy()
    for read, written in zip(case.from_pages.tolist(), case.to_pages.tolist(), strict=True):
        if 0 <= written < after.shape[1]:
            for layer in range(after.shape[0]):
                after[layer, written] = before[layer, read]
    return after


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def operands(case: MoveCase) -> list[np.ndarray]:
    return [x for x in case if x is not None]


def mover(within: bool, implementation: str = "xla") -> Any:
    """The function of the interface, for one implementation."""
    return partial(api.move_pages_within if within else api.move_pages, implementation=implementation)


def interpreted(name: str, within: bool) -> Any:
    """A kernel on the CPU."""
    module, interpret = KERNELS[name]
    return partial(module.move_pages_within if within else module.move_pages, interpret=interpret())


@pytest.mark.parametrize("name", TINY)
def test_xla_moves_every_bit(name: str) -> None:
    spec, case = TINY[name], make_case(TINY[name], seed=1)
    check_moves(case.from_pages, case.to_pages, target_pages=spec.target_pages, source_pages=spec.source_pages or None)
    out = jax.jit(mover(spec.within))(*operands(case))
    np.testing.assert_array_equal(bits(out), bits(expected(case)))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", [name for name in TINY if TINY[name].moves + TINY[name].padding])
def test_kernels_move_every_bit(name: str, implementation: str) -> None:
    case = make_case(TINY[name], seed=2)
    out = jax.jit(interpreted(implementation, TINY[name].within))(*operands(case))
    np.testing.assert_array_equal(bits(out), bits(expected(case)))


@pytest.mark.parametrize("implementation", api.IMPLEMENTATIONS)
@pytest.mark.parametrize("within", [False, True])
def test_no_entries_at_all(implementation: str, within: bool) -> None:
    spec = MoveSpec("none", 2, 2, 8, 128, 0, 0, 4, 0 if within else 4)
    case = make_case(spec, seed=3)
    out = jax.jit(mover(within, implementation))(*operands(case))
    np.testing.assert_array_equal(bits(out), bits(case.target))


SIZES = {"layers": 2, "kv_heads": 1, "page_size": 2, "head_dim": 4, "target_pages": 8}
ENTRIES = 4
RANDOM = {(dtype, within): jax.jit(mover(within)) for dtype in DTYPES for within in (False, True)}
"""Compiled once for all examples."""


@given(
    dtype=st.sampled_from(list(DTYPES)), within=st.booleans(), padding=st.integers(0, ENTRIES), seed=st.integers(0, 999)
)
def test_random_moves(dtype: str, within: bool, padding: int, seed: int) -> None:
    spec = MoveSpec("random", **SIZES, moves=ENTRIES - padding, padding=padding, source_pages=0 if within else 5,
                    dtype=dtype)  # fmt: skip
    case = make_case(spec, seed)
    check_moves(case.from_pages, case.to_pages, target_pages=8, source_pages=None if within else 5)
    out = RANDOM[dtype, within](*operands(case))
    np.testing.assert_array_equal(bits(out), bits(expected(case)))


def compiled(spec: MoveSpec, *, donated: bool) -> Any:
    case = make_case(spec, seed=4)
    return jax.jit(mover(spec.within), donate_argnums=(0,) if donated else ()).lower(*operands(case)).compile()


@pytest.mark.parametrize("within", [False, True])
def test_xla_copies_no_pool_and_holds_one_page(within: bool) -> None:
    spec = MoveSpec("in_place", 2, 2, 8, 16, 6, 2, 64, 0 if within else 32, "f32")
    program = compiled(spec, donated=True)
    assert copies_of(program.as_text(), spec.target_shape) == []
    assert copies_of(program.as_text(), spec.source_shape) == []
    assert program.memory_analysis().temp_size_in_bytes < 2 * spec.page_bytes
    assert program.memory_analysis().alias_size_in_bytes == np.prod(spec.target_shape) * 4


@pytest.mark.parametrize("within", [False, True])
def test_the_copy_check_sees_a_copy(within: bool) -> None:
    """Without donation the target must be copied once, and the check must say so."""
    spec = MoveSpec("kept", 2, 2, 8, 16, 6, 2, 64, 0 if within else 32, "f32")
    program = compiled(spec, donated=False)
    assert len(copies_of(program.as_text(), spec.target_shape)) == 1


@pytest.mark.parametrize(
    ("implementation", "name"),
    [(kernel, name) for kernel in KERNELS for name in FULL if kernel == "mosaic_gpu" or FULL[name].head_dim == 128],
)
def test_full_shapes_lower_for_their_device_in_place(name: str, implementation: str) -> None:
    spec = FULL[name]
    target, source = (jax.ShapeDtypeStruct(s, DTYPES[spec.dtype]) for s in (spec.target_shape, spec.source_shape))
    ids = jax.ShapeDtypeStruct((spec.moves,), jnp.int32)
    traced = jax.jit(mover(spec.within, implementation), donate_argnums=0).trace(
        *([target] if spec.within else [target, source]), ids, ids
    )
    text = traced.lower(lowering_platforms=(PLATFORMS[implementation],)).as_text()
    call = {"mosaic_gpu": "mosaic_gpu", "mosaic_tpu": "tpu_custom_call"}[implementation]
    assert len(re.findall(rf"custom_call @{call}", text)) == 1
    # The kernel's result lies where its last operand, the target, lies; and that is the donated argument.
    assert f"output_tuple_indices = [], operand_index = {2 if spec.within else 3}" in text
    assert re.search(r"@main\(%arg0: [^,]* \{[^}]*tf\.aliasing_output = 0", text)


def test_a_16_bit_pool_is_not_moved_as_integers_on_a_gpu() -> None:
    """The detour that a CPU needs costs passes over the pool; no other device takes it."""
    pool, ids = jax.ShapeDtypeStruct((2, 8, 2, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.jit(mover(within=True)).trace(pool, ids, ids)
    assert "bitcast_convert" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "bitcast_convert" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("from_pages", "to_pages", "source_pages", "message"),
    [
        ([0, 1], [5, 5], 4, "moves write pages more than once: 5"),
        ([0, 4], [5, 6], 4, "moves read pages that the source does not have: 4; it has 4 pages"),
        ([-1], [5], None, "moves read pages that the source does not have: -1; it has 8 pages"),
        ([0, 1], [1, 5], None, "moves inside one pool both read and write pages: 1; move them by way of others"),
        ([0, 1], [2], 4, r"must be one list each, as long: \(2,\), \(1,\)"),
        (range(10), range(10, 0, -1), 16, None),
    ],
)
def test_check_moves_names_the_clash(from_pages: Any, to_pages: Any, source_pages: int | None, message: Any) -> None:
    moves = np.array(from_pages, np.int32), np.array(to_pages, np.int32)
    if message is None:
        check_moves(*moves, target_pages=16, source_pages=source_pages)
        return
    with pytest.raises(ValueError, match=message):
        check_moves(*moves, target_pages=8, source_pages=source_pages)


def test_check_moves_takes_padding_and_shortens_long_lists() -> None:
    check_moves(np.array([0, 99, -5]), np.array([1, 8, -1]), target_pages=8)
    pages = np.arange(20)
    with pytest.raises(ValueError, match=r"write pages: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.; move"):
        check_moves(pages, pages, target_pages=20)


def test_the_tpu_kernel_names_what_it_does_not_support() -> None:
    pool, ids = jnp.zeros((1, 2, 1, 8, 64)), jnp.zeros(1, jnp.int32)
    expected = "'mosaic_tpu': needs head dims of a multiple of 128, not 64; 'xla' moves pages of every shape"
    with pytest.raises(ConfigError, match=expected):
        api.move_pages(pool, pool, ids, ids, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype", "message"),
    [
        (512, 64, "bf16", "'mosaic_gpu': takes page sizes and head dims up to 256, not 512 and 64; 'xla' moves"),
        (8, 4, "bf16", "needs rows of a multiple of 16 bytes and heads of a multiple of 128, not 8 and 64"),
        (256, 128, "f32", "takes up to 49152 bytes per page and KV head, not 131072"),
    ],
)
def test_the_gpu_kernel_names_what_it_does_not_support(page_size: int, head_dim: int, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        api.check_supported("mosaic_gpu", page_size=page_size, head_dim=head_dim, dtype=jnp.dtype(DTYPES[dtype]))
    pool = jnp.zeros((1, 2, 1, page_size, head_dim), DTYPES[dtype])
    with pytest.raises(ConfigError, match=message):
        api.move_pages_within(pool, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), implementation="mosaic_gpu")


def test_wrong_arguments_are_refused() -> None:
    pool, ids = jnp.zeros((2, 4, 1, 8, 16)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"number of pages only: target float32\(2, 4, 1, 8, 16\), source float32\(1,"):
        api.move_pages(pool, pool[:1], ids, ids)
    with pytest.raises(ValueError, match=r"number of pages only: target float32.*source bfloat16"):
        api.move_pages(pool, pool.astype(jnp.bfloat16), ids, ids)
    with pytest.raises(ValueError, match=r"two lists of as many page ids: .*\(1,\), \(0,\)"):
        api.move_pages_within(pool, ids, ids[:0])
    with pytest.raises(ConfigError, match=r"unknown implementation of page moves 'triton'; expected one of \('xla'"):
        api.move_pages_within(pool, ids, ids, implementation="triton")  # type: ignore[arg-type]


def test_both_forms_agree_where_a_second_pool_holds_the_same() -> None:
    case = make_case(TINY["within"], seed=5)
    apart = reference.move_pages(*map(jnp.asarray, (case.target, case.target, case.from_pages, case.to_pages)))
    inside = reference.move_pages_within(*map(jnp.asarray, (case.target, case.from_pages, case.to_pages)))
    np.testing.assert_array_equal(bits(apart), bits(inside))
