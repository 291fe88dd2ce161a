"""Pools of KV pages on the device, and every program that writes them.

Pools are donated to these programs, which write in place. A program that loops over a donated pool and then scatters
into it makes XLA copy the pool. So the programs of a step only read pools, and their K/V is written here afterwards:
by a scatter, and on a TPU by a loop over groups of slots (docs/architecture/device.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.placement import Placement
from adaserve_jax.pallas_kernels.compat import platform
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import Pool, Slabs
from adaserve_jax.runtime.page_moves import move_pages


class Pools(NamedTuple):
    """Paged K and V of all layers: [L, P, K, S, D] each, D padded on a TPU (`pool_head_dim`).

    extension: pools of the X pages that follow, while the pool is extended; `num_pages` counts them too. features: of a
    target with a head, the outputs of the F layers that the head reads, [F, P, 1, S, d], d padded alike.
    """

    k: jax.Array
    v: jax.Array
    extension: Pools | None = None
    features: jax.Array | None = None

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
GROUP_SLOTS = 8
"""Slots that a TPU writes at once: the rows of one tile of a pool's layout, T(8,128). It divides every page size."""
POOL_HEADS = 2
"""Axis of the KV heads in a pool."""
IN_FLIGHT_HEADS = 2
"""Axis of the KV heads in a step's in-flight K/V."""


class InFlight(NamedTuple):
    """K/V of a step's tokens, and where to write it. k, v: [L, T, K, D]; page, slot: i32[T], NO_PAGE to drop it.

    features: [F, T, 1, d], where the pools have them.
    """

    k: jax.Array
    v: jax.Array
    page: jax.Array
    slot: jax.Array
    features: jax.Array | None = None

    def parts(self) -> list[jax.Array]:
        """Return what is written, in the order of `pool_parts`."""
        return [part for part in (self.k, self.v, self.features) if part is not None]


def pool_head_dim(head_dim: int, platform: str) -> int:
    """Return D of the pools: on a TPU the next multiple of TPU_LANES, since programs would copy other pools whole."""
    return -(-head_dim // TPU_LANES) * TPU_LANES if platform == "tpu" else head_dim


def new_pools(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, placement: Placement, *,
    feature_layers: int = 0,
) -> Pools:  # fmt: skip
    """Allocate the pools of a whole model; on several devices they are divided by KV heads.

    feature_layers: how many layers' outputs to keep beside K and V, for a head.
    """
    platform = placement.devices[0].platform
    shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, pool_head_dim(config.head_dim, platform))
    spec = placement.spec(POOL_HEADS)
    features = None
    if feature_layers:
        of_features = (feature_layers, num_pages, 1, page_size, pool_head_dim(config.hidden_size, platform))
        features = placement.zeros(of_features, dtype, placement.spec(None))
    return Pools(placement.zeros(shape, dtype, spec), placement.zeros(shape, dtype, spec), features=features)


def pool_parts(pools: Pools) -> list[jax.Array]:
    """Return the base's arrays, each [L, P, K, S, D]: K, V, and features where there are some."""
    return [part for part in (pools.k, pools.v, pools.features) if part is not None]


def _from_parts(parts: Sequence[jax.Array], extension: Pools | None = None) -> Pools:
    k, v, *features = parts
    return Pools(k, v, extension, *features)


def read_features(pool: jax.Array, page: jax.Array, slot: jax.Array, size: int) -> jax.Array:
    """Return the features at page and slot of T positions, i32[T], layers one below another: f[F * size, T].

    pool: `Pools.features`; size: d of the target.
    """
    found = pool[:, page, :, slot]  # [T, F, 1, d]
    return found[:, :, 0, :size].reshape(len(page), -1).T


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
    write = _write_groups if platform() == "tpu" else _scatter
    written = write(pools, in_flight)
    if pools.extension is None:
        return _from_parts(written)
    # Pages of the base go past the extension's end, where they are dropped. Below 0, indices would wrap.
    beyond = in_flight.page - pools.k.shape[1]
    page = jnp.where(beyond < 0, pools.extension.num_pages, beyond)
    return _from_parts(written, commit(pools.extension, in_flight._replace(page=page)))


