"""The second program of a step that changes logits or tells of them: draw again from what the forward left.

The forward is not compiled twice and steps in which nobody asks run what they always ran. Rows that ask for nothing
keep the tokens that the first program drew, whatever their neighbours ask.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.constraints.masks import num_words
from adaserve_jax.models.placement import EVERYWHERE
from adaserve_jax.runtime.buckets import Bucket
from adaserve_jax.runtime.compiling import Declared
from adaserve_jax.runtime.logprobs import report, report_size
from adaserve_jax.runtime.model import Amend, DeviceModel
from adaserve_jax.runtime.packing import PackedStep, edits_layout, step_layout, table_layout
from adaserve_jax.runtime.programs import InFlight, Sampled, follow, places, sampled_positions
from adaserve_jax.sampling import MAX_LOGIT_BIASES
from adaserve_jax.tree.edits import CHUNK, Paths, Penalties, Table, edited_logits
from adaserve_jax.tree.sampling import draw
from adaserve_jax.types import Limits, LogitEdits


class Resampled(NamedTuple):
    """outcome: as of `Sampled`, with a `runtime.logprobs.report` behind it. page, slot: i32[T], where kept K/V goes."""

    outcome: jax.Array
    page: jax.Array
    slot: jax.Array


def resample(
    logits: jax.Array, drawn: jax.Array, packed: jax.Array, edits: jax.Array, table: jax.Array, allowed: jax.Array,
    *, bucket: Bucket, max_pages: int, page_size: int, max_depth: int,
) -> Resampled:  # fmt: skip
    """Draw from the edited logits where anything changes, and walk again. logits, drawn: of `Sampled`; packed, edits,
    table: of `step_layout`, `edits_layout` and `table_layout`; allowed: as `edited_logits` takes it."""
    fields = step_layout(bucket, max_pages).split(packed)
    asked = edits_layout(bucket).split(edits)
    columns = table_layout(table.shape[0] // 3).split(table)
    positions = sampled_positions(fields, bucket)
    changed = asked["changed"] > 0

    def draw_again() -> jax.Array:
        scores = edited_logits(
            logits,
            Penalties(asked["presence"], asked["frequency"], asked["repetition"]),
            Table(columns["index"], columns["seen"], columns["bias"], asked["asked"][0]),
            allowed,
            Paths(positions.at, positions.row, fields["token"], fields["parent"], fields["emit_depth"]),
            max_depth=max_depth,
        )
        return jnp.where(changed, draw(scores, positions.sampler, positions.position + 1), drawn)

    redrawn = lax.cond(jnp.any(changed), draw_again, lambda: drawn)
    outcome, walk = follow(fields, bucket, redrawn, max_depth)
    told = lax.cond(
        asked["asked"][1] > 0,
        lambda: report(logits, redrawn),
        lambda: jnp.zeros(report_size(*logits.shape), jnp.int32),
    )
    return Resampled(jnp.concatenate([outcome, told]), *places(fields, walk.commit, page_size))


class Resampler:
    """`resample` for every packed length of the target, and its arguments. One number of rows serves all of them: rows
    cost little here, and programs cost time at the start."""

    def __init__(self, target: DeviceModel, limits: Limits):
        self._target = target
        self._limits = limits
        self._vocab_size = target.config.vocab_size
        self._buckets = {bucket.tokens: bucket for bucket in target.buckets.all()}
        """By packed length, the one of most rows."""
        self._blank: dict[tuple[int, ...], jax.Array] = {}
        """Tables and masks that say nothing, on the device: most steps have at least one of them."""

    def bucket(self, bucket: Bucket) -> Bucket:
        """In which a step is drawn again whose forward ran in `bucket`."""
        return self._buckets[bucket.tokens]

    def declare(self) -> list[Declared]:
        """The programs. They know no pools, so they serve pools of either layout."""
        target, place, limits = self._target, self._target.placement, self._limits
        max_pages = target.programs.max_pages
        declared = []
        for bucket in self._buckets.values():
            layouts = (step_layout(bucket, max_pages), edits_layout(bucket), table_layout(self._table_entries(bucket)))
            arguments = (
                place.abstract((bucket.sampled, self._vocab_size), jnp.float32),
                place.abstract((bucket.sampled,), jnp.int32),
                *(place.abstract((layout.size,), jnp.int32) for layout in layouts),
                place.abstract(self._mask_shape(bucket), jnp.uint32),
            )
            program = partial(
                resample, bucket=bucket, max_pages=max_pages, page_size=limits.page_size, max_depth=limits.max_depth
            )
            function = jax.jit(place.spmd(program, (EVERYWHERE,) * len(arguments), EVERYWHERE))
            declared.append(Declared(self._key(bucket), function, arguments))
        return declared

    def amendment(self, step: PackedStep, edits: LogitEdits) -> Amend:
        """What makes of a step's first result the one with the edits, and of its in-flight K/V what is kept then. step:
        packed in its `bucket`."""
        bucket = step.bucket
        packed, views = edits_layout(bucket).new()
        rows, entries = len(edits.presence), len(edits.token)
        views["repetition"][:] = 1.0
        for name in ("presence", "frequency", "repetition"):
            views[name][:rows] = getattr(edits, name)
        views["changed"][: len(edits.changed)] = edits.changed
        views["asked"][:] = -(-entries // CHUNK), (edits.logprobs >= 0).any()
        table = self._table(bucket, edits) if entries else self._blank_table(bucket)
        allowed: np.ndarray | jax.Array = self._blank_mask(bucket)
        if edits.allowed is not None:
            allowed = np.zeros(self._mask_shape(bucket), np.uint32)
            allowed[: len(edits.allowed)] = edits.allowed
        program = self._target.compiled[self._key(bucket)]

        def amend(sampled: Sampled, in_flight: InFlight) -> tuple[Resampled, InFlight]:
            again = program(sampled.logits, sampled.drawn, step.packed, packed, table, allowed)
            return again, in_flight._replace(page=again.page, slot=again.slot)

        return amend

    def _key(self, bucket: Bucket) -> tuple:
        return (self._target.role, "resample", bucket)

    def _table_entries(self, bucket: Bucket) -> int:
        """Most that its rows can have, in whole chunks."""
        most = bucket.rows * min(self._vocab_size, self._limits.max_context + MAX_LOGIT_BIASES)
        return -(-most // CHUNK) * CHUNK

    def _mask_shape(self, bucket: Bucket) -> tuple[int, int]:
        return bucket.sampled, num_words(self._vocab_size)

    def _table(self, bucket: Bucket, edits: LogitEdits) -> np.ndarray:
        packed, views = table_layout(self._table_entries(bucket)).new()
        entries = len(edits.token)
        views["index"][entries:] = bucket.rows * self._vocab_size
        views["index"][:entries] = edits.row * self._vocab_size + edits.token
        views["seen"][:entries] = 2 * edits.output_count + edits.in_prompt
        views["bias"][:entries] = edits.bias
        return packed

    def _blank_table(self, bucket: Bucket) -> jax.Array:
        return self._kept((table_layout(self._table_entries(bucket)).size,), np.int32(0))

    def _blank_mask(self, bucket: Bucket) -> jax.Array:
        return self._kept(self._mask_shape(bucket), np.uint32(0xFFFFFFFF))

    def _kept(self, shape: tuple[int, ...], value: np.generic) -> jax.Array:
        if shape not in self._blank:
            filled = np.full(shape, value)
            self._blank[shape] = jax.device_put(filled, self._target.placement.sharding(EVERYWHERE))
        return self._blank[shape]

    def close(self) -> None:
        """Give back the memory of the blank arguments."""
        for array in self._blank.values():
            array.delete()
        self._blank.clear()
