"""The local drafter: catches the draft's KV up, then beam-searches all speculating rows in one program.

Where rows have different drafts, once for each of them: the same programs and pages, other weights.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.runtime.compiling import Declared
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.packing import beam_layout, fill_rows, pack_catchup
from adaserve_jax.runtime.routed import part_of, put_together
from adaserve_jax.tree.acceptance import AcceptanceTable
from adaserve_jax.types import CandidateTrees, StepPlan


class LocalDrafter:
    """Implements `types.Drafter` on this device. table: the chances in force, from the last plan that brought some.
    wait_s: seconds that the last call spent waiting for the device."""

    def __init__(self, model: DeviceModel, table: AcceptanceTable, *, max_depth: int, widths: tuple[int, ...]) -> None:
        self.model = model
        self.table = table
        self.max_depth = max_depth
        self.widths = widths
        self.wait_s = 0.0

    def declare(self) -> list[Declared]:
        """Catch-up for every bucket; a search for every row edge and compiled width."""
        model = self.model
        declared = model.declare_forward(model.programs.catch_up)
        for rows in model.buckets.row_edges:
            root_logits = jax.ShapeDtypeStruct((rows, model.config.vocab_size), jnp.float32)
            packed = jax.ShapeDtypeStruct((beam_layout(rows, model.programs.max_pages).size,), jnp.int32)
            for width in self.widths:
                search = jax.jit(partial(model.programs.search, max_depth=self.max_depth, width=width))
                arguments = (model.params, model.pools, root_logits, packed, self.table)
                declared.append(Declared((model.role, "search", rows, width), search, arguments))
        return declared

    def propose(self, plan: StepPlan) -> CandidateTrees:
        draft = plan.draft
        assert draft is not None
        self.wait_s = 0.0
        if draft.chances is not None:
            self.table = self.table.replaced(draft.chances)
        if draft.drafts is None:
            return self._found(self._search(plan, 0), plan)
        chosen = np.unique(draft.drafts)
        if len(chosen) == 1:
            return self._found(self._search(plan, int(chosen[0])), plan)
        return self._search_each(plan, draft.drafts, chosen)

    def _search_each(self, plan: StepPlan, drafts: np.ndarray, chosen: np.ndarray) -> CandidateTrees:
        """Every draft on its own rows; the host waits for none before all are under way."""
        under_way = []
        for number in chosen.tolist():
            rows = np.flatnonzero(drafts == number)
            part = part_of(plan, rows)
            under_way.append((rows[: part.num_decode], part, self._search(part, number)))
        found = [(rows, self._unpack(result, part)) for rows, part, result in under_way if result is not None]
        return put_together(plan.num_decode, found) if found else CandidateTrees.empty(plan.num_decode)

    def _found(self, result: Any, plan: StepPlan) -> CandidateTrees:
        return CandidateTrees.empty(plan.num_decode) if result is None else self._unpack(result, plan)

    def _search(self, plan: StepPlan, number: int) -> Any:
        """Catch up, then search by that draft; the result on the device, None where nobody speculates."""
        draft, model = plan.draft, self.model
        assert draft is not None
        if not len(draft.catchup_tokens):
            return None
        bucket = model.buckets.pick(len(draft.catchup_tokens), plan.num_rows)
        root_logits = model.run(pack_catchup(bucket, model.programs.max_pages, plan), weights=number)
        if draft.depth == 0 or not draft.speculates.any():
            return None
        width = next(width for width in self.widths if width >= draft.width)
        search = model.compiled[model.role, "search", bucket.rows, width]
        packed = self._pack_search(bucket.rows, plan)
        return search(model.weights[number], model.pools, root_logits, packed, self.table)

    def _pack_search(self, rows: int, plan: StepPlan) -> np.ndarray:
        assert plan.draft is not None
        packed, views = beam_layout(rows, self.model.programs.max_pages).new()
        fill_rows(views, plan.page_table, plan.sampling)
        views["ctx_len"][: plan.num_rows] = plan.draft.draft_ctx + plan.draft.catchup_counts
        views["active"][: plan.num_decode] = plan.draft.speculates
        views["shape"][:] = plan.draft.depth, plan.draft.width, plan.draft.calibrated
        return packed

    def _unpack(self, result: Any, plan: StepPlan) -> CandidateTrees:
        """Candidates of the decode rows, cut to the depth and width asked for."""
        assert plan.draft is not None
        depth, width, rows = plan.draft.depth, plan.draft.width, plan.num_decode
        dispatched = time.perf_counter()
        host = np.asarray(result)
        self.wait_s += time.perf_counter() - dispatched
        stride = host.shape[3]
        token, parent, cell, *bits = host[:, :rows, :depth, :width].reshape(5, rows, depth * width)
        level, rank = parent // stride, parent % stride
        parent = np.where(parent < 0, -1, level * width + rank).astype(np.int32)
        levels = np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
        log_f, log_q = (np.ascontiguousarray(part).view(np.float32) for part in bits)
        return CandidateTrees(token, parent, log_f, levels, cell, log_q)
