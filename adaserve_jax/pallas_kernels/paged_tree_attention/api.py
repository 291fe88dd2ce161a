"""Interface of paged tree attention, for every implementation: packed tokens of a step, or the rows of a beam.

Implementations: `xla` (reference.py, everywhere), `cpu` (C++), `mosaic_gpu` and `mosaic_tpu` (kernels for Hopper
GPUs and for TPUs). The last two are given `Operands`; importing this module imports none but `xla`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.paged_tree_attention import reference
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import (
    TILE,
    Operands,
    PackedTokens,
    Pool,
    Slabs,
    pack_bits,
    packed_operands,
    pad_to_tiles,
    sinks_of_rows,
    unfold,
)

Implementation = Literal["xla", "cpu", "mosaic_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def unsupported(implementation: Implementation, *, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Return why the implementation cannot run these shapes; "" if it can.

    group: query heads per KV head; dtype: of queries and pools.
    """
    if implementation == "xla":
        return ""
    return _module(implementation).unsupported(head_dim=head_dim, page_size=page_size, group=group, dtype=dtype)


def check_supported(
    implementation: Implementation, *, head_dim: int, page_size: int, group: int, dtype: jnp.dtype
) -> None:
    """Raise ConfigError unless the implementation can run these shapes, as `unsupported` says."""
    reason = unsupported(implementation, head_dim=head_dim, page_size=page_size, group=group, dtype=dtype)
    if reason:
        raise ConfigError(f"paged tree attention by {implementation!r} {reason}; 'xla' runs every shape")


def reads_slabs(implementation: Implementation) -> bool:
    """Return True if the implementation reads pools in two slabs."""
    return implementation in ("xla", "cpu")


