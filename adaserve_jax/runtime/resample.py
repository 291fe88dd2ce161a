"""The second program of a step that changes logits or tells of them: draw again from what the forward left.

The forward is not compiled twice and steps in which nobody asks run what they always ran. Rows that ask for nothing
keep the tokens that the first program drew, whatever their neighbours ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.constraints.constraints import Positions
from adaserve_jax.constraints.masks import num_words
from adaserve_jax.models.placement import EVERYWHERE
from adaserve_jax.runtime.compile import Bucket, BucketSet, Declared
from adaserve_jax.runtime.model import Amend, DeviceModel
from adaserve_jax.runtime.pools import InFlight, places
from adaserve_jax.runtime.programs import Sampled, follow, sampled_positions
from adaserve_jax.runtime.step_layout import PackedStep, edits_layout, step_layout, table_layout
from adaserve_jax.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS
from adaserve_jax.tree.logit_edits import CHUNK, Paths, Penalties, Table, edited_logits
from adaserve_jax.tree.sampling import draw
from adaserve_jax.types import DraftTrees, Limits, LogitEdits, StepLogprobs, StepPlan

# Log probabilities of what a step draws: made on the device, taken apart on the host.


def report_size(sampled: int, vocab_size: int) -> int:
    """Of what `report` gives."""
    return sampled * (1 + 2 * min(MAX_LOGPROBS, vocab_size))


def report(logits: jax.Array, drawn: jax.Array) -> jax.Array:
    """i32[N + 2 N K]: the bits of the log probability of each drawn token, the ids of the K likeliest tokens, and the
    bits of theirs. logits: f32[N, V]; drawn: i32[N]."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    own = jnp.take_along_axis(logits, drawn[:, None], axis=1) - total
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    bits = [lax.bitcast_convert_type(part, jnp.int32).reshape(-1) for part in (own, top - total)]
    return jnp.concatenate([bits[0], ids.astype(jnp.int32).reshape(-1), bits[1]])


