"""Every implementation of paged tree attention against the float64 oracle, on named shapes, with poisoned pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.compat import pltpu
from adaserve_jax.pallas_kernels.paged_tree_attention import mosaic_gpu, mosaic_tpu, reference
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, beam_attention, paged_tree_attention
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import PackedTokens, Slabs, expand_bits, query_blocks
from adaserve_jax.tree.verify import ancestor_bits, ancestor_paths
from benchmarks.kernels.attention_specs import DTYPES, LAYER, TINY, AttentionCase, AttentionSpec, make_case
from tests.oracles.attention import oracle_attention
from tests.pallas_kernels import plain

KERNELS = {"mosaic_gpu": mosaic_gpu, "mosaic_tpu": mosaic_tpu}
"""Simulated on the CPU: copies, barriers, slots, masks and the merge run as they are written."""
IMPLEMENTATIONS = ("xla", "xla_off_cpu", "cpu", "canonical", "plain", *KERNELS)
"""xla_off_cpu: as it runs on GPUs and TPUs, several pages per step; canonical: in the deterministic mode's order;
plain: the kernels' algorithm in the place of one of them."""
OF_PADDED_POOLS = ("xla_off_cpu", "canonical", "mosaic_tpu")
"""Those that are checked on the pools of a TPU."""
CAPPED = "capped_windowed_sinks_prefill"
QUICK = {
    "xla": ("bf16",),
    "xla_off_cpu": (CAPPED,),
    "cpu": ("tree", "windowed_prefill", "tree_past_a_tile", CAPPED),
    "canonical": ("tree", CAPPED),
    "plain": ("windowed_tree",),
    "mosaic_gpu": (),  # always in bf16
    "mosaic_tpu": (CAPPED,),
}
"""Shapes of every run. Compiling takes a second, simulation several. The kernels' own tests have other shapes."""


