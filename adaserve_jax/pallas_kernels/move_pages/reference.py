"""The XLA implementation, everywhere: page after page, a slice of all layers at a time.

A loop instead of one gather and scatter: it needs memory for one page and not for N, it runs one iteration per move,
whatever the padding, and XLA updates a donated pool in place that a loop only slices and updates, also if it is the
pool that is read. A scatter would hold all N pages first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def move_pages(target: jax.Array, source: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Implement `api.move_pages`."""
    return _by_platform(target, source, from_pages, to_pages)


def move_pages_within(pool: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Implement `api.move_pages_within`. No page is both read and written: earlier moves change later reads."""
    return _by_platform(pool, None, from_pages, to_pages)


def _by_platform(target: jax.Array, source: jax.Array | None, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Move pools of small floats as integers on a CPU, for a copy of each pool per call and one back.

    XLA of jax 0.10 emulates floats below 32 bits there: each iteration would convert the whole pool to f32 and back.
    """
    operands = (target, source, from_pages, to_pages)
    if target.dtype.itemsize >= 4 or not jnp.issubdtype(target.dtype, jnp.floating):
        return _page_by_page(*operands)
    return lax.platform_dependent(*operands, cpu=_as_integers, default=_page_by_page)


def _as_integers(target: jax.Array, source: jax.Array | None, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    word = jnp.dtype(f"uint{8 * target.dtype.itemsize}")
    words = None if source is None else lax.bitcast_convert_type(source, word)
    moved = _page_by_page(lax.bitcast_convert_type(target, word), words, from_pages, to_pages)
    return lax.bitcast_convert_type(moved, target.dtype)


def _page_by_page(target: jax.Array, source: jax.Array | None, from_pages: jax.Array, to_pages: jax.Array) -> jax.Array:
    """Move pages. source: the pool to read; None for the target."""
    live = (to_pages >= 0) & (to_pages < target.shape[1])
    live_first = jnp.argsort(~live)
    from_pages, to_pages = from_pages[live_first], to_pages[live_first]

    def move(index: jax.Array, pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice_in_dim(pool if source is None else source, from_pages[index], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pool, page, to_pages[index], axis=1)

    return lax.fori_loop(0, jnp.sum(live, dtype=jnp.int32), move, target)
