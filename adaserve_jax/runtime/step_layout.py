"""Packs all host inputs of a program into one int32 array, so that each step is one transfer to the device.

`step_layout` and `beam_layout` name the fields of an array. The host fills them (`pack_verify`, `pack_catchup`); a
program takes them apart again (`Layout.split`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.sampling import ROW_SAMPLING, RowSampling
from adaserve_jax.tree.sampling import DeviceSampling
from adaserve_jax.tree.verify import PADDING, PREFILL
from adaserve_jax.types import DraftTrees, StepPlan

FLOAT_FIELDS = frozenset({"presence", "frequency", "repetition", "bias"}) | {
    name for name, (dtype, _) in ROW_SAMPLING.items() if dtype == np.float32
}


@dataclass(frozen=True)
class Layout:
    """Named int32 or float32 arrays, one after another in one int32 array."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return a zeroed array and writable views of its fields."""
        packed = np.zeros(self.size, np.int32)
        views, offset = {}, 0
        for name, shape in self.shapes:
            part = packed[offset : offset + math.prod(shape)]
            views[name] = (part.view(np.float32) if name in FLOAT_FIELDS else part).reshape(shape)
            offset += math.prod(shape)
        return packed, views

    def split(self, packed: jax.Array) -> dict[str, jax.Array]:
        """Return the fields of a packed array; traced."""
        fields, offset = {}, 0
        for name, shape in self.shapes:
            part = packed[offset : offset + math.prod(shape)]
            part = lax.bitcast_convert_type(part, jnp.float32) if name in FLOAT_FIELDS else part
            fields[name] = part.reshape(shape)
            offset += math.prod(shape)
        return fields


def _row_shapes(rows: int, max_pages: int) -> list[tuple[str, tuple[int, ...]]]:
    sampling = [(name, (rows,)) for name in ("seed_low", "seed_high", *ROW_SAMPLING)]
    return [("page_table", (rows, max_pages)), ("ctx_len", (rows,)), *sampling]


def step_layout(bucket: Bucket, max_pages: int, *, adapted: bool = False) -> Layout:
    """Return the inputs of a packed forward: T tokens of R rows, and the N positions whose logits are computed.

    Verification and the draft's catch-up both use it. `count` is tokens per row; `sampled` packed indices. adapted:
    with `adapter`, the slot of each row's adapter, 0 for none.
    """
    tokens = [(name, (bucket.tokens,)) for name in ("token", "position", "row", "parent", "emit_depth")]
    rows = _row_shapes(bucket.rows, max_pages)
    slots = (("adapter", (bucket.rows,)),) if adapted else ()
    return Layout((*tokens, ("count", (bucket.rows,)), *rows, ("sampled", (bucket.sampled,)), *slots))


def edits_layout(bucket: Bucket) -> Layout:
    """Return the fields of a step's logit edits. scored: token to report on at each position, -1 for the drawn one;
    asked: table chunks that hold entries, and 1 to report logprobs."""
    rows = [(name, (bucket.rows,)) for name in ("presence", "frequency", "repetition")]
    return Layout((*rows, ("changed", (bucket.sampled,)), ("scored", (bucket.sampled,)), ("asked", (2,))))


def table_layout(entries: int) -> Layout:
    """Return the columns of a `tree.logit_edits.EditTable`."""
    return Layout(tuple((name, (entries,)) for name in ("index", "seen", "bias")))


def beam_layout(rows: int, max_pages: int) -> Layout:
    """Return the inputs of a beam search. ctx_len: the draft's context, root included; shape: depth, width, and 1 if
    f is calibrated."""
    return Layout((*_row_shapes(rows, max_pages), ("active", (rows,)), ("shape", (3,))))


def sampler_of(fields: dict[str, jax.Array]) -> DeviceSampling:
    """Return the rows' sampling parameters; traced."""
    seed = jnp.stack([fields["seed_low"], fields["seed_high"]], axis=-1).astype(jnp.uint32)
    return DeviceSampling(seed, **{name: fields[name] for name in ROW_SAMPLING})


