"""The kernels on this device: are they right, and how near do they come to what their bytes and operations cost.

Conformance compiles every implementation that supports a shape and holds it against the float64 oracle of the tests,
with NaN in all that no context uses. Timings run LAYERS layers in one program, each with pages of its own, so that no
layer finds its pages in a cache because the one before read them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.paged_tree_attention import api
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import PackedTokens, expand_bits, query_blocks
from adaserve_jax.runtime.pools import pool_head_dim
from adaserve_jax.tree.verify import ancestor_bits
from benchmarks.kernels.attention_specs import (
    CPU,
    DTYPES,
    FULL,
    LAYER,
    TINY,
    AttentionCase,
    AttentionSpec,
    make_case,
    page_table,
    trees,
)
from benchmarks.kernels.ceilings import Ceilings, in_turns
from tests.oracles.attention import oracle_attention

LAYERS = 12
SAMPLED_TOKENS = 48  # tokens of a large shape that the oracle computes
NAIVE = "naive"
VOCABULARIES = (2048, 32_000, 151_936)


@dataclass(frozen=True)
class Conformance:
    """error: the largest difference to the oracle over its tolerance, at most 1 where ok; detail: of what failed."""

    kernel: str
    implementation: str
    spec: str
    ok: bool
    error: float | None
    detail: str = ""


@dataclass(frozen=True)
class KernelTime:
    """seconds: of one layer. floor_s: what its bytes and operations cost at least."""

    kernel: str
    implementation: str
    spec: str
    seconds: float
    floor_s: float

    @property
    def of_floor(self) -> float:
        """Times the floor."""
        return self.seconds / self.floor_s


@dataclass(frozen=True)
class PickTime:
    """Seconds to find the largest of `vocabulary` scores in 64 rows."""

    vocabulary: int
    argmax_s: float
    top_k_s: float


def device_implementations() -> tuple[str, ...]:
    """What can run compiled here."""
    backend = jax.default_backend()
    return {"gpu": ("xla", "mosaic_gpu"), "tpu": ("xla", "mosaic_tpu")}.get(backend, ("xla", "cpu"))


def packed_tokens(spec: AttentionSpec, table: Any, ctx_len: Any, row: Any, parent: Any, position: Any) -> PackedTokens:
    blocks = query_blocks(
        jnp.asarray(spec.counts, jnp.int32), row, num_blocks=spec.num_blocks, block_size=spec.block_size
    )
    safe = jnp.minimum(row, len(spec.counts) - 1)
    counts = jnp.asarray(spec.counts, jnp.int32)
    return PackedTokens(table, ctx_len, counts, safe, position, ancestor_bits(parent), blocks, None)


def check_attention(spec: AttentionSpec, implementations: Sequence[Any]) -> list[Conformance]:
    """Each implementation on one shape, compiled for this device."""
    case = make_case(spec, seed=0, platform=jax.default_backend())
    rng = np.random.default_rng(1)
    real = np.flatnonzero(case.row < len(spec.counts))
    chosen = real if len(real) <= SAMPLED_TOKENS else np.sort(rng.choice(real, SAMPLED_TOKENS, replace=False))
    expected = oracle_attention(
        *case[:5], LAYER, *case[5:9], spec.window, only=chosen, softcap=spec.softcap, sinks=case.sinks
    )[:, :, chosen]
    return [_conformance(spec, implementation, case, chosen, expected) for implementation in implementations]


def _conformance(
    spec: AttentionSpec, implementation: Any, case: AttentionCase, chosen: np.ndarray, expected: np.ndarray
) -> Conformance:
    @jax.jit
    def run(q, k, v, k_pool, v_pool, *where):
        tokens = packed_tokens(spec, *where)
        return api.paged_tree_attention(
            q,
            k,
            v,
            k_pool,
            v_pool,
            LAYER,
            tokens,
            spec.window,
            implementation=implementation,
            softcap=spec.softcap,
            sinks=case.sinks,
        )

    kernel = "paged_tree_attention"
    try:
        out = np.asarray(run(*case[:-1]).astype(jnp.float32), np.float64)
    except Exception as error:  # a kernel that does not compile or run is a finding, not the end of the report
        return Conformance(kernel, implementation, spec.name, False, None, f"{type(error).__name__}: {error}"[:600])
    difference = np.abs(out[:, :, chosen] - expected)
    error = float(difference.max()) / spec.tolerance
    ok = bool(np.isfinite(difference).all() and error <= 1)
    return Conformance(kernel, implementation, spec.name, ok, error if np.isfinite(error) else None)


def runs_attention(implementation: Any, spec: AttentionSpec) -> bool:
    shape = {
        "head_dim": pool_head_dim(spec.head_dim, jax.default_backend()),
        "page_size": spec.page_size,
        "group": spec.group,
    }
    try:
        api.check_supported(implementation, **shape, dtype=jnp.dtype(DTYPES[spec.dtype]))
    except ConfigError:
        return False
    return True


def conformance(full: bool) -> list[Conformance]:
    """Every implementation of this device on every shape that it supports. full: the large shapes too.

    Shapes are checked side by side, since compiling and the oracle take most of the time.
    """
    specs = [*TINY.values(), CPU, *(FULL.values() if full else ())]

    def check(spec: AttentionSpec) -> list[Conformance]:
        return check_attention(spec, [each for each in device_implementations() if runs_attention(each, spec)])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        return sorted(chain.from_iterable(threads.map(check, specs)), key=lambda each: each.implementation)


def naive_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, layer: int, tokens: PackedTokens
) -> jax.Array:
    """What one would write first: gather each request's pages, one einsum over all of them and one over the tree.
    As many tokens in every request."""
    rows, kv_heads, head_dim = tokens.page_table.shape[0], k.shape[0], k.shape[1]
    per_row, group = tokens.num_tokens // rows, q.shape[0] // kv_heads

    def gathered(pool: jax.Array) -> jax.Array:
        pages = pool[layer, tokens.page_table][..., :head_dim]
        return pages.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, head_dim)

    keys, values = gathered(k_pool), gathered(v_pool)
    q_rows = q.reshape(kv_heads, group, head_dim, rows, per_row).transpose(3, 0, 1, 4, 2) * head_dim**-0.5
    in_context = jnp.arange(keys.shape[2]) < tokens.ctx_len[:, None]
    context = jnp.einsum("rkgtd,rkcd->rkgtc", q_rows, keys, preferred_element_type=jnp.float32)
    context = jnp.where(in_context[:, None, None, None], context, -1e30)
    k_tree, v_tree = (x.reshape(kv_heads, head_dim, rows, per_row) for x in (k, v))
    own = jnp.arange(rows)
    seen = expand_bits(tokens.bits, tokens.num_tokens).reshape(rows, per_row, rows, per_row)[own, :, own]
    tree = jnp.einsum("rkgtd,kdru->rkgtu", q_rows, k_tree, preferred_element_type=jnp.float32)
    tree = jnp.where(seen[:, None, None], tree, -1e30)
    weights = jax.nn.softmax(jnp.concatenate([context, tree], axis=-1), axis=-1).astype(values.dtype)
    split = keys.shape[2]
    out = jnp.einsum("rkgtc,rkcd->rkgtd", weights[..., :split], values)
    out += jnp.einsum("rkgtu,kdru->rkgtd", weights[..., split:], v_tree)
    return out.transpose(1, 2, 4, 0, 3).reshape(q.shape).astype(q.dtype)


def time_attention(spec: AttentionSpec, ceilings: Ceilings, *, naive: bool) -> list[KernelTime]:
    """Every implementation of this device that supports the shape, in turns."""
    rng = np.random.default_rng(0)
    dtype = DTYPES[spec.dtype]
    table = page_table(spec, rng)
    heads = spec.group * spec.kv_heads
    features = pool_head_dim(spec.head_dim, jax.default_backend())
    pool_shape = (LAYERS, table.size + 3, spec.kv_heads, spec.page_size, features)
    keys = jax.random.split(jax.random.key(0), 5)
    k_pool, v_pool = (jax.random.normal(key, pool_shape, dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (spec.kv_heads, spec.head_dim, spec.num_tokens), dtype) for key in keys[2:4])
    q = jax.random.normal(keys[4], (heads, spec.head_dim, spec.num_tokens), dtype)
    where = [jnp.asarray(x) for x in (table, np.asarray(spec.contexts, np.int32), *trees(spec, rng))]
    sinks = jnp.asarray(rng.standard_normal(heads, np.float32)) if spec.sinks else None
    changes = {"window": spec.window, "softcap": spec.softcap, "sinks": sinks}

    def layers(attend: Callable[..., jax.Array]) -> Callable[[], jax.Array]:
        @jax.jit
        def run(q, k, v, k_pool, v_pool, *where):
            tokens, x = packed_tokens(spec, *where), q
            for layer in range(LAYERS):
                x = jax.lax.optimization_barrier(
                    (q + 0.5 * attend(x, k, v, k_pool, v_pool, layer, tokens)).astype(dtype)
                )
            return x

        return lambda: run(q, k, v, k_pool, v_pool, *where)

    calls = {
        implementation: layers(
            partial(api.paged_tree_attention, implementation=implementation, **changes)  # type: ignore[arg-type]
        )
        for implementation in device_implementations()
        if runs_attention(implementation, spec)
    }
    if naive and all(value is None for value in changes.values()) and len(set(spec.counts)) == 1:
        calls[NAIVE] = layers(naive_attention)
    floor_s = ceilings.floor_s(spec.kv_bytes + spec.io_bytes, spec.flops)
    return [
        KernelTime("paged_tree_attention", name, spec.name, seconds / LAYERS, floor_s)
        for name, seconds in in_turns(calls).items()
    ]


def time_kernels(ceilings: Ceilings, *, full: bool) -> list[KernelTime]:
    """The shape for CPUs beside the naive form; with `full`, every large shape."""
    found = time_attention(CPU, ceilings, naive=True)
    if full:
        for spec in FULL.values():
            found += time_attention(spec, ceilings, naive=False)
    return found


def time_picks(vocabularies: Sequence[int] = VOCABULARIES) -> list[PickTime]:
    """argmax against top_k(1), which the samplers use."""
    found = []
    for vocabulary in vocabularies:
        scores = jax.random.normal(jax.random.key(0), (64, vocabulary))
        argmax, top = jax.jit(lambda x: jnp.argmax(x, axis=-1)), jax.jit(lambda x: jax.lax.top_k(x, 1)[1])
        times = in_turns({"argmax": partial(argmax, scores), "top_k": partial(top, scores)})
        found.append(PickTime(vocabulary, times["argmax"], times["top_k"]))
    return found