def paged_tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    layer: int,
    tokens: PackedTokens,
    window: int | None = None,
    *,
    implementation: Implementation = "xla",
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from packed tokens to their committed context and in-flight ancestors.

    q: [H, D, T]; k, v: [K, D, T], feature-major, rotated; pools: [L, P, K, S, D], in one slab or two. window: a token
    sees only keys at positions above its own minus this, itself included; None: all. softcap: scores s become
    softcap * tanh(s / softcap); None: they stay. sinks: f[H], for each head a score without a key, which takes its
    share of the softmax and adds no value; None: none. Returns [H, D, T] in q's dtype.
    Scores are scaled by 1/sqrt(D) and reduced in float32. With no `tokens.blocks` it is the canonical order, whatever
    the implementation. Raises ConfigError: the implementation does not support the shapes, or two slabs.
    """
    num_heads, head_dim, num_tokens = q.shape
    kv_heads = k.shape[0]
    group = num_heads // kv_heads
    q_tokens = q.reshape(kv_heads, group, head_dim, num_tokens).transpose(3, 0, 1, 2)
    if tokens.blocks is None:
        if tokens.path is None:
            raise ValueError("canonical attention needs the ancestor paths: PackedTokens.path is None")
        out = reference.canonical_attention(
            q_tokens, k.transpose(2, 0, 1), v.transpose(2, 0, 1), k_pool, v_pool, layer,
            tokens.page_table[tokens.row], tokens.ctx_len[tokens.row], tokens.position, tokens.path, window, softcap,
            sinks,
        )  # fmt: skip
    elif implementation == "cpu":
        _check(implementation, k_pool, group)
        return _module(implementation).attend_packed(q, k, v, k_pool, v_pool, layer, tokens, window, softcap, sinks)
    else:
        k_keys, v_keys = k.transpose(0, 2, 1), v.transpose(0, 2, 1)
        rest = (layer, tokens, tokens.blocks, window)
        if implementation == "xla":
            out = reference.packed_attention(q_tokens, k_keys, v_keys, k_pool, v_pool, *rest, softcap, sinks)
        else:
            pools = _in_one_slab(implementation, k_pool, v_pool)
            operands = packed_operands(q_tokens, k_keys, v_keys, *pools, *rest, sinks)
            out = unfold(_attend(implementation, operands, softcap), tokens.blocks, group)
    return out.transpose(1, 2, 3, 0).reshape(num_heads, head_dim, num_tokens).astype(q.dtype)


def beam_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: Pool,
    v_pool: Pool,
    layer: int,
    page_table: jax.Array,
    ctx_len: jax.Array,
    visible: jax.Array,
    first: jax.Array | None = None,
    *,
    implementation: Implementation = "xla",
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from W queries of each row to the row's context and its own in-flight keys.

    q: [R, K, G, W, D]; k, v: [R, K, N, D], in flight; page_table: i32[R, pages]; ctx_len: i32[R]; visible: bool[R, W,
    N]; first: i32[R, W], first context position that a query sees, None: 0; softcap, sinks: as of
    `paged_tree_attention`. Returns f32[R, K, G, W, D].
    """
    rows, kv_heads, group, width, head_dim = q.shape
    if implementation == "cpu":
        _check(implementation, k_pool, group)
        return _module(implementation).attend_beam(
            q, k, v, k_pool, v_pool, layer, page_table, ctx_len, visible, first, softcap, sinks
        )  # fmt: skip
    folded = q.reshape(rows, kv_heads, group * width, head_dim)
    row_sinks = sinks_of_rows(sinks, kv_heads, width)
    if implementation == "xla":
        seen_from = None if first is None else jnp.tile(first, (1, group))
        context = reference.context_partial(folded, k_pool, v_pool, layer, page_table, ctx_len, seen_from, softcap)
        tree = reference.inflight_partial(folded, k, v, jnp.tile(visible, (1, group, 1)), softcap, row_sinks)
        return reference.merge(context, tree).reshape(q.shape)
    keys = -(-k.shape[2] // TILE) * TILE

    def by_head(x: jax.Array) -> jax.Array:
        return pad_to_tiles(x).swapaxes(0, 1).reshape(kv_heads, rows * keys, head_dim)

    index = jnp.arange(rows, dtype=jnp.int32)
    num_tiles = jnp.full(rows, keys // TILE, jnp.int32)
    bits = pack_bits(jnp.pad(visible, ((0, 0), (0, 0), (0, keys - k.shape[2]))))
    operands = Operands(
        folded, by_head(k), by_head(v), *_in_one_slab(implementation, k_pool, v_pool),
        jnp.full(1, layer, jnp.int32), page_table, index, ctx_len, first, index * (keys // TILE), num_tiles, bits,
        row_sinks,
    )  # fmt: skip
    return _attend(implementation, operands, softcap).reshape(q.shape)


def _in_one_slab(implementation: Implementation, k_pool: Pool, v_pool: Pool) -> tuple[jax.Array, jax.Array]:
    if isinstance(k_pool, Slabs) or isinstance(v_pool, Slabs):
        raise ConfigError(f"paged tree attention by {implementation!r} reads pools in one slab; 'xla' reads two")
    return k_pool, v_pool


def _module(implementation: Implementation):
    return import_module(f"adaserve_jax.pallas_kernels.paged_tree_attention.{implementation}")


def _attend(implementation: Implementation, operands: Operands, softcap: float | None) -> jax.Array:
    """Run the implementation's kernel; returns f32[B, K, M, D]."""
    _check(implementation, operands.k_pool, operands.group)
    return _traced_once(_module(implementation).attend)(operands, softcap=softcap)


@cache
def _traced_once(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a kernel that jax traces and lowers once for all layers of a program: Python takes about a second to lower
    one in Mosaic. XLA inlines the calls."""
    return jax.jit(kernel, static_argnames=("softcap",))


def _check(implementation: Implementation, pool: Pool, group: int) -> None:
    check_supported(
        implementation, head_dim=pool.shape[4], page_size=pool.shape[3], group=group, dtype=jnp.dtype(pool.dtype)
    )  # fmt: skip
