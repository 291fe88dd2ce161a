"""The pools of KV pages on the device, and every program that writes them, in place: the pools are donated.

A program that loops over a donated pool and then scatters into it makes XLA copy the pool; so steps only read, and what
they keep is written here (docs/architecture/device.md). Knows no tree and no sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.placement import Placement
from adaserve_jax.pallas_kernels.move_pages.api import move_pages
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import Pool, Slabs


class Pools(NamedTuple):
    """Paged K and V of all layers: [L, P, K, S, D] each. extension: while the pool is extended, [L, X, K, S, D] each,
    the pages after those, which `num_pages` counts too."""

    k: jax.Array
    v: jax.Array
    extension: Pools | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1] + (0 if self.extension is None else self.extension.num_pages)

    @property
    def keys(self) -> Pool:
        """K as attention reads it."""
        return self.k if self.extension is None else Slabs(self.k, self.extension.k)

    @property
    def values(self) -> Pool:
        """V as attention reads it."""
        return self.v if self.extension is None else Slabs(self.v, self.extension.v)


NO_PAGE = 1 << 30
"""No pool has it: what goes there is left out."""
POOL_HEADS = 2
IN_FLIGHT_HEADS = 2
"""The axis of KV heads in a pool, and in a step's in-flight K/V."""


class InFlight(NamedTuple):
    """K/V of a step's tokens and where they go. k, v: [L, T, K, D]; page, slot: i32[T], page = NO_PAGE for tokens that
    are not kept."""

    k: jax.Array
    v: jax.Array
    page: jax.Array
    slot: jax.Array


def new_pools(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, placement: Placement) -> Pools:
    """Empty pools of the whole model, divided by heads where it lies on several devices."""
    shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim)
    spec = placement.spec(POOL_HEADS)
    return Pools(placement.zeros(shape, dtype, spec), placement.zeros(shape, dtype, spec))


def blank(like: Pools) -> Pools:
    """Pools of the same shapes on one device. What they hold is not defined: zeros on a CPU, where XLA knows nothing
    else, and elsewhere what was there, so that nothing is written."""
    return jax.tree.map(lambda pool: lax.empty(pool.shape, pool.dtype), like)


def places(fields: dict[str, jax.Array], keep: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and slot of every token's position, i32[T]; NO_PAGE for tokens that are not kept. keep: bool[T]."""
    row = jnp.minimum(fields["row"], fields["page_table"].shape[0] - 1)
    page = fields["page_table"][row, fields["position"] // page_size]
    return jnp.where(keep, page, NO_PAGE), fields["position"] % page_size


def commit(pools: Pools, in_flight: InFlight) -> Pools:
    """Write kept K/V into the pages, in place (donate the pools)."""
    at = (in_flight.page, in_flight.slot)
    written = Pools(_write(pools.k, in_flight.k, *at), _write(pools.v, in_flight.v, *at))
    if pools.extension is None:
        return written
    # What belongs to the base must be past the extension's end, not before its start: indices below 0 wrap.
    beyond = in_flight.page - pools.k.shape[1]
    page = jnp.where(beyond < 0, pools.extension.num_pages, beyond)
    return written._replace(extension=commit(pools.extension, in_flight._replace(page=page)))


def _write(pool: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """new: [L, T, K, D]; pages that the pool does not have are left out."""
    # Index arrays with a slice between them put their axis first: values are [T, L, K, D].
    return pool.at[:, page, :, slot].set(new.transpose(1, 0, 2, 3), mode="drop")


def move_to_base(base: Pools, extension: Pools, from_pages: jax.Array, to_pages: jax.Array) -> Pools:
    """Copy pages of the extension into the base, in place (donate the base). from_pages: i32[N], by their place in the
    extension; to_pages: i32[N], padding as in `move_pages`."""
    return Pools(
        move_pages(base.k, extension.k, from_pages, to_pages), move_pages(base.v, extension.v, from_pages, to_pages)
    )
