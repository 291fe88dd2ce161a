"""Copies of whole KV pages between two pools, of all layers in one call, and the check that their order is free.

XLA moves page after page, a slice of all layers at a time. A loop instead of one gather and scatter: it needs memory
for one page and not for N, it runs one iteration per move, whatever the padding, and XLA updates a donated pool in
place that a loop only slices and updates. A scatter would hold all N pages first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def check_moves(from_pages: np.ndarray, to_pages: np.ndarray, *, target_pages: int, source_pages: int) -> None:
    """Raise ValueError, naming the clash, unless the moves give the same result in any order. Runs on the host.

    from_pages, to_pages: i32[N]; entries with to_pages outside [0, target_pages) are padding and may hold anything.
    target_pages, source_pages: P of the pools written and read.
    """
    if from_pages.ndim != 1 or from_pages.shape != to_pages.shape:
        raise ValueError(
            f"from_pages and to_pages must be one list each, as long: {from_pages.shape}, {to_pages.shape}"
        )
    live = (to_pages >= 0) & (to_pages < target_pages)
    read = from_pages[live]
    outside = read[(read < 0) | (read >= source_pages)]
    if len(outside):
        raise ValueError(
            f"moves read pages that the source does not have: {_some(outside)}; it has {source_pages} pages"
        )
    pages, times = np.unique(to_pages[live], return_counts=True)
    if (times > 1).any():
        raise ValueError(f"moves write pages more than once: {_some(pages[times > 1])}")


def _some(pages: np.ndarray) -> str:
    """List the first few pages, for a message."""
    return ", ".join(map(str, pages[:8].tolist())) + (", ..." if len(pages) > 8 else "")


def move_pages(target: jax.Array, source: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Write pages of the source into the target, in place where the target is donated.

    target: [L, P, K, S, D]; source: the same but for P, another pool. from_pages, to_pages: i32[N], N fixed when
    compiling; entries with to_pages outside [0, P) are padding: they copy nothing, whatever their from_pages.
    Returns the target, with target[:, to_pages] = source[:, from_pages] and all other pages as they were, bit by bit.
    Raises ValueError: shapes or dtypes do not belong together.
    """
    rest = (source.shape[0], *source.shape[2:])
    if target.ndim != 5 or rest != (target.shape[0], *target.shape[2:]) or source.dtype != target.dtype:
        raise ValueError(
            f"pages move between pools that differ in the number of pages only: target {target.dtype}{target.shape}, "
            f"source {source.dtype}{source.shape}"
        )
    operands = (target, source, from_pages, to_pages)
    if target.dtype.itemsize >= 4 or not jnp.issubdtype(target.dtype, jnp.floating):
        return _page_by_page(*operands)
    return lax.platform_dependent(*operands, cpu=_as_integers, default=_page_by_page)


def _as_integers(target: jax.Array, source: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Move pages of small floats as integers, for a copy of each pool and one back.

    XLA of jax 0.10 emulates floats below 32 bits on a CPU: each iteration would convert the whole pool to f32 and back.
    """
    word = jnp.dtype(f"uint{8 * target.dtype.itemsize}")
    as_words = lax.bitcast_convert_type(target, word)
    moved = _page_by_page(as_words, lax.bitcast_convert_type(source, word), from_pages, to_pages)
    return lax.bitcast_convert_type(moved, target.dtype)


def _page_by_page(target: jax.Array, source: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    live = (to_pages >= 0) & (to_pages < target.shape[1])
    live_first = jnp.argsort(~live)
    from_pages, to_pages = from_pages[live_first], to_pages[live_first]

    def move(index: jax.Array, pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(source, from_pages[index], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pool, page, to_pages[index], axis=1)

    return lax.fori_loop(0, jnp.sum(live, dtype=jnp.int32), move, target)