def fill_rows(views: dict[str, np.ndarray], page_table: np.ndarray, sampling: RowSampling[np.ndarray]) -> None:
    """Write page tables and sampling parameters into the first rows. Unused rows are greedy."""
    rows = len(page_table)
    views["page_table"][:rows, : page_table.shape[1]] = page_table
    seeds = sampling.seed.astype(np.uint64)
    views["seed_low"][:rows] = (seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    views["seed_high"][:rows] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
    for name, (_, greedy) in ROW_SAMPLING.items():
        views[name][:rows] = getattr(sampling, name)
        views[name][rows:] = greedy


@dataclass(frozen=True, eq=False)
class PackedStep:
    """A filled step array."""

    bucket: Bucket
    packed: np.ndarray


def _new_step(bucket: Bucket, max_pages: int, *, adapted: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a step array of padding only, and views of its fields."""
    packed, views = step_layout(bucket, max_pages, adapted=adapted).new()
    views["row"][:] = bucket.rows
    views["parent"][:] = -1
    views["emit_depth"][:] = PADDING
    return packed, views


def _chains(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and offset within the row of each token, i32[T], for counts i32[R] packed row after row."""
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    return row, (np.arange(len(row), dtype=np.int32) - first[row]).astype(np.int32)


def pack_verify(
    bucket: Bucket, max_pages: int, plan: StepPlan, trees: DraftTrees, *, adapted: bool = False
) -> PackedStep:
    """Pack a verification: tree nodes of the decode rows, then the prefill chunks, each chunk a chain.

    Sampled are the nodes, then the ends of prompts, then the positions that score prompts. adapted: as for
    `step_layout`.
    """
    packed, views = _new_step(bucket, max_pages, adapted=adapted)
    if adapted and plan.adapters is not None:
        views["adapter"][: plan.num_rows] = plan.adapters
    nodes = trees.num_nodes
    total = nodes + plan.num_prefill_tokens
    views["token"][:nodes] = trees.token
    views["row"][:nodes] = trees.row
    views["parent"][:nodes] = trees.parent
    views["emit_depth"][:nodes] = trees.depth
    views["position"][:nodes] = plan.ctx_len[trees.row] + trees.depth
    chain_row, offset = _chains(plan.prefill_counts)
    place = np.arange(nodes, total, dtype=np.int32)
    views["token"][nodes:total] = plan.prefill_tokens
    views["row"][nodes:total] = chain_row + plan.num_decode
    views["parent"][nodes:total] = np.where(offset == 0, -1, place - 1)
    views["position"][nodes:total] = plan.ctx_len[chain_row + plan.num_decode] + offset
    last = offset == plan.prefill_counts[chain_row] - 1
    views["emit_depth"][nodes:total] = np.where(last & plan.prefill_final[chain_row], 0, PREFILL)
    views["count"][: plan.num_rows] = np.bincount(views["row"][:total], minlength=plan.num_rows)[: plan.num_rows]
    views["ctx_len"][: plan.num_rows] = plan.ctx_len
    fill_rows(views, plan.page_table, plan.sampling)
    wanted = np.flatnonzero(views["emit_depth"][:total] >= 0)
    if plan.scored is not None:
        wanted = np.concatenate([wanted, plan.scored.at + nodes])
    views["sampled"][:] = bucket.tokens  # entries past the array are dropped
    views["sampled"][: len(wanted)] = wanted
    return PackedStep(bucket, packed)


def pack_catchup(bucket: Bucket, max_pages: int, plan: StepPlan, *, is_head: bool = False) -> PackedStep:
    """Pack the tokens that the draft's KV lacks. The last one of each speculating row is where its search starts.

    is_head: a head keeps a token's KV at the position of the feature that comes with it, which is the one
    before. So the first token of a text has none.
    """
    assert plan.draft is not None
    draft = plan.draft
    packed, views = _new_step(bucket, max_pages)
    tokens, counts, context = draft.catchup_tokens, draft.catchup_counts, draft.draft_ctx
    if is_head:
        begins = (context == 0) & (counts > 0)
        tokens = np.delete(tokens, (np.cumsum(counts) - counts)[begins])
        counts, context = counts - begins, np.maximum(context - 1, 0)
    total = len(tokens)
    row, offset = _chains(counts)
    views["token"][:total] = tokens
    views["row"][:total] = row
    views["parent"][:total] = np.where(offset == 0, -1, np.arange(total, dtype=np.int32) - 1)
    views["position"][:total] = context[row] + offset
    views["emit_depth"][:total] = PREFILL
    views["count"][: plan.num_rows] = counts
    views["ctx_len"][: plan.num_rows] = context
    fill_rows(views, plan.page_table, plan.sampling)
    last = np.cumsum(counts) - 1
    views["sampled"][: plan.num_rows] = np.maximum(last, 0)
    return PackedStep(bucket, packed)
