"""Interface of page moves, for every implementation: between two pools, or inside one.

Implementations: `xla` (reference.py, everywhere), `mosaic_gpu` and `mosaic_tpu` (kernels for Hopper GPUs and for
TPUs); importing this module imports none of the kernels. All of them may do the moves in any order and in parallel,
with no copy of what they overwrite. So no page is written twice, and inside one pool no page is both read and
written: `moves.check_moves` checks this on the host. The result of other moves is undefined.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from adaserve_jax.errors import ConfigError
from adaserve_jax.pallas_kernels.move_pages import reference

Implementation = Literal["xla", "mosaic_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def check_supported(implementation: Implementation, *, page_size: int, head_dim: int, dtype: jnp.dtype) -> None:
    """Raise ConfigError unless the implementation can move pages [K, S, D] of these sizes.

    page_size: S, in slots; head_dim: D; dtype: of the pools.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"unknown implementation of page moves {implementation!r}; expected one of {IMPLEMENTATIONS}")
    if implementation == "xla":
        return
    reason = _module(implementation).unsupported(page_size=page_size, head_dim=head_dim, dtype=jnp.dtype(dtype))
    if reason:
        raise ConfigError(f"page moves by {implementation!r}: {reason}; 'xla' moves pages of every shape")


def move_pages(
    target: jax.Array,
    source: jax.Array,
    from_pages: jax.Array,
    to_pages: jax.Array,
    *,
    implementation: Implementation = "xla",
) -> jax.Array:
    """Write pages of the source into the target, in place where the target is donated; all layers in one call.

    target: [L, P, K, S, D]; source: the same but for P, another pool. from_pages, to_pages: i32[N], N fixed when
    compiling; entries with to_pages outside [0, P) are padding: they copy nothing, whatever their from_pages.
    Returns the target, with target[:, to_pages] = source[:, from_pages] and all other pages as they were, bit by bit.
    Raises ValueError: shapes or dtypes do not belong together. ConfigError: the implementation does not support them.
    """
    rest = (source.shape[0], *source.shape[2:])
    if source.ndim != 5 or rest != (target.shape[0], *target.shape[2:]) or source.dtype != target.dtype:
        raise ValueError(
            f"pages move between pools that differ in the number of pages only: target {target.dtype}{target.shape}, "
            f"source {source.dtype}{source.shape}"
        )
    mover = _mover(implementation, target, from_pages, to_pages)
    return mover.move_pages(target, source, from_pages, to_pages) if len(to_pages) else target


def move_pages_within(
    pool: jax.Array, from_pages: jax.Array, to_pages: jax.Array, *, implementation: Implementation = "xla"
) -> jax.Array:
    """Copy pages of a pool to other pages of it, in place where it is donated; all layers in one call.

    pool: [L, P, K, S, D]; from_pages, to_pages: i32[N] as in `move_pages`. No page may be among both, padding aside.
    Returns the pool, with pool[:, to_pages] = pool[:, from_pages] and all other pages as they were, bit by bit.
    Raises ValueError: lists of different lengths. ConfigError: the implementation does not support the shapes.
    """
    mover = _mover(implementation, pool, from_pages, to_pages)
    return mover.move_pages_within(pool, from_pages, to_pages) if len(to_pages) else pool


def _mover(implementation: Implementation, pool: jax.Array, from_pages: jax.Array, to_pages: jax.Array) -> Any:
    """Return the module that moves pages of this pool."""
    if pool.ndim != 5 or from_pages.ndim != 1 or from_pages.shape != to_pages.shape:
        raise ValueError(
            f"expected a pool [L, P, K, S, D] and two lists of as many page ids: {pool.shape}, {from_pages.shape}, "
            f"{to_pages.shape}"
        )
    check_supported(implementation, page_size=pool.shape[3], head_dim=pool.shape[4], dtype=pool.dtype)
    return reference if implementation == "xla" else _module(implementation)


def _module(implementation: Implementation) -> Any:
    return import_module(f"adaserve_jax.pallas_kernels.move_pages.{implementation}")
