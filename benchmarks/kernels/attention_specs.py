"""Named shapes of paged tree attention and their inputs, shared by tests and benchmarks.

`TINY` is for interpreters, `FULL` for devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from adaserve_jax.runtime.pools import pool_head_dim

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
"""Types of pools by their names in specs."""


@dataclass(frozen=True)
class AttentionSpec:
    """One shape. counts: in-flight tokens per request; contexts: committed tokens per request; chain: parents form a
    chain, else a random tree; tokens: packed length T, 0: as many as there are; block_size: Q; sinks: whether each head
    has one."""

    name: str
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    chain: bool
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    block_size: int
    dtype: str = "bf16"
    tokens: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def num_tokens(self) -> int:
        return self.tokens or sum(self.counts)

    @property
    def num_blocks(self) -> int:
        return sum(-(-count // self.block_size) for count in self.counts)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all keys and values that attention must read, each once."""
        context = [c if self.window is None else min(c, self.window) for c in self.contexts]
        per_token = 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize
        return (sum(context) + sum(self.counts)) * per_token

    @property
    def io_bytes(self) -> int:
        """Return the bytes of queries read and results written."""
        return 2 * sum(self.counts) * self.group * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Return the operations of both products over the context, without those among in-flight tokens."""
        pairs = sum(
            count * (context if self.window is None else min(context, self.window))
            for count, context in zip(self.counts, self.contexts, strict=True)
        )
        return 4 * pairs * self.group * self.kv_heads * self.head_dim

    @property
    def tolerance(self) -> float:
        """Return the largest error that rounding may cause: in float32 sums, growing with the keys, and in bf16 inputs
        and weights."""
        keys = max(context + count for context, count in zip(self.contexts, self.counts, strict=True))
        return 2e-6 * max(1.0, keys / 64) ** 0.5 + (2e-2 if self.dtype == "bf16" else 0.0)


class AttentionCase(NamedTuple):
    """Inputs of one spec, NumPy. q: [H, D, T]; k, v: [K, D, T]; pools: [2, P, K, S, D], of which layer 1 is used and
    D may be padded; page_table: i32[R, pages]; ctx_len: i32[R]; row, parent, position: i32[T], row = R where padded;
    sinks: f32[H], or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    page_table: np.ndarray
    ctx_len: np.ndarray
    row: np.ndarray
    parent: np.ndarray
    position: np.ndarray
    sinks: np.ndarray | None = None


LAYER = 1


