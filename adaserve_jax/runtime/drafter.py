"""The local drafter: catches the draft's KV up, then beam-searches all speculating rows in one program.

Where the rows of a step have different drafts, it does so once for each draft: the same programs and pages, other
weights. A draft of another vocabulary is fed its own tokens, one for each of the target's, and searches the target's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.vocabulary_map import VocabularyMap
from adaserve_jax.runtime.compile import Declared
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import Root
from adaserve_jax.runtime.step_layout import beam_layout, fill_rows, pack_catchup
from adaserve_jax.runtime.vocabulary_table import place_maps
from adaserve_jax.tree.beam import AcceptanceTable
from adaserve_jax.types import CandidateTrees, StepPlan


class LocalDrafter:
    """Implements `types.Drafter` on this device.

    table: the acceptance table in force, from the last plan that brought one. wait_s: seconds that the last call
    waited for the device.
    """

    def __init__(
        self, model: DeviceModel, table: AcceptanceTable, *, max_depth: int, widths: tuple[int, ...],
        vocabularies: Sequence[VocabularyMap] = (), target: DeviceModel | None = None,
    ) -> None:  # fmt: skip
        """Take a loaded draft. widths: beam widths that searches are compiled for, increasing. vocabularies: how the
        target's tokens are mapped, by draft; empty if they are those of every draft. target: of a head, which
        reads its features; None for a model of its own."""
        self.model = model
        self._target = target
        self.vocabularies = vocabularies
        self._tables = place_maps(vocabularies)
        self.table = table
        self.max_depth = max_depth
        self.widths = widths
        self.wait_s = 0.0

    def declare(self) -> list[Declared]:
        """Declare catch-up for every bucket, and a search for every row edge and width."""
        model = self.model
        declared = model.declare_forward(model.programs.catch_up, further=self._features())
        for rows in model.buckets.row_edges:
            root = Root(jax.ShapeDtypeStruct((rows, model.config.vocab_size), jnp.float32))  # type: ignore[arg-type]
            if self._target is not None:
                root = root._replace(feature=jax.ShapeDtypeStruct((model.config.hidden_size, rows), jnp.float32))
            packed = jax.ShapeDtypeStruct((beam_layout(rows, model.programs.max_pages).size,), jnp.int32)
            for width in self.widths:
                search = jax.jit(partial(model.programs.search, max_depth=self.max_depth, width=width))
                arguments = (model.params, model.pools, root, packed, self.table, *self._tables[:1])
                declared.append(Declared((model.role, "search", rows, width), search, arguments))
        return declared

    def _features(self) -> tuple[Any, ...]:
        """Return what a head's catch-up reads of the target; of one that is divided, the first device's copy."""
        if self._target is None:
            return ()
        features = self._target.pools.features
        assert features is not None
        if self._target.placement.mesh is None:
            return (features,)
        if isinstance(features, jax.Array):
            return (features.addressable_data(0),)
        return (self.model.placement.abstract(features.shape, features.dtype),)

    def propose(self, plan: StepPlan) -> CandidateTrees:
        """Implement `types.Drafter.propose`."""
        draft = plan.draft
        assert draft is not None
        self.wait_s = 0.0
        if draft.chances is not None:
            self.table = self.table.replaced(draft.chances)
        numbers = [0] if draft.drafts is None else np.unique(draft.drafts).tolist()
        if len(numbers) == 1:
            return self._candidates(self._search(plan, numbers[0]), plan)
        assert draft.drafts is not None
        searches = []
        for number in numbers:  # all are dispatched before the host waits for the first
            rows = np.flatnonzero(draft.drafts == number)
            part = plan_for_rows(plan, rows)
            searches.append((rows[: part.num_decode], part, self._search(part, number)))
        found = [(rows, self._candidates(result, part)) for rows, part, result in searches if result is not None]
        return merge_candidates(plan.num_decode, found) if found else CandidateTrees.empty(plan.num_decode)

    def _search(self, plan: StepPlan, number: int) -> jax.Array | None:
        """Catch draft `number` up, then search with it. Return the result on the device; None: no row speculates."""
        draft, model = plan.draft, self.model
        assert draft is not None
        if not len(draft.catchup_tokens):
            return None
        bucket = model.buckets.pick(len(draft.catchup_tokens), plan.num_rows)
        fed = plan
        if self._tables:
            tokens = self.vocabularies[number].to_draft[draft.catchup_tokens]
            fed = replace(plan, draft=replace(draft, catchup_tokens=tokens))
        step = pack_catchup(bucket, model.programs.max_pages, fed, is_head=self._target is not None)
        root = model.run(step, weights=number, further=self._features())
        if draft.depth == 0 or not draft.speculates.any():
            return None
        width = next(width for width in self.widths if width >= draft.width)
        search = model.compiled[model.role, "search", bucket.rows, width]
        packed = self._pack_search(bucket.rows, plan)
        vocabulary = self._tables[number : number + 1]
        return search(model.params_of(number), model.pools, root, packed, self.table, *vocabulary)

    def _pack_search(self, rows: int, plan: StepPlan) -> np.ndarray:
        assert plan.draft is not None
        packed, views = beam_layout(rows, self.model.programs.max_pages).new()
        fill_rows(views, plan.page_table, plan.sampling)
        views["ctx_len"][: plan.num_rows] = plan.draft.draft_ctx + plan.draft.catchup_counts
        views["active"][: plan.num_decode] = plan.draft.speculates
        views["shape"][:] = plan.draft.depth, plan.draft.width, plan.draft.calibrated
        return packed

    def _candidates(self, result: jax.Array | None, plan: StepPlan) -> CandidateTrees:
        """Wait for a search and return its candidates."""
        if result is None:
            return CandidateTrees.empty(plan.num_decode)
        dispatched = time.perf_counter()
        host = np.asarray(result)
        self.wait_s += time.perf_counter() - dispatched
        return unpack_candidates(host, plan)


def unpack_candidates(result: np.ndarray, plan: StepPlan) -> CandidateTrees:
    """Return the decode rows' candidates in a result of `ModelPrograms.search`, cut to the plan's depth and width."""
    assert plan.draft is not None
    depth, width, rows = plan.draft.depth, plan.draft.width, plan.num_decode
    stride = result.shape[3]
    token, parent, cell, *bits = result[:, :rows, :depth, :width].reshape(5, rows, depth * width)
    level, rank = parent // stride, parent % stride
    parent = np.where(parent < 0, -1, level * width + rank).astype(np.int32)
    levels = np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
    log_f, log_q = (np.ascontiguousarray(part).view(np.float32) for part in bits)
    return CandidateTrees(token, parent, log_f, levels, cell, log_q)


def plan_for_rows(plan: StepPlan, rows: np.ndarray) -> StepPlan:
    """Return the plan of some rows alone (increasing, i64[n]), as far as a draft reads it.

    Fields that only the target reads are left as they are.
    """
    draft = plan.draft
    assert draft is not None
    ends = draft.catchup_counts.cumsum()
    tokens = [draft.catchup_tokens[ends[row] - draft.catchup_counts[row] : ends[row]] for row in rows.tolist()]
    decode = rows[rows < plan.num_decode]
    return replace(
        plan,
        slots=plan.slots[rows],
        num_decode=len(decode),
        root_token=plan.root_token[decode],
        ctx_len=plan.ctx_len[rows],
        page_table=plan.page_table[rows],
        sampling=plan.sampling.take(rows),
        draft=replace(
            draft,
            catchup_tokens=np.concatenate(tokens),
            catchup_counts=draft.catchup_counts[rows],
            draft_ctx=draft.draft_ctx[rows],
            speculates=draft.speculates[decode],
            drafts=None,
        ),
    )


def merge_candidates(num_decode: int, parts: Sequence[tuple[np.ndarray, CandidateTrees]]) -> CandidateTrees:
    """Merge the candidates of groups of rows (i64[n] and their trees, all of one shape). Other rows get none."""
    first = parts[0][1]
    shape = (num_decode, first.token.shape[1])
    token, parent, cell = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    log_f, log_q = np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
    for rows, found in parts:
        assert found.cell is not None and found.log_q is not None
        token[rows], parent[rows], cell[rows] = found.token, found.parent, found.cell
        log_f[rows], log_q[rows] = found.log_f, found.log_q
    return CandidateTrees(token, parent, log_f, first.depth, cell, log_q)
