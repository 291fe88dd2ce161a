"""Named shapes of page moves and their inputs, shared by tests and benchmarks.

`TINY` is for interpreters, `FULL` for devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from adaserve_jax.pallas_kernels.compat import DTYPES


@dataclass(frozen=True)
class MoveSpec:
    """One shape. moves: real ones; padding: entries that copy nothing, spread among them; target_pages: P of the pool
    written; source_pages: P of the pool read, 0: moves inside the target."""

    name: str
    layers: int
    kv_heads: int
    page_size: int
    head_dim: int
    moves: int
    padding: int
    target_pages: int
    source_pages: int
    dtype: str = "bf16"

    @property
    def within(self) -> bool:
        return self.source_pages == 0

    @property
    def target_shape(self) -> tuple[int, int, int, int, int]:
        """Return [L, P, K, S, D] of the pool written."""
        return (self.layers, self.target_pages, self.kv_heads, self.page_size, self.head_dim)

    @property
    def source_shape(self) -> tuple[int, int, int, int, int]:
        """Return [L, P, K, S, D] of the pool read."""
        return self.target_shape if self.within else (self.layers, self.source_pages, *self.target_shape[2:])

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page in all layers of one pool (K or V)."""
        return self.layers * self.kv_heads * self.page_size * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that the moves read and write together."""
        return 2 * self.moves * self.page_bytes


class MoveCase(NamedTuple):
    """Inputs of one spec, NumPy. target: [L, P, K, S, D]; source: the same but for P, None inside one pool;
    from_pages, to_pages: i32[moves + padding]."""

    target: np.ndarray
    source: np.ndarray | None
    from_pages: np.ndarray
    to_pages: np.ndarray


def make_case(spec: MoveSpec, seed: int) -> MoveCase:
    """Make pools of random bits, NaNs of all kinds among them, and random moves without clashes.

    Padding writes to page -1 or P or beyond, and reads from pages that do not exist.
    """
    rng = np.random.default_rng(seed)
    target = _random_bits(spec.target_shape, DTYPES[spec.dtype], rng)
    source = None if spec.within else _random_bits(spec.source_shape, DTYPES[spec.dtype], rng)
    pages = rng.permutation(spec.target_pages)
    to_pages = pages[: spec.moves]
    if spec.within:
        from_pages = rng.choice(pages[spec.moves :], spec.moves)
    else:
        from_pages = rng.integers(0, spec.source_pages, spec.moves)
    nowhere = rng.choice([-(2**31), -1, spec.target_pages, 2**31 - 1], spec.padding)
    order = rng.permutation(spec.moves + spec.padding)
    from_pages = np.concatenate([from_pages, np.full(spec.padding, 2**30)])[order]
    to_pages = np.concatenate([to_pages, nowhere])[order]
    return MoveCase(target, source, from_pages.astype(np.int32), to_pages.astype(np.int32))


def _random_bits(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


_BETWEEN = MoveSpec("between", 2, 2, 8, 16, 3, 0, 7, 5)
_WITHIN = replace(_BETWEEN, name="within", target_pages=9, source_pages=0)

TINY = {
    spec.name: spec
    for spec in (
        _BETWEEN,
        _WITHIN,
        replace(_BETWEEN, name="between_f32", dtype="f32"),
        replace(_WITHIN, name="within_f32", dtype="f32"),
        replace(_BETWEEN, name="between_padded", moves=2, padding=3),
        replace(_WITHIN, name="within_padded", moves=2, padding=3),
        replace(_BETWEEN, name="all_padding", moves=0, padding=2),
        replace(_BETWEEN, name="no_moves", moves=0),
        replace(_BETWEEN, name="into_fewer_pages", moves=4, target_pages=4, source_pages=11),
        replace(_BETWEEN, name="one_head", kv_heads=1, layers=3),
        replace(_WITHIN, name="many_heads", kv_heads=9, layers=1, moves=2),
        replace(_WITHIN, name="many_moves", target_pages=24, moves=11, padding=1, head_dim=8),
    )
}


def _full(name: str, layers: int, head_dim: int, moves: int, dtype: str, within: bool) -> MoveSpec:
    """Build a spec of 8 KV heads and pages of 64 slots, in pools twice as large as the moves need."""
    pages = max(2 * moves, 128)
    return MoveSpec(name, layers, 8, 64, head_dim, moves, 0, pages, 0 if within else pages, dtype)


FULL = {
    spec.name: spec
    for model, layers, head_dim in (("1b", 16, 64), ("8b", 32, 128))
    for moves in (1, 64, 512)
    for dtype in DTYPES
    for within in (False, True)
    for spec in (
        _full(f"{model}_{moves}_{dtype}" + ("_within" if within else ""), layers, head_dim, moves, dtype, within),
    )
}
