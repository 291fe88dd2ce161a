"""A page pool of one model's keys, or values: one array, or two whose page ids follow one another.

The second is there only while a pool is extended. A program compiled for one array has nothing of this in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slabs(NamedTuple):
    """A pool in two arrays. base: [L, P, K, S, D], pages 0 <= id < P; extension: [L, X, K, S, D], the X pages after
    them. shape and dtype are those of both as one pool."""

    base: jax.Array
    extension: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        layers, pages, *page = self.base.shape
        return (layers, pages + self.extension.shape[1], *page)

    @property
    def dtype(self) -> jnp.dtype:
        return self.base.dtype


Pool = jax.Array | Slabs
"""Keys or values of all layers, [L, P, K, S, D]."""


def read_pages(pool: Pool, layer: int, ids: jax.Array) -> jax.Array:
    """Pages of a layer, [..., K, S, D] for ids i32[...]; of ids that no page has, anything.

    Of two slabs both are read and one result is chosen: a page of the other slab costs little, because it is always
    its first, which stays in the cache. Branches cost more (docs/architecture/device.md).
    """
    if not isinstance(pool, Slabs):
        return pool[layer, ids]
    base_pages = pool.base.shape[1]
    in_base = ids < base_pages
    of_base = pool.base[layer, jnp.where(in_base, ids, 0)]
    of_extension = pool.extension[layer, jnp.where(in_base, 0, ids - base_pages)]
    return jnp.where(in_base[..., None, None, None], of_base, of_extension)
