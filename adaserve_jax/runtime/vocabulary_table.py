"""The device's side of a draft whose vocabulary differs: its logits by token of the target, and the tokens it is fed.

`models.vocabulary_map` says how the map is found. Axes: V rows of the target's vocabulary, U rows of the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaserve_jax.models.vocabulary_map import VocabularyMap
from adaserve_jax.tree.sampling import MASKED


class VocabularyTable(NamedTuple):
    """A `VocabularyMap` on the device. covered: bool[V]. to_draft: i32[V]; None if ids are equal."""

    covered: jax.Array
    to_draft: jax.Array | None

    def fed(self, tokens: jax.Array) -> jax.Array:
        """Return the draft's tokens for tokens that it proposed, which are the target's, i32[...]."""
        return tokens if self.to_draft is None else self.to_draft[tokens]

    def scores(self, logits: jax.Array) -> jax.Array:
        """Return the draft's logits f32[..., U] by token of the target, f32[..., V]; tokens not covered are masked."""
        rows, own = self.covered.shape[0], logits.shape[-1]
        if self.to_draft is not None:
            found = logits[..., self.to_draft]
        elif own >= rows:
            found = logits[..., :rows]
        else:
            found = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, rows - own)])
        return jnp.where(self.covered, found, MASKED)


def place_maps(maps: Sequence[VocabularyMap]) -> tuple[VocabularyTable, ...]:
    """Return the tables of all drafts on the first device; none if every draft has the target's vocabulary.

    All have the form that the draft farthest from the target needs, since they run in the same programs.
    """
    if not any(each.differs for each in maps):
        return ()
    moves = _any_moves(maps)
    return tuple(
        VocabularyTable(jnp.asarray(each.covered), jnp.asarray(each.to_draft) if moves else None) for each in maps
    )


def map_bytes(maps: Sequence[VocabularyMap]) -> int:
    """Return the bytes of `place_maps` on the device."""
    if not any(each.differs for each in maps):
        return 0
    moves = _any_moves(maps)
    return sum(each.covered.nbytes + (each.to_draft.nbytes if moves else 0) for each in maps)


def _any_moves(maps: Sequence[VocabularyMap]) -> bool:
    return any(each.kind == "intersection" for each in maps)