def conformance_cases() -> list[Any]:
    return [
        pytest.param(
            name, implementation, id=f"{implementation}-{name}",
            marks=[] if name in QUICK[implementation] else [pytest.mark.slow],
        )
        for implementation in IMPLEMENTATIONS
        for name, spec in TINY.items()
        if implementation != "cpu" or spec.dtype == "f32"
    ]  # fmt: skip


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on a simulated device. A failed one leaves state behind that would fail the next."""
    for kernel in KERNELS.values():
        monkeypatch.setattr(kernel, "attend", partial(kernel.attend, interpret=True))
    yield
    pltpu.reset_tpu_interpret_mode_state()


def shapes(
    spec: AttentionSpec, pool_head_dim: int | None = None, sharding: jax.sharding.Sharding | None = None
) -> AttentionCase:
    """Return a case of the spec without data. pool_head_dim: D of the pools, where it is padded."""
    rows, tokens, head_dim = len(spec.counts), spec.num_tokens, spec.head_dim
    pages = -(-(max(spec.contexts) + max(spec.counts)) // spec.page_size)
    pool = (2, rows * pages, spec.kv_heads, spec.page_size, pool_head_dim or head_dim)
    floats = ((spec.group * spec.kv_heads, head_dim, tokens), *[(spec.kv_heads, head_dim, tokens)] * 2, pool, pool)
    integers = ((rows, pages), (rows,), *[(tokens,)] * 3)
    return AttentionCase(
        *(jax.ShapeDtypeStruct(x, DTYPES[spec.dtype], sharding=sharding) for x in floats),
        *(jax.ShapeDtypeStruct(x, jnp.int32, sharding=sharding) for x in integers),
        jax.ShapeDtypeStruct(floats[0][:1], jnp.float32, sharding=sharding) if spec.sinks else None,
    )


@partial(jax.jit, static_argnames=("spec", "implementation"))
def run(case: AttentionCase, *, spec: AttentionSpec, implementation: str) -> jax.Array:
    """Packed attention of a case."""
    q, k, v, k_pool, v_pool, page_table, ctx_len, row, parent, position, sinks = case
    bits = ancestor_bits(parent)
    counts = jnp.asarray(spec.counts, jnp.int32)
    blocks = query_blocks(counts, row, num_blocks=spec.num_blocks + 1, block_size=spec.block_size)
    canonical = implementation == "canonical"
    implementation = "mosaic_tpu" if implementation == "plain" else implementation
    tokens = PackedTokens(
        page_table, ctx_len, counts, jnp.minimum(row, len(spec.counts) - 1), position, bits,
        None if canonical else blocks,
        ancestor_paths(expand_bits(bits, spec.num_tokens)) if canonical else None,
    )  # fmt: skip
    return paged_tree_attention(
        q,
        k,
        v,
        k_pool,
        v_pool,
        LAYER,
        tokens,
        spec.window,
        implementation="xla" if "xla" in implementation or canonical else implementation,  # type: ignore[arg-type]
        softcap=spec.softcap,
        sinks=sinks,
    )


@pytest.mark.parametrize(("name", "implementation"), conformance_cases())
def test_equals_the_float64_oracle_and_poison_does_not_leak(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch, simulate: None
) -> None:
    spec = TINY[name]
    if implementation == "mosaic_gpu":
        spec = replace(spec, dtype="bf16")
    as_off_cpu(implementation, spec, monkeypatch)
    if implementation == "plain":
        plain.put_in_place_of(mosaic_tpu, monkeypatch)
    check_against_oracle(spec, implementation)


def as_off_cpu(implementation: str, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation == "xla_off_cpu":
        monkeypatch.setattr(reference, "on_cpu", lambda: False)
        monkeypatch.setattr(reference, "KEYS_PER_STEP", 3 * spec.page_size)


def in_slabs(case: AttentionCase, base_pages: int) -> AttentionCase:
    """The same pages, those from `base_pages` on in a second slab."""
    k_pool, v_pool = (Slabs(pool[:, :base_pages], pool[:, base_pages:]) for pool in (case.k_pool, case.v_pool))
    return case._replace(k_pool=k_pool, v_pool=v_pool)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.slow), "xla_off_cpu", "cpu", "canonical"]
)
@pytest.mark.parametrize("name", [pytest.param("decode", marks=pytest.mark.slow), "windowed_tree"])
def test_two_slabs_give_the_bits_of_one(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare one slab with the float64 oracle, and two with one."""
    spec = TINY[name]
    as_off_cpu(implementation, spec, monkeypatch)
    case = make_case(spec, seed=3)
    one = np.asarray(run(case, spec=spec, implementation=implementation))
    real = case.row < len(spec.counts)
    expected = oracle_attention(*case[:5], LAYER, *case[5:9], spec.window, softcap=spec.softcap, sinks=case.sinks)
    np.testing.assert_allclose(one[:, :, real], expected[:, :, real], atol=spec.tolerance, equal_nan=False)
    slabs = in_slabs(case, case.k_pool.shape[1] // 2 + 1)
    two = np.asarray(run(slabs, spec=spec, implementation=implementation))
    np.testing.assert_array_equal(two[:, :, real], one[:, :, real])


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.slow
def test_a_beam_over_two_slabs_gives_the_bits_of_one(implementation: Implementation) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((3, *shape), np.float32) for shape in ((2, 2, 4, 16), (2, 8, 16), (2, 8, 16)))
    pools = [rng.standard_normal((2, 9, 2, 8, 16), np.float32) for _ in range(2)]
    table, ctx_len = rng.permutation(9).reshape(3, 3).astype(np.int32), np.array([24, 0, 13], np.int32)
    visible = rng.random((3, 4, 8)) < 0.7

    def attend(*pools: Any) -> np.ndarray:
        attend = jax.jit(partial(beam_attention, implementation=implementation), static_argnums=5)
        return np.asarray(attend(q, k, v, *pools, LAYER, table, ctx_len, visible))

    np.testing.assert_array_equal(attend(*(Slabs(pool[:, :4], pool[:, 4:]) for pool in pools)), attend(*pools))
    with pytest.raises(ConfigError, match="by 'mosaic_gpu' reads pools in one slab; 'xla' reads two"):
        beam_attention(
            q, k, v, *(Slabs(pool, pool) for pool in pools), LAYER, table, ctx_len, visible, implementation="mosaic_gpu"
        )


