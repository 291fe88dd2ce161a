"""Paged tree attention by the C++ kernel: one call per layer, which reads the operands as the decoder has them.

XLA's own form is some twenty operations per layer and page, and their dispatch took longer than reading the keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.cpu_kernels.library import fingerprint, target
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import PackedTokens, Pool, Slabs, pack_bits

LANES = 16
"""Head dimensions must be a multiple of this, the widest vector of any CPU."""


def unsupported(*, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Return why the kernel cannot run these shapes; "" if it can."""
    if not fingerprint():
        return "needs a C++ compiler: install g++ or clang, or `pip install ziglang`"
    if dtype != jnp.float32:
        return f"is for f32, not {jnp.dtype(dtype).name}"
    return f"needs a head dimension that is a multiple of {LANES}, got {head_dim}" if head_dim % LANES else ""


def attend_packed(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: Pool, v_pool: Pool, layer: int, tokens: PackedTokens,
    window: int | None, softcap: float | None = None, sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attend from packed tokens; arguments and result as of `api.paged_tree_attention`, f32."""
    call = jax.ffi.ffi_call(target("packed_attention"), jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q, k, v, *_slabs(k_pool, v_pool), tokens.page_table, tokens.ctx_len, tokens.count, tokens.position, tokens.bits,
        _sinks(sinks), layer=np.int64(layer), window=np.int64(window or 0), softcap=np.float32(softcap or 0),
    )  # fmt: skip


def attend_beam(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: Pool, v_pool: Pool, layer: int, page_table: jax.Array,
    ctx_len: jax.Array, visible: jax.Array, first: jax.Array | None, softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attend from the rows of a beam; arguments and result as of `api.beam_attention`, f32."""
    if first is None:
        first = jnp.zeros(visible.shape[:2], jnp.int32)
    call = jax.ffi.ffi_call(target("beam_attention"), jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        q, k, v, *_slabs(k_pool, v_pool), page_table, ctx_len, first, pack_bits(visible), _sinks(sinks),
        layer=np.int64(layer), softcap=np.float32(softcap or 0),
    )  # fmt: skip


def _sinks(sinks: jax.Array | None) -> jax.Array:
    """Return f32[H], or f32[0] if there are none."""
    return jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)


def _slabs(k_pool: Pool, v_pool: Pool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return pools of K and V and their extensions, empty ones if there are none."""
    if isinstance(k_pool, Slabs) and isinstance(v_pool, Slabs):
        return k_pool.base, v_pool.base, k_pool.extension, v_pool.extension
    assert isinstance(k_pool, jax.Array) and isinstance(v_pool, jax.Array)
    layers, _, *page = k_pool.shape
    none = jnp.zeros((layers, 0, *page), k_pool.dtype)
    return k_pool, v_pool, none, none
