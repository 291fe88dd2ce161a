"""The second program of a step whose rows edit logits or ask for logprobs: draws again from the forward's logits.

The forward is compiled once, and steps in which no row asks for either run it alone. Rows that ask for nothing keep the
tokens that the forward drew, whatever their neighbours ask.
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

from adaserve_jax.constraints.constraints import SampledNodes
from adaserve_jax.constraints.masks import num_words
from adaserve_jax.models.placement import EVERYWHERE
from adaserve_jax.runtime.compile import Bucket, BucketSet, Declared
from adaserve_jax.runtime.model import AfterForward, DeviceModel
from adaserve_jax.runtime.pools import InFlight, page_slots
from adaserve_jax.runtime.programs import VerifyResult, accept_drawn, sampled_positions
from adaserve_jax.runtime.step_layout import Layout, PackedStep, edits_layout, table_layout
from adaserve_jax.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS
from adaserve_jax.tree.logit_edits import CHUNK, EditTable, Paths, Penalties, edited_logits
from adaserve_jax.tree.sampling import draw
from adaserve_jax.types import DraftTrees, Limits, LogitEdits, Logprobs, ScoredPrompts, StepPlan

GROWTH = 4
"""The tables up to and including one hold GROWTH times what those before it hold."""


class Resampled(NamedTuple):
    """outcome: packed as that of `VerifyResult`, with a `logprob_report` behind it. page, slot: i32[T], where the K/V
    that is kept now goes."""

    outcome: jax.Array
    page: jax.Array
    slot: jax.Array


def resample(
    logits: jax.Array, drawn: jax.Array, packed: jax.Array, edits: jax.Array, tables: tuple[jax.Array, ...],
    allowed: jax.Array, *, bucket: Bucket, layout: Layout, page_size: int, max_depth: int,
    synthetic: tuple[float, ...] | None = None,
) -> Resampled:  # fmt: skip
    """Draw from the edited logits at the positions that edits concern, and walk the trees again.

    logits: f32[N, V] and drawn: i32[N], of the forward. packed, edits: by `layout` and `edits_layout`. tables:
    tokens that penalties and biases concern, by `table_layout`, filled from the first table on. allowed: u32[N, ceil(V
    / 32)], as `edited_logits` takes it. synthetic: as in `ModelPrograms`.
    """
    fields = layout.split(packed)
    asked = edits_layout(bucket).split(edits)
    positions = sampled_positions(fields, bucket)
    changed = asked["changed"] > 0

    def draw_again() -> jax.Array:
        scores = edited_logits(
            logits,
            Penalties(asked["presence"], asked["frequency"], asked["repetition"]),
            _split_tables(tables, asked["asked"][0]),
            allowed,
            Paths(positions.at, positions.row, fields["token"], fields["parent"], fields["emit_depth"]),
            max_depth=max_depth,
        )
        return jnp.where(changed, draw(scores, positions.sampler, positions.position + 1), drawn)

    redrawn = lax.cond(jnp.any(changed), draw_again, lambda: drawn)
    outcome, walk, redrawn = accept_drawn(fields, bucket, redrawn, max_depth, synthetic)
    report = lax.cond(
        asked["asked"][1] > 0,
        lambda: logprob_report(logits, jnp.where(asked["scored"] < 0, redrawn, asked["scored"])),
        lambda: jnp.zeros(_report_size(*logits.shape), jnp.int32),
    )
    return Resampled(jnp.concatenate([outcome, report]), *page_slots(fields, walk.commit, page_size))


def _split_tables(tables: tuple[jax.Array, ...], chunks: jax.Array) -> list[EditTable]:
    """Split packed tables into columns. chunks: i32[], how many chunks hold entries, in all tables together."""
    found = []
    for table in tables:
        columns = table_layout(len(table) // 3).split(table)
        held = len(table) // (3 * CHUNK)
        found.append(EditTable(columns["index"], columns["seen"], columns["bias"], jnp.clip(chunks, 0, held)))
        chunks = chunks - held
    return found


def logprob_report(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Return log probabilities, packed as i32[2 N + 2 N K], K = MAX_LOGPROBS at most, for `unpack_report`.

    In order: the bits of each token's log probability, its rank, the ids of the K likeliest tokens, and the bits of
    their log probabilities. logits: f32[N, V]; token: i32[N].
    """
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    own = jnp.take_along_axis(logits, token[:, None], axis=1)
    rank = 1 + jnp.sum(logits > own, axis=1, dtype=jnp.int32)
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    own_bits, top_bits = (lax.bitcast_convert_type(part - total, jnp.int32).reshape(-1) for part in (own, top))
    return jnp.concatenate([own_bits, rank, ids.astype(jnp.int32).reshape(-1), top_bits])