def make_case(spec: AttentionSpec, seed: int, platform: str = "cpu") -> AttentionCase:
    """Make random inputs, with NaN in every page and slot that no context uses or that lies before every window of its
    request. Pages are shuffled over the pool, which has the padding of its platform."""
    rng = np.random.default_rng(seed)
    dtype, size = DTYPES[spec.dtype], spec.page_size
    table = page_table(spec, rng)
    features = pool_head_dim(spec.head_dim, platform)
    shape = (2, table.size + 3, spec.kv_heads, size, features)
    k_pool, v_pool = (np.full(shape, np.nan, dtype) for _ in range(2))
    for row, context in enumerate(spec.contexts):
        oldest = 0 if spec.window is None else max(0, context - spec.window + 1)
        at = np.arange(oldest, context)
        for pool in (k_pool, v_pool):
            values = rng.standard_normal((len(at), spec.kv_heads, spec.head_dim), np.float32)
            padded = np.pad(values, ((0, 0), (0, 0), (0, features - spec.head_dim)))
            pool[LAYER, table[row, at // size], :, at % size] = padded.astype(dtype)
    q = rng.standard_normal((spec.group * spec.kv_heads, spec.head_dim, spec.num_tokens), np.float32)
    k, v = (rng.standard_normal((spec.kv_heads, spec.head_dim, spec.num_tokens), np.float32) for _ in range(2))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    case = AttentionCase(q, k, v, k_pool, v_pool, table, np.asarray(spec.contexts, np.int32), *trees(spec, rng))
    return case._replace(sinks=rng.standard_normal(len(q), np.float32)) if spec.sinks else case


def page_table(spec: AttentionSpec, rng: np.random.Generator) -> np.ndarray:
    """Return i32[R, pages], pages in random order of a pool that has three more."""
    rows = len(spec.counts)
    pages = -(-(max(spec.contexts) + max(spec.counts)) // spec.page_size)
    return rng.permutation(rows * pages + 3)[: rows * pages].reshape(rows, pages).astype(np.int32)


def trees(spec: AttentionSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, parent and position of the packed tokens, i32[T] each."""
    row = np.full(spec.num_tokens, len(spec.counts), np.int32)
    parent = np.full(spec.num_tokens, -1, np.int32)
    position = np.zeros(spec.num_tokens, np.int32)
    start = 0
    for index, (count, context) in enumerate(zip(spec.counts, spec.contexts, strict=True)):
        for token in range(start, start + count):
            row[token], position[token] = index, context
            if token > start:
                parent[token] = token - 1 if spec.chain else rng.integers(start, token)
                position[token] = position[parent[token]] + 1
        start += count
    return row, parent, position


def _tiny(name: str, counts: tuple[int, ...], contexts: tuple[int, ...], chain: bool, **changes: Any) -> AttentionSpec:
    base = AttentionSpec(name, counts, contexts, chain, 2, 1, 64, 16, 4, "f32")
    return replace(base, **changes)


TINY = {
    spec.name: spec
    for spec in (
        _tiny("decode", (1, 1, 1), (0, 17, 40), True, block_size=1, tokens=4),
        _tiny("chain", (4, 4), (16, 5), True, kv_heads=2),
        _tiny("tree", (5, 1, 8), (3, 33, 16), False, tokens=16),
        _tiny("tree_past_a_tile", (60, 7), (20, 18), False, block_size=16),
        _tiny("tree_one_head", (8,), (30,), False, group=1, kv_heads=2),
        _tiny("tree_eight_heads", (6, 3), (12, 32), False, group=8),
        _tiny("prefill", (21, 1, 6), (8, 5, 0), True, group=1, kv_heads=2, block_size=16, tokens=32),
        _tiny("wide_head", (3, 5), (20, 31), False, head_dim=128),
        _tiny("large_page", (3, 5), (20, 70), False, page_size=64),
        _tiny("bf16", (5, 1, 8), (3, 33, 16), False, dtype="bf16", tokens=16),
        _tiny("windowed_decode", (1, 1, 1), (0, 17, 40), True, block_size=1, tokens=4, window=10),
        _tiny("windowed_tree", (5, 1, 8), (3, 33, 16), False, tokens=16, window=3),
        _tiny("windowed_prefill", (21, 1, 6), (8, 50, 30), True, group=1, block_size=8, tokens=32, window=17),
        _tiny("capped_tree", (5, 1, 8), (3, 33, 16), False, tokens=16, softcap=1.5),
        _tiny("sinks_tree", (5, 1, 8), (3, 33, 0), False, kv_heads=2, tokens=16, sinks=True),
        _tiny(
            "capped_windowed_sinks_prefill", (21, 1, 6), (8, 50, 30), True, block_size=8, tokens=32, window=17,
            softcap=1.5, sinks=True,
        ),
    )
}  # fmt: skip


RAGGED = (0, 64, 257, 700, 1500, 3000, 5000, 8192)
EQUAL = (2048,) * 8


def _full(name: str, count: int, chain: bool, **changes: Any) -> AttentionSpec:
    base = AttentionSpec(name, (count,) * 8, RAGGED, chain, 4, 8, 128, 64, min(16, count))
    spec = replace(base, **changes)
    return replace(spec, counts=(count,) * len(spec.contexts))


CPU = AttentionSpec("tree4_cpu", (4,) * 8, (512,) * 8, False, 3, 4, 64, 64, 4, "f32")
"""The shape that measures attention on a CPU: the demo target grown to 110M."""

FULL = {
    spec.name: spec
    for spec in (
        _full("decode", 1, True),
        _full("chain4", 4, True),
        _full("tree8", 8, False),
        _full("tree24", 24, False),
        _full("tree64", 64, False),
        _full("prefill64", 64, True),
        _full("prefill256", 256, True, contexts=(0, 700, 3000, 8192)),
        _full("decode_equal", 1, True, contexts=EQUAL),
        _full("tree24_equal", 24, False, contexts=EQUAL),
        _full("decode_32_requests", 1, True, contexts=(2048,) * 32),
        _full("decode_1_request", 1, True, contexts=(8192,)),
        _full("tree24_group1", 24, False, group=1),
        _full("tree24_group8", 24, False, group=8, kv_heads=4),
        _full("tree24_head64", 24, False, head_dim=64),
        _full("tree24_page16", 24, False, page_size=16),
        _full("tree24_page128", 24, False, page_size=128),
        _full("tree24_f32", 24, False, dtype="f32"),
        _full("tree24_windowed", 24, False, window=1024),
        _full("tree24_capped", 24, False, softcap=50.0),
        _full("tree24_sinks", 24, False, head_dim=64, sinks=True, window=128),
    )
}
