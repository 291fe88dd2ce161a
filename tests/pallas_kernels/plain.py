"""The algorithm of the Mosaic kernels in plain Pallas, for its interpreter, which needs no device.

One program per block and KV head; pages one after another with a running maximum and sum, then tiles of in-flight
keys behind their bits. Tests put it in the place of a device's kernel, to check the algorithm and its operands.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from adaserve_jax.pallas_kernels.compat import pl
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import TILE, Operands

LOWEST = -1e30


def attend(operands: Operands, *, softcap: float | None = None) -> jax.Array:
    """Return attention f32[B, K, M, D], normalised; query rows that see nothing are 0."""
    num_blocks, kv_heads, rows, head_dim = operands.q.shape
    whole = [x for x in operands if x is not None]
    return pl.pallas_call(
        partial(_kernel, present=[x is not None for x in operands], num_queries=operands.num_queries, softcap=softcap),
        out_shape=jax.ShapeDtypeStruct(operands.q.shape, jnp.float32),
        grid=(num_blocks, kv_heads),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in whole],
        out_specs=pl.BlockSpec((1, 1, rows, head_dim), lambda b, h: (b, h, 0, 0)),
        interpret=True,
    )(*whole)


def _kernel(*refs: Any, present: list[bool], num_queries: int, softcap: float | None) -> None:
    *inputs, out = refs
    given = iter(inputs)
    ops = Operands(*(next(given) if here else None for here in present))  # type: ignore[arg-type]
    block, head = pl.program_id(0), pl.program_id(1)
    q = ops.q[block, head].astype(jnp.float32)
    rows, head_dim = q.shape
    group, page_size = rows // num_queries, ops.k_pool.shape[3]
    layer, table_row, ctx_len = ops.layer[0], ops.row[block], ops.ctx_len[block]
    scale = head_dim**-0.5

    def absorb(state: Any, keys: jax.Array, values: jax.Array, visible: jax.Array) -> Any:
        weighted, peak, mass = state
        scores = (q @ keys.astype(jnp.float32).T) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, LOWEST)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weight = jnp.where(visible, jnp.exp(scores - new_peak[:, None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        weighted = weighted * shrink[:, None] + weight @ values.astype(jnp.float32)
        return weighted, new_peak, mass * shrink + jnp.sum(weight, axis=1)

    def page(index: jax.Array, state: Any) -> Any:
        page_id = ops.page_table[table_row, index]
        at = index * page_size + jnp.arange(page_size)
        live = (at >= floor) & (at < ctx_len)
        keys = ops.k_pool[layer, page_id, head]
        values = jnp.where(live[:, None], ops.v_pool[layer, page_id, head], 0)
        visible = jnp.broadcast_to(live[None, :], (rows, page_size))
        if ops.first is not None:
            visible &= at[None, :] >= jnp.tile(ops.first[block], group)[:, None]
        return absorb(state, keys, values, visible)

    def tile(index: jax.Array, state: Any) -> Any:
        start = (ops.tile[block] + index) * TILE
        words = ops.bits[block, :, pl.ds(index * (TILE // 32), TILE // 32)]
        column = jnp.arange(TILE)
        seen = (jnp.repeat(words, 32, axis=1) >> (column % 32).astype(jnp.uint32)) & 1 != 0
        keys, values = ops.k[head, pl.ds(start, TILE)], ops.v[head, pl.ds(start, TILE)]
        return absorb(state, keys, values, jnp.tile(seen, (group, 1)))

    floor = 0 if ops.first is None else jnp.maximum(jnp.min(ops.first[block]), 0)
    peak, mass = (jnp.full(rows, LOWEST), jnp.zeros(rows)) if ops.sinks is None else (ops.sinks[head], jnp.ones(rows))
    state = (jnp.zeros((rows, head_dim)), peak, mass)
    state = lax.fori_loop(floor // page_size, (ctx_len + page_size - 1) // page_size, page, state)
    weighted, _, mass = lax.fori_loop(0, ops.num_tiles[block], tile, state)
    out[0, 0] = weighted / jnp.maximum(mass, 1e-30)[:, None]


def put_in_place_of(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interface call this kernel in the place of another one."""
    monkeypatch.setattr(kernel, "attend", attend)
    monkeypatch.setattr(kernel, "unsupported", unsupported)


def unsupported(*, head_dim: int, page_size: int, group: int, dtype: jnp.dtype) -> str:
    """Return "": the interpreter runs all shapes."""
    return ""
