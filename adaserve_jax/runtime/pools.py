"""Pools of KV pages on the device, and every program that writes them.

Pools are donated to these programs, which write in place. A program that loops over a donated pool and then scatters
into it makes XLA copy the pool. So the programs of a step only read pools, and their K/V is written here afterwards
(docs/architecture/device.md).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.placement import Placement
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import Pool, Slabs
from adaserve_jax.runtime.page_moves import move_pages


class Pools(NamedTuple):
    """Paged K and V of all layers: [L, P, K, S, D] each, D padded on a TPU (`pool_head_dim`).

    extension: pools of the X pages that follow, while the pool is extended; `num_pages` counts them too.
    """

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
        """Return K in the form that attention reads."""
        return self.k if self.extension is None else Slabs(self.k, self.extension.k)

    @property
    def values(self) -> Pool:
        """Return V in the form that attention reads."""
        return self.v if self.extension is None else Slabs(self.v, self.extension.v)


NO_PAGE = 1 << 30
"""Page of tokens whose K/V is dropped: larger than the last page of any pool."""
TPU_LANES = 128
"""XLA on a TPU lays out an array in the order of its axes if the last one is a multiple of this."""
POOL_HEADS = 2
"""Axis of the KV heads in a pool."""
IN_FLIGHT_HEADS = 2
"""Axis of the KV heads in a step's in-flight K/V."""


class InFlight(NamedTuple):
    """K/V of a step's tokens, and where to write it. k, v: [L, T, K, D]; page, slot: i32[T], NO_PAGE to drop it."""

    k: jax.Array
    v: jax.Array
    page: jax.Array
    slot: jax.Array


def pool_head_dim(head_dim: int, platform: str) -> int:
    """Return D of the pools: on a TPU the next multiple of TPU_LANES, since programs would copy other pools whole."""
    return -(-head_dim // TPU_LANES) * TPU_LANES if platform == "tpu" else head_dim


def new_pools(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, placement: Placement) -> Pools:
    """Allocate the pools of a whole model; on several devices they are divided by KV heads."""
    features = pool_head_dim(config.head_dim, placement.devices[0].platform)
    shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, features)
    spec = placement.spec(POOL_HEADS)
    return Pools(placement.zeros(shape, dtype, spec), placement.zeros(shape, dtype, spec))


def blank(like: Pools) -> Pools:
    """Allocate pools of the same shapes on one device, uninitialised: zeros on a CPU, where XLA has no other way."""
    return jax.tree.map(lambda pool: lax.empty(pool.shape, pool.dtype), like)


def page_slots(fields: dict[str, jax.Array], keep: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Return page and slot of every token, i32[T] each; the page is NO_PAGE where keep, bool[T], is false."""
    row = jnp.minimum(fields["row"], fields["page_table"].shape[0] - 1)
    page = fields["page_table"][row, fields["position"] // page_size]
    return jnp.where(keep, page, NO_PAGE), fields["position"] % page_size


def commit(pools: Pools, in_flight: InFlight) -> Pools:
    """Write in-flight K/V into the pages, in place (donate the pools)."""
    at = (in_flight.page, in_flight.slot)
    written = Pools(_write(pools.k, in_flight.k, *at), _write(pools.v, in_flight.v, *at))
    if pools.extension is None:
        return written
    # Pages of the base go past the extension's end, where they are dropped. Below 0, indices would wrap.
    beyond = in_flight.page - pools.k.shape[1]
    page = jnp.where(beyond < 0, pools.extension.num_pages, beyond)
    return written._replace(extension=commit(pools.extension, in_flight._replace(page=page)))


def _write(pool: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Scatter new, [L, T, K, D], into a pool, padded to its D. Pages beyond the pool are dropped."""
    new = jnp.pad(new, [(0, 0)] * 3 + [(0, pool.shape[4] - new.shape[3])])
    # Index arrays with a slice between them put their axis first: values are [T, L, K, D].
    return pool.at[:, page, :, slot].set(new.transpose(1, 0, 2, 3), mode="drop")


def move_to_base(base: Pools, extension: Pools, from_pages: jax.Array, to_pages: jax.Array) -> Pools:
    """Copy pages of the extension into the base, in place (donate the base).

    from_pages: i32[N], indices in the extension; to_pages: i32[N], padded as for `move_pages`.
    """
    return Pools(
        move_pages(base.k, extension.k, from_pages, to_pages), move_pages(base.v, extension.v, from_pages, to_pages)
    )