def logprobs_of(
    report: np.ndarray, bucket: Bucket, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray, edits: LogitEdits,
    max_depth: int,
) -> StepLogprobs | None:  # fmt: skip
    """Of the emitted tokens of the rows that asked; None: no row did. report: i32 as above; accepted: bool[nodes]."""
    if (edits.logprobs < 0).all():
        return None
    own, *rest = np.split(report, [bucket.sampled, (bucket.sampled + len(report)) // 2])
    ids, top = (part.reshape(bucket.sampled, -1) for part in rest)
    positions = Positions.of(plan, trees)
    emitted = edits.logprobs[positions.row] >= 0
    emitted[: len(accepted)] &= accepted
    at = np.flatnonzero(emitted)
    shape = (plan.num_rows, max_depth + 1)
    each = (*shape, ids.shape[1])
    found = StepLogprobs(np.zeros(shape, np.float32), np.zeros(each, np.int32), np.zeros(each, np.float32))
    place = (positions.row[at], positions.depth[at])
    found.drawn[place] = own.view(np.float32)[at]
    found.top_ids[place] = ids[at]
    found.top[place] = np.ascontiguousarray(top).view(np.float32)[at]
    return found


GROWTH = 4
"""How many times as much all tables up to one hold as those before it."""


class Resampled(NamedTuple):
    """outcome: as of `Sampled`, with a `runtime.logprobs.report` behind it. page, slot: i32[T], where kept K/V goes."""

    outcome: jax.Array
    page: jax.Array
    slot: jax.Array


def resample(
    logits: jax.Array, drawn: jax.Array, packed: jax.Array, edits: jax.Array, tables: tuple[jax.Array, ...],
    allowed: jax.Array, *, bucket: Bucket, max_pages: int, page_size: int, max_depth: int,
) -> Resampled:  # fmt: skip
    """Draw from the edited logits where anything changes, and walk again. logits, drawn: of `Sampled`; packed, edits,
    tables: of `step_layout`, `edits_layout` and `table_layout`; allowed: as `edited_logits` takes it."""
    fields = step_layout(bucket, max_pages).split(packed)
    asked = edits_layout(bucket).split(edits)
    positions = sampled_positions(fields, bucket)
    changed = asked["changed"] > 0

    def draw_again() -> jax.Array:
        scores = edited_logits(
            logits,
            Penalties(asked["presence"], asked["frequency"], asked["repetition"]),
            _unpacked(tables, asked["asked"][0]),
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


def _unpacked(tables: tuple[jax.Array, ...], chunks: jax.Array) -> list[Table]:
    """chunks: i32[], how many hold any, in all tables together."""
    found = []
    for table in tables:
        columns = table_layout(len(table) // 3).split(table)
        held = len(table) // (3 * CHUNK)
        found.append(Table(columns["index"], columns["seen"], columns["bias"], jnp.clip(chunks, 0, held)))
        chunks = chunks - held
    return found


@dataclass(frozen=True)
class EditShapes:
    """Of the tables and masks of steps in these buckets, all in words of four bytes."""

    buckets: BucketSet
    vocab_size: int
    max_context: int

    @cached_property
    def by_tokens(self) -> dict[int, Bucket]:
        """The bucket of most rows, by packed length."""
        return {bucket.tokens: bucket for bucket in self.buckets.all()}

    def tables(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """They hold the most that its rows can have. Those for fewer rows are the first ones of those for more."""
        row = min(self.vocab_size, self.max_context + MAX_LOGIT_BIASES)
        needed, most = (-(-rows * row // CHUNK) for rows in (bucket.rows, self.buckets.row_edges[-1]))
        shapes, held = [], 0
        while held < needed:
            chunks = min(max(1, (GROWTH - 1) * held), most - held)
            shapes.append((table_layout(chunks * CHUNK).size,))
            held += chunks
        return shapes

    def mask(self, bucket: Bucket) -> tuple[int, ...]:
        return bucket.sampled, num_words(self.vocab_size)

    def all(self, tokens: int) -> set[tuple[int, ...]]:
        """What differs of steps of up to so many tokens."""
        buckets = [bucket for bucket in self.by_tokens.values() if bucket.tokens <= tokens]
        return {self.mask(bucket) for bucket in buckets}.union(*(self.tables(bucket) for bucket in buckets))

    def bytes(self, tokens: int) -> int:
        """One of each of those."""
        return sum(4 * math.prod(shape) for shape in self.all(tokens))


class Resampler:
    """`resample` for every packed length of the target, and its arguments. One number of rows serves all of them: rows
    cost little here, and programs cost time at the start.

    What rows have seen goes to the device as tables of growing length, of which those that hold nothing lie there
    already: what is sent is at most GROWTH times what there is to say, and one chunk.
    """

    def __init__(self, target: DeviceModel, limits: Limits):
        self._target = target
        self._limits = limits
        self._vocab_size = target.config.vocab_size
        self._shapes = EditShapes(target.buckets, self._vocab_size, limits.max_context)
        self._buckets = self._shapes.by_tokens
        self.blank: dict[tuple[int, ...], jax.Array] = {}
        """Tables and masks that say nothing, on the device, by shape; once prepared."""

    def bucket(self, bucket: Bucket) -> Bucket:
        """In which a step is drawn again whose forward ran in `bucket`."""
        return self._buckets[bucket.tokens]

    def declare(self) -> list[Declared]:
        """The programs. They know no pools, so they serve pools of either layout."""
        target, place, limits = self._target, self._target.placement, self._limits
        max_pages = target.programs.max_pages
        declared = []
        for bucket in self._buckets.values():
            arguments = (
                place.abstract((bucket.sampled, self._vocab_size), jnp.float32),
                place.abstract((bucket.sampled,), jnp.int32),
                place.abstract((step_layout(bucket, max_pages).size,), jnp.int32),
                place.abstract((edits_layout(bucket).size,), jnp.int32),
                tuple(place.abstract(shape, jnp.int32) for shape in self._shapes.tables(bucket)),
                place.abstract(self._shapes.mask(bucket), jnp.uint32),
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
        tables = tuple(self._tables(bucket, edits))
        allowed: np.ndarray | jax.Array = self.blank[self._shapes.mask(bucket)]
        if edits.allowed is not None:
            allowed = np.zeros(self._shapes.mask(bucket), np.uint32)
            allowed[: len(edits.allowed)] = edits.allowed
        program = self._target.compiled[self._key(bucket)]

        def amend(sampled: Sampled, in_flight: InFlight) -> tuple[Resampled, InFlight]:
            again = program(sampled.logits, sampled.drawn, step.packed, packed, tables, allowed)
            return again, in_flight._replace(page=again.page, slot=again.slot)

        return amend

    def _key(self, bucket: Bucket) -> tuple:
        return (self._target.role, "resample", bucket)

    def _tables(self, bucket: Bucket, edits: LogitEdits) -> Iterator[np.ndarray | jax.Array]:
        first = 0
        for shape in self._shapes.tables(bucket):
            if first >= len(edits.token):
                yield self.blank[shape]
                continue
            packed, views = table_layout(shape[0] // 3).new()
            part = slice(first, first + len(views["index"]))
            entries = len(edits.token[part])
            views["index"][entries:] = bucket.rows * self._vocab_size
            views["index"][:entries] = edits.row[part] * self._vocab_size + edits.token[part]
            views["seen"][:entries] = 2 * edits.output_count[part] + edits.in_prompt[part]
            views["bias"][:entries] = edits.bias[part]
            first = part.stop
            yield packed

    def prepare(self) -> None:
        """Put the arguments that say nothing on the device. Before the first amendment."""
        for shape in self._shapes.all(self._limits.max_tokens):
            blank = np.full(shape, 0xFFFFFFFF, np.uint32) if len(shape) == 2 else np.zeros(shape, np.int32)
            self.blank[shape] = jax.device_put(blank, self._target.placement.sharding(EVERYWHERE))

    def blank_bytes(self, tokens: int) -> int:
        """What those take that steps of up to so many tokens need."""
        return self._shapes.bytes(tokens)

    def close(self) -> None:
        """Give back the memory of the blank arguments."""
        for array in self.blank.values():
            array.delete()
        self.blank.clear()
