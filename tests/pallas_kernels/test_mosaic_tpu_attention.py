"""The TPU kernel of paged tree attention without a TPU: interpreted, lowered and, where libtpu is, compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.compat import pltpu, tpu_interpret
from adaserve_jax.pallas_kernels.paged_tree_attention import mosaic_tpu
from adaserve_jax.pallas_kernels.paged_tree_attention.api import beam_attention, check_supported
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import TILE, Operands
from adaserve_jax.runtime.pools import pool_head_dim
from benchmarks.kernels.attention_specs import (
    FULL,
    LAYER,
    TINY,
    make_case,
)
from tests.pallas_kernels import plain
from tests.pallas_kernels.test_paged_tree_attention import check_against_oracle, run, shapes

LONG = {
    "many_steps": replace(TINY["tree"], name="many_steps", contexts=(1500, 0, 530), page_size=64),
    "windowed_many_steps": replace(TINY["tree"], name="windowed_many_steps", contexts=(0, 1500, 900), window=700),
    "one_page_steps": replace(TINY["bf16"], name="one_page_steps", contexts=(900, 0, 512), page_size=512),
}
"""Contexts of several steps, with an empty one before, between or after: what double buffering must get right."""


@contextmanager
def simulated_tpu(detect_races: bool = False) -> Iterator[None]:
    """TPU kernels inside run on a simulated TPU. A failed one leaves state behind that would fail the next."""
    try:
        with pltpu.force_tpu_interpret_mode(tpu_interpret(detect_races)):
            yield
    finally:
        if not detect_races:
            pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_contexts_of_several_steps(name: str) -> None:
    with simulated_tpu():
        check_against_oracle(LONG[name], "mosaic_tpu")


def tpu_races_found() -> bool:
    """Whether the last TPU kernel interpreted, which must have been with `detect_races`, had a data race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # not public in jax 0.10 and 0.11

    assert interpret_pallas_call.races is not None, "no TPU kernel has been interpreted"
    return interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many_steps", "windowed_many_steps"])
def test_copies_do_not_race_with_reads(name: str) -> None:
    try:
        with simulated_tpu(detect_races=True):
            check_against_oracle(LONG[name], "mosaic_tpu")
        assert not tpu_races_found()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.slow
def test_beams_equal_the_xla_implementation() -> None:
    rng = np.random.default_rng(0)
    rows, kv_heads, group, width, keys, pages = 3, 2, 2, 3, 9, 4
    q, k, v = (
        rng.standard_normal(shape, np.float32)
        for shape in ((rows, kv_heads, group, width, 64), *[(rows, kv_heads, keys, 64)] * 2)
    )
    pools = (rng.standard_normal((2, rows * pages, kv_heads, 16, 128), np.float32) for _ in range(2))
    page_table = rng.permutation(rows * pages).reshape(rows, pages).astype(np.int32)
    ctx_len = np.array([0, 64, 19], np.int32)
    visible = rng.random((rows, width, keys)) < 0.5
    before, after = map(jnp.asarray, (q, k, v, *pools)), map(jnp.asarray, (page_table, ctx_len, visible))
    arrays = (*before, LAYER, *after)
    expected = beam_attention(*arrays)
    with simulated_tpu():
        out = beam_attention(*arrays, implementation="mosaic_tpu")
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.slow
def test_rows_that_see_nothing_are_zero_and_tiles_follow_one_another() -> None:
    """A block over two tiles, one over none, and a query without any key; by `attend(interpret=True)`."""
    rng = np.random.default_rng(1)
    queries, head_dim, tiles = 3, 64, 3
    bits = rng.integers(0, 2**32, (2, queries, tiles * TILE // 32), np.uint32)
    bits[0, 1] = 0
    zero = jnp.zeros(2, jnp.int32)
    operands = Operands(
        *(
            jnp.asarray(rng.standard_normal(shape, np.float32))
            for shape in ((2, 1, 2 * queries, head_dim), *[(1, tiles * TILE, head_dim)] * 2)
        ),
        *[jnp.full((1, 2, 1, 16, 128), jnp.nan)] * 2,
        layer=zero[:1], page_table=zero[:, None], row=zero, ctx_len=zero, first=None,
        tile=jnp.array([1, 0], jnp.int32), num_tiles=jnp.array([2, 0], jnp.int32), bits=jnp.asarray(bits),
    )  # fmt: skip
    out = np.asarray(mosaic_tpu.attend(operands, interpret=True))
    unpadded = (pool[..., :head_dim] for pool in (operands.k_pool, operands.v_pool))
    expected = plain.attend(operands._replace(**dict(zip(("k_pool", "v_pool"), unpadded, strict=True))))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert not out[1].any() and not out[0, 0, [1, 1 + queries]].any()
    assert out[0, 0, [0, 2]].any()


QUICK = ("tree24_page16", "tree24_sinks")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FULL]
)
def test_lowers_for_tpus_anywhere(name: str) -> None:
    spec = FULL[name]
    traced = run.trace(shapes(spec, pool_head_dim(spec.head_dim, "tpu")), spec=spec, implementation="mosaic_tpu")
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_beams_lower_for_tpus_anywhere() -> None:
    def attend(q, k, v, k_pool, v_pool, page_table, ctx_len, visible, first):
        arrays = (q, k, v, k_pool, v_pool, 0, page_table, ctx_len, visible, first)
        return beam_attention(*arrays, implementation="mosaic_tpu")

    floats = ((8, 8, 4, 4, 128), *[(8, 8, 24, 128)] * 2, *[(1, 64, 8, 64, 128)] * 2)
    arguments = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in floats]
    arguments += [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((8, 8), (8,))]
    arguments += [jax.ShapeDtypeStruct((8, 4, 24), jnp.bool_), jax.ShapeDtypeStruct((8, 4), jnp.int32)]
    lowered = jax.jit(attend).trace(*arguments).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize(
    "name", ["decode", "prefill256", "tree24_page16", "tree24_f32", "tree24_windowed", "tree24_sinks"]
)
def test_compiles_for_a_tpu_and_copies_no_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu", reason="NOT COMPILED FOR TPU: libtpu, the compiler, is not installed")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    spec = FULL[name]
    case = shapes(spec, pool_head_dim(spec.head_dim, "tpu"), jax.sharding.SingleDeviceSharding(device))
    traced = run.trace(case, spec=spec, implementation="mosaic_tpu")
    memory = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < case.k_pool.size * case.k_pool.dtype.itemsize / 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 80}, "supports pools whose head dimension is padded to a multiple of 128, not 80"),
        ({"page_size": 8}, "supports page sizes that are multiples of 16, not 8"),
        ({"page_size": 4, "dtype": jnp.float32}, "supports page sizes that are multiples of 8, not 4"),
        ({"dtype": jnp.float16}, "supports float32 and bfloat16, not float16"),
    ],
)
def test_unsupported_shapes_are_named(changes: dict[str, object], reason: str) -> None:
    shape = {"head_dim": 128, "page_size": 16, "group": 4, "dtype": jnp.bfloat16} | changes
    with pytest.raises(ConfigError, match=f"^paged tree attention by 'mosaic_tpu' {reason}; 'xla' runs every shape$"):
        check_supported("mosaic_tpu", **shape)


def test_an_unsupported_call_raises() -> None:
    spec = replace(TINY["tree"], head_dim=80)
    with pytest.raises(ConfigError, match="head dimension is padded to a multiple of 128, not 80"):
        run(make_case(spec, seed=0), spec=spec, implementation="mosaic_tpu")
