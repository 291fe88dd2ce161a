"""Notes what verifications reveal of acceptance, whatever policy chose the trees; for `adaserve bench --record`.

The target's token at a position either was one of the children that the draft's tree had there, or was none of them.
The trees depend on the policy, and that does not: which of the draft's choices, best first, the token was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftTrees,
    Executor,
    Limits,
    LogitEdits,
    Progress,
    StepOutcome,
    StepPlan,
)

MISS = -1
"""Rank of a token that was none of the children."""


@dataclass(frozen=True)
class AcceptanceRecord:
    """One request: at which positions of its text children were tested, and what came of it. One line of
    acceptance.jsonl; columns: docs/metrics.md.

    positions: of the token, the prompt counted. ranks: the accepted child's among its siblings by f, 0 the best; MISS
    for none, so that the rank lies at or beyond children. children: how many were tested. f: of the best of them,
    given its parent.
    """

    run_id: str
    policy: str
    rate_rps: float
    request_id: str
    slo_class: str
    positions: tuple[int, ...]
    ranks: tuple[int, ...]
    children: tuple[int, ...]
    f: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("positions", "ranks", "children", "f"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class AcceptanceRecorder:
    """Observations of all requests since the last `take`; they are told apart by their seeds, so each needs its own."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []

    def observe(self, plan: StepPlan, trees: DraftTrees, outcome: StepOutcome) -> None:
        """Note every node of the accepted walks that had children."""
        nodes = np.flatnonzero(trees.parent >= 0)
        if not len(nodes):
            return
        parent, prob = trees.parent[nodes], trees.path_prob[nodes]
        order = np.lexsort((trees.candidate[nodes], -prob, parent))
        nodes, parent, prob = nodes[order], parent[order], prob[order]
        parents, first, children = np.unique(parent, return_index=True, return_counts=True)
        taken = np.full(len(parents), MISS)
        hits = np.flatnonzero(outcome.accepted[nodes])
        group = np.searchsorted(parents, parent[hits])
        taken[group] = hits - first[group]
        walked = outcome.accepted[parents]
        at = parents[walked]
        row = trees.row[at]
        f = prob[first[walked]] / np.maximum(trees.path_prob[at], np.finfo(np.float32).tiny)
        position = plan.ctx_len[row] + trees.depth[at] + 1
        self._parts.append((plan.sampling.seed[row], position, taken[walked], children[walked], f))

    def take(
        self, requests: Mapping[int, tuple[str, str]], *, run_id: str, policy: str, rate_rps: float
    ) -> list[AcceptanceRecord]:
        """Records of all requests that have observations, and forget these. requests: by seed, the id and the class;
        what was noted of other seeds is left out."""
        parts, self._parts = self._parts, []
        if not parts:
            return []
        seeds, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(seeds, kind="stable")
        distinct, starts = np.unique(seeds[order], return_index=True)
        records = []
        for seed, rows in zip(distinct.tolist(), np.split(order, starts[1:]), strict=True):
            if seed in requests:
                position, rank, children, f = (column[rows].tolist() for column in columns)
                f = tuple(round(each, 3) for each in f)
                about = (run_id, policy, rate_rps, *requests[seed])
                records.append(AcceptanceRecord(*about, position, rank, children, f))
        return records


class RecordingExecutor:
    """Implements `types.Executor` by another one, and shows `recorder` every verification."""

    def __init__(self, executor: Executor, recorder: AcceptanceRecorder):
        self._executor = executor
        self._recorder = recorder

    @property
    def limits(self) -> Limits:
        return self._executor.limits

    @property
    def compiles_after_ready(self) -> int:
        return self._executor.compiles_after_ready

    def warm_up(self, progress: Progress | None = None) -> CostSamples:
        return self._executor.warm_up(progress)

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        return self._executor.speculate(plan)

    def verify(self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None) -> StepOutcome:
        outcome = self._executor.verify(plan, trees, edits)
        self._recorder.observe(plan, trees, outcome)
        return outcome

    def expand(self) -> None:
        self._executor.expand()

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._executor.move_pages(from_pages, to_pages)

    def contract(self) -> None:
        self._executor.contract()

    def draft_ready(self) -> bool:
        return self._executor.draft_ready()

    def close(self) -> None:
        self._executor.close()