def test_queries_in_bf16_are_not_rounded_by_the_scale() -> None:
    """The products of bf16 are exact in f32, so that a result differs from the oracle's by what f32 rounds."""
    rng = np.random.default_rng(7)
    width, head_dim = 8, 24  # 1 / sqrt(24) is no power of two
    q, k, v = (
        rng.standard_normal((1, *shape)).astype(jnp.bfloat16) for shape in ((1, 1, 8, 24), (1, 8, 24), (1, 8, 24))
    )
    empty, ctx_len = jnp.zeros((1, 1, 1, 8, head_dim), jnp.bfloat16), np.zeros(1, np.int32)
    visible = np.tri(width, dtype=bool)[None]
    found = beam_attention(4 * q, k, v, empty, empty, 0, np.zeros((1, 1), np.int32), ctx_len, visible)
    wide_q, wide_k, wide_v = (np.asarray(x, np.float64).reshape(width, head_dim) for x in (4 * q, k, v))
    weight = np.where(visible[0], np.exp(wide_q @ wide_k.T / np.sqrt(head_dim)), 0)
    np.testing.assert_allclose(
        np.asarray(found)[0, 0, 0], weight @ wide_v / weight.sum(axis=1, keepdims=True), atol=1e-5, rtol=0
    )


def check_against_oracle(spec: AttentionSpec, implementation: str) -> None:
    case = make_case(spec, seed=3, platform="tpu" if implementation in OF_PADDED_POOLS else "cpu")
    out = np.asarray(run(case, spec=spec, implementation=implementation), np.float64)
    expected = oracle_attention(*case[:5], LAYER, *case[5:9], spec.window, softcap=spec.softcap, sinks=case.sinks)
    real = case.row < len(spec.counts)
    np.testing.assert_allclose(out[:, :, real], expected[:, :, real], atol=spec.tolerance, equal_nan=False)


def test_canonical_is_bitwise_the_same_committed_or_in_flight() -> None:
    """The same sequence, split at any point between pages and in-flight tokens, gives the same bits."""
    spec = AttentionSpec("split", (4,), (0,), True, 2, 2, 16, 8, 1, "f32", tokens=32)
    rng = np.random.default_rng(0)
    length = 20
    keys, values = (rng.normal(size=(2, 16, length)).astype(np.float32) for _ in range(2))
    query = rng.normal(size=(4, 16)).astype(np.float32)
    results = []
    for context in (0, 3, 8, 16, length - 1):
        k_pool, v_pool = (np.full((2, 5, 2, 8, 16), np.nan, np.float32) for _ in range(2))
        page_table = np.array([[3, 0, 4, 1]], np.int32)
        for position in range(context):
            at = (1, page_table[0, position // 8], slice(None), position % 8)
            k_pool[at], v_pool[at] = keys[:, :, position], values[:, :, position]
        flying = length - context
        k, v, q = (
            np.zeros((2, 16, 32), np.float32),
            np.zeros((2, 16, 32), np.float32),
            np.zeros((4, 16, 32), np.float32),
        )
        k[:, :, :flying], v[:, :, :flying] = keys[:, :, context:], values[:, :, context:]
        q[:, :, flying - 1] = query
        row = np.where(np.arange(32) < flying, 0, 1).astype(np.int32)
        parent = np.where(np.arange(32) < flying, np.arange(32) - 1, -1).astype(np.int32)
        position = np.where(np.arange(32) < flying, context + np.arange(32), 0).astype(np.int32)
        ctx_len = np.array([context], np.int32)
        case = AttentionCase(q, k, v, k_pool, v_pool, page_table, ctx_len, row, parent, position)
        out = run(case, spec=spec, implementation="canonical")
        results.append(np.asarray(out)[:, :, flying - 1])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