def _scatter(pools: Pools, in_flight: InFlight) -> list[jax.Array]:
    """Return the base's arrays with the in-flight ones scattered into them. Pages beyond the pool are dropped."""

    def written(pool: jax.Array, new: jax.Array) -> jax.Array:
        # Index arrays with a slice between them put their axis first: values are [T, L, K, D].
        at = pool.at[:, in_flight.page, :, in_flight.slot]
        return at.set(_padded(new, pool).transpose(1, 0, 2, 3), mode="drop")

    return [written(pool, new) for pool, new in zip(pool_parts(pools), in_flight.parts(), strict=True)]


def _write_groups(pools: Pools, in_flight: InFlight) -> list[jax.Array]:
    """Return the same as `_scatter`, written by a loop over the groups of GROUP_SLOTS slots that get a token.

    XLA on a TPU scatters into a pool in another order of its axes: it copies the whole pool there and back. A loop that
    updates a slice stays in place, but only if the slice is whole tiles of the layout, so groups are read, completed
    and written back.
    """
    _, num_pages, _, page_size, _ = pools.k.shape
    num_tokens, per_page = in_flight.page.shape[0], page_size // GROUP_SLOTS
    no_group = num_pages * per_page
    group = jnp.where(in_flight.page < num_pages, in_flight.page * per_page + in_flight.slot // GROUP_SLOTS, no_group)
    order = jnp.argsort(group)
    group = group[order]
    begins = (group < no_group) & (group != jnp.roll(group, 1).at[0].set(-1))
    index = jnp.where(group < no_group, jnp.cumsum(begins, dtype=jnp.int32) - 1, num_tokens)
    # By group that is written: its place, and the token of each of its slots, num_tokens where none is.
    place = jnp.zeros(num_tokens, jnp.int32).at[index].set(group, mode="drop")
    token = jnp.full((num_tokens, GROUP_SLOTS), num_tokens, jnp.int32)
    token = token.at[index, in_flight.slot[order] % GROUP_SLOTS].set(order.astype(jnp.int32), mode="drop")

    def write(index: jax.Array, written: list[jax.Array]) -> list[jax.Array]:
        def completed(pool: jax.Array, new: jax.Array) -> jax.Array:
            chosen = _padded(new[:, jnp.minimum(token[index], num_tokens - 1)], pool)
            chosen = chosen.transpose(0, 2, 1, 3)[:, None]  # [L, 1, K, GROUP_SLOTS, D]
            start = (0, place[index] // per_page, 0, place[index] % per_page * GROUP_SLOTS, 0)
            kept = lax.dynamic_slice(pool, start, chosen.shape)
            return lax.dynamic_update_slice(pool, jnp.where((token[index] < num_tokens)[:, None], chosen, kept), start)

        return [completed(pool, new) for pool, new in zip(written, in_flight.parts(), strict=True)]

    return lax.fori_loop(0, jnp.sum(begins, dtype=jnp.int32), write, pool_parts(pools))


def _padded(new: jax.Array, pool: jax.Array) -> jax.Array:
    """Pad K/V, [L, T, K, D], with zeros to the D of a pool."""
    return jnp.pad(new, [(0, 0)] * 3 + [(0, pool.shape[4] - new.shape[3])])


def move_to_base(base: Pools, extension: Pools, from_pages: jax.Array, to_pages: jax.Array) -> Pools:
    """Copy pages of the extension into the base, in place (donate the base).

    from_pages: i32[N], indices in the extension; to_pages: i32[N], padded as for `move_pages`.
    """
    parts = zip(pool_parts(base), pool_parts(extension), strict=True)
    return _from_parts([move_pages(part, other, from_pages, to_pages) for part, other in parts])
