"""The Hopper kernel of paged tree attention: its splits and its reads, simulated on the CPU, and lowered for CUDA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.paged_tree_attention import mosaic_gpu
from adaserve_jax.pallas_kernels.paged_tree_attention.api import beam_attention, check_supported
from adaserve_jax.pallas_kernels.paged_tree_attention.mosaic_gpu import choose_splits, merge_splits
from benchmarks.kernels.attention_specs import (
    FULL,
    LAYER,
    TINY,
    AttentionSpec,
    make_case,
)
from tests.oracles.attention import oracle_attention
from tests.pallas_kernels.test_paged_tree_attention import run, shapes


def variant(name: str, new_name: str, **changes: object) -> AttentionSpec:
    return replace(TINY[name], name=new_name, dtype="bf16", **changes)  # type: ignore[arg-type]


SIMULATED = (
    (variant("tree_past_a_tile", "in_flight_keys_of_two_tiles"), 2),
    (variant("tree_eight_heads", "two_tiles_of_query_rows", block_size=16), 1),
    (variant("large_page", "pages_of_one_slot_and_more_splits_than_keys", contexts=(0, 150)), 5),
    (variant("wide_head", "half_pages_and_more_slots_than_shared_memory_holds", contexts=(0, 300), page_size=128), 1),
    (variant("wide_head", "a_window", contexts=(300, 60), window=70), 2),
)
"""Beside the shapes of the conformance suite, with their numbers of splits."""


def check_against_oracle(spec: AttentionSpec) -> None:
    """Pages and slots that are not in use hold NaN, and the page table's entries that are not in use are no pages."""
    case = make_case(spec, seed=5)
    page = np.arange(case.page_table.shape[1])
    oldest = np.zeros_like(case.ctx_len) if spec.window is None else np.maximum(case.ctx_len - spec.window + 1, 0)
    in_use = (page >= oldest[:, None] // spec.page_size) & (page * spec.page_size < case.ctx_len[:, None])
    given = case._replace(page_table=np.where(in_use, case.page_table, 1 << 20))
    # Not `run` itself, whose cache does not see how many splits there are.
    fresh = jax.jit(partial(run.__wrapped__, spec=spec, implementation="mosaic_gpu"))
    out = np.asarray(fresh(given), np.float64)
    expected = oracle_attention(*case[:5], LAYER, *case[5:9], spec.window, softcap=spec.softcap, sinks=case.sinks)
    real = case.row < len(spec.counts)
    np.testing.assert_allclose(out[:, :, real], expected[:, :, real], atol=spec.tolerance, equal_nan=False)


@pytest.mark.parametrize(
    ("spec", "splits"),
    [
        pytest.param(spec, splits, id=spec.name, marks=[] if spec.name == "a_window" else [pytest.mark.slow])
        for spec, splits in SIMULATED
    ],
)
@pytest.mark.slow
def test_simulated_it_equals_the_oracle(spec: AttentionSpec, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, barriers, slots, masks and the merge run as they are written."""
    monkeypatch.setattr(mosaic_gpu, "attend", partial(mosaic_gpu.attend, interpret=True))
    monkeypatch.setattr(mosaic_gpu, "choose_splits", lambda **_: splits)
    check_against_oracle(spec)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "splits"), SIMULATED, ids=lambda x: getattr(x, "name", None))
def test_on_a_gpu_it_equals_the_oracle(spec: AttentionSpec, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "attend", partial(mosaic_gpu.attend))  # traced anew, with these splits
    monkeypatch.setattr(mosaic_gpu, "choose_splits", lambda **_: splits)
    check_against_oracle(spec)


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def index(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


QUICK = ("tree24_windowed",)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, spec in FULL.items()
        if spec.dtype == "bf16"
    ],
)
def test_lowers_for_cuda(name: str) -> None:
    spec = FULL[name]
    traced = run.trace(shapes(spec), spec=spec, implementation="mosaic_gpu")
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_layers_share_one_lowering_of_the_kernel() -> None:
    """Lowering one takes Python about a second, which a model of many layers and programs cannot pay for each."""
    pool, keys = half(2, 40, 8, 64, 128), half(4, 8, 24, 128)
    visible = jax.ShapeDtypeStruct((4, 6, 24), bool)

    def layers(q, k, v, k_pool, v_pool, *where):
        attend = partial(beam_attention, implementation="mosaic_gpu")
        first = attend(q, k, v, k_pool, v_pool, 0, *where).astype(q.dtype)
        return attend(first, k, v, k_pool, v_pool, 1, *where)

    args = (half(4, 8, 4, 6, 128), keys, keys, pool, pool, index(4, 8), index(4), visible)
    text = jax.jit(layers).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
def test_a_beam_lowers_for_cuda() -> None:
    pool, keys = half(2, 40, 8, 64, 128), half(4, 8, 24, 128)
    visible = jax.ShapeDtypeStruct((4, 6, 24), bool)
    args = (half(4, 8, 4, 6, 128), keys, keys, pool, pool, index(), index(4, 8), index(4), visible)
    traced = jax.jit(partial(beam_attention, implementation="mosaic_gpu")).trace(*args)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 80}, "'mosaic_gpu' supports head dimensions 64 and 128, not 80; 'xla' runs every shape"),
        ({"page_size": 24}, "'mosaic_gpu' supports pages of 8, 16, 32 and multiples of 64 slots, not 24"),
        ({"dtype": jnp.dtype(jnp.float32)}, "'mosaic_gpu' supports bfloat16 queries and pools, not float32"),
    ],
)
def test_says_what_it_does_not_support(changes: dict[str, object], sentence: str) -> None:
    supported: dict[str, object] = {
        "head_dim": 128, "page_size": 64, "group": 4, "dtype": jnp.dtype(jnp.bfloat16),
    }  # fmt: skip
    check_supported("mosaic_gpu", **supported)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence):
        check_supported("mosaic_gpu", **(supported | changes))  # type: ignore[arg-type]


def test_attention_raises_what_it_does_not_support() -> None:
    with pytest.raises(ConfigError, match="not float32"):
        run(make_case(TINY["tree"], seed=0), spec=TINY["tree"], implementation="mosaic_gpu")


def test_splits_fill_the_device_and_are_worth_their_merge() -> None:
    assert choose_splits(row_tiles=64, max_slots=129) == 8
    assert choose_splits(row_tiles=8, max_slots=129) == 32
    assert choose_splits(row_tiles=8, max_slots=3) == 1
    assert choose_splits(row_tiles=2000, max_slots=129) == 1


def test_merging_splits_is_a_softmax_over_all_keys() -> None:
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 5, 7)), rng.normal(size=(3, 7, 2))
    peak = scores.max(axis=2)
    weights = np.exp2(scores - peak[..., None])
    weighted, mass = weights @ values, weights.sum(axis=2)
    peak[1], weighted[1], mass[1] = -1e30, 0, 0
    peak[:, 0], weighted[:, 0], mass[:, 0] = -1e30, 0, 0
    merged = np.asarray(merge_splits(*(jnp.asarray(x, jnp.float32) for x in (weighted, peak, mass))))
    kept = np.exp2(np.concatenate([scores[0], scores[2]], axis=1))
    expected = kept @ np.concatenate([values[0], values[2]]) / kept.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(merged[1:], expected[1:], rtol=1e-5)
    np.testing.assert_array_equal(merged[0], 0)