def _report_size(sampled: int, vocab_size: int) -> int:
    return 2 * sampled * (1 + min(MAX_LOGPROBS, vocab_size))


def unpack_report(report: np.ndarray, sampled: int) -> Logprobs:
    """Unpack a `logprob_report`, i32, of `sampled` positions, in their order."""
    own, rank, *rest = np.split(report, [sampled, 2 * sampled, sampled + len(report) // 2])
    ids, top = (part.reshape(sampled, -1) for part in rest)
    return Logprobs(own.view(np.float32), rank, ids, top.view(np.float32))


def step_logprobs(
    found: Logprobs, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray, edits: LogitEdits, max_depth: int
) -> Logprobs | None:
    """Return the log probabilities of the emitted tokens, [R, max_depth + 1], of those of the sampled positions.

    accepted: bool[nodes]. None: no row asked.
    """
    if (edits.logprobs < 0).all():
        return None
    nodes = SampledNodes.of(plan, trees)
    emitted = edits.logprobs[nodes.row] >= 0
    emitted[: len(accepted)] &= accepted
    at = np.flatnonzero(emitted)
    place = (nodes.row[at], nodes.depth[at])

    def placed(values: np.ndarray) -> np.ndarray:
        whole = np.zeros((plan.num_rows, max_depth + 1, *values.shape[1:]), values.dtype)
        whole[place] = values[at]
        return whole

    return Logprobs(placed(found.own), placed(found.rank), placed(found.top_ids), placed(found.top))


def prompt_logprobs(found: Logprobs, plan: StepPlan, trees: DraftTrees) -> Logprobs | None:
    """Return the log probabilities of the tokens of `plan.scored`, [M], of those of the sampled positions."""
    if plan.scored is None:
        return None
    first = trees.num_nodes + int(np.count_nonzero(plan.prefill_final))
    part = slice(first, first + plan.scored.num_positions)
    return Logprobs(found.own[part], found.rank[part], found.top_ids[part], found.top[part])


@dataclass(frozen=True)
class EditShapes:
    """Shapes of the edit tables and of the masks of allowed tokens, in words of four bytes."""

    buckets: BucketSet
    vocab_size: int
    max_context: int

    @cached_property
    def by_tokens(self) -> dict[int, Bucket]:
        """The bucket of most rows, by packed length."""
        return {bucket.tokens: bucket for bucket in self.buckets.all()}

    def tables(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """Return the tables of a bucket. They hold the most entries that its rows can have.

        A bucket of fewer rows uses the first ones of the tables of one with more rows.
        """
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
        """Return every shape that steps of up to `tokens` tokens use."""
        buckets = [bucket for bucket in self.by_tokens.values() if bucket.tokens <= tokens]
        return {self.mask(bucket) for bucket in buckets}.union(*(self.tables(bucket) for bucket in buckets))

    def bytes(self, tokens: int) -> int:
        """Return the bytes of one array of each of those shapes."""
        return sum(4 * math.prod(shape) for shape in self.all(tokens))


class Resampler:
    """Runs `resample` after a forward: one program per packed length of the target, and their arguments.

    Each program has the most rows of its length, since rows cost little here and programs cost time at the start.
    Tables of penalties grow in size, and those without entries lie on the device already: a step sends at most GROWTH
    times the entries that it has, and one chunk.
    """

    def __init__(self, target: DeviceModel, limits: Limits):
        self._target = target
        self._limits = limits
        self._vocab_size = target.config.vocab_size
        self.shapes = EditShapes(target.buckets, self._vocab_size, limits.max_context)
        self.neutral: dict[tuple[int, ...], jax.Array] = {}
        """Empty tables and masks that allow every token, on the device, by shape; filled by `prepare`."""

    def bucket(self, bucket: Bucket) -> Bucket:
        """Return the bucket that redraws a step whose forward ran in `bucket`."""
        return self.shapes.by_tokens[bucket.tokens]

    def declare(self) -> list[Declared]:
        """Declare the programs. They take no pools, so they serve extended pools too."""
        target, place, limits = self._target, self._target.placement, self._limits
        declared = []
        for bucket in self.shapes.by_tokens.values():
            layout = target.programs.layout(bucket)
            arguments = (
                place.abstract((bucket.sampled, self._vocab_size), jnp.float32),
                place.abstract((bucket.sampled,), jnp.int32),
                place.abstract((layout.size,), jnp.int32),
                place.abstract((edits_layout(bucket).size,), jnp.int32),
                tuple(place.abstract(shape, jnp.int32) for shape in self.shapes.tables(bucket)),
                place.abstract(self.shapes.mask(bucket), jnp.uint32),
            )
            program = partial(
                resample,
                bucket=bucket,
                layout=layout,
                page_size=limits.page_size,
                max_depth=limits.max_tree_depth,
                synthetic=target.programs.synthetic,
            )
            function = jax.jit(place.spmd(program, (EVERYWHERE,) * len(arguments), EVERYWHERE))
            declared.append(Declared(self._key(bucket), function, arguments))
        return declared

    def prepare(self) -> None:
        """Put the neutral arguments on the device. Call it before the first `redraw`."""
        for shape in self.shapes.all(self._limits.max_tokens):
            neutral = np.full(shape, 0xFFFFFFFF, np.uint32) if len(shape) == 2 else np.zeros(shape, np.int32)
            self.neutral[shape] = jax.device_put(neutral, self._target.placement.sharding(EVERYWHERE))

    def redraw(self, step: PackedStep, edits: LogitEdits, scored: ScoredPrompts | None = None) -> AfterForward:
        """Return the call that redraws a step's tokens with these edits, and scores prompts.

        step: packed in the bucket of `bucket()`.
        """
        bucket = step.bucket
        packed, views = edits_layout(bucket).new()
        rows, entries = len(edits.presence), len(edits.token)
        views["repetition"][:] = 1.0
        for name in ("presence", "frequency", "repetition"):
            views[name][:rows] = getattr(edits, name)
        views["changed"][: len(edits.changed)] = edits.changed
        views["scored"][:] = -1
        if scored is not None:
            views["scored"][len(edits.changed) :][: scored.num_positions] = scored.token
        views["asked"][:] = -(-entries // CHUNK), scored is not None or (edits.logprobs >= 0).any()
        tables = tuple(self._tables(bucket, edits))
        allowed: np.ndarray | jax.Array = self.neutral[self.shapes.mask(bucket)]
        if edits.allowed is not None:
            allowed = np.zeros(self.shapes.mask(bucket), np.uint32)
            allowed[: len(edits.allowed)] = edits.allowed
        program = self._target.compiled[self._key(bucket)]

        def after_forward(first: VerifyResult, in_flight: InFlight) -> tuple[Resampled, InFlight]:
            again = program(first.logits, first.drawn, step.packed, packed, tables, allowed)
            return again, in_flight._replace(page=again.page, slot=again.slot)

        return after_forward

    def _tables(self, bucket: Bucket, edits: LogitEdits) -> Iterator[np.ndarray | jax.Array]:
        first = 0
        for shape in self.shapes.tables(bucket):
            if first >= len(edits.token):
                yield self.neutral[shape]
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

    def _key(self, bucket: Bucket) -> tuple:
        return (self._target.role, "resample", bucket)

    def close(self) -> None:
        """Delete the neutral arguments on the device."""
        for array in self.neutral.values():
            array.delete()
        self.neutral.clear()
