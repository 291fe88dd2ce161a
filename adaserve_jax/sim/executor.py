"""An executor without a device: a virtual clock, a cost table for its times, and text that is a pure function.

The token at position p of a request is `token_at(seed, choice, p)`, whatever the policy; candidate trees carry it with
a given acceptance and f's that say so honestly. A plan that breaks a limit raises IntegrityError.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.residency import State
from adaserve_jax.scheduler.cost_model import CostGrid
from adaserve_jax.sim.text import (
    CHOICE_DECAY,
    CONCENTRATION,
    Draws,
    acceptance_at,
    search,
    token_at,
    tokens_after,
    walk,
)
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftPlan,
    DraftTrees,
    Limits,
    LogitEdits,
    Progress,
    StepOutcome,
    StepPlan,
    context_load,
)

LEAST_CHANCE = 1e-9
"""Synthetic chances are at least this, and at most 1 less this."""


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass(frozen=True)
class ElasticTimes:
    """Seconds of expansion and contraction. expand: free the draft and make the slab. contract: move pages and free the
    slab. load: until the draft is back, while steps go on.

    The first two are Nightjar's, of a 30B model on 2 L20 GPUs (table 6); `load` is that of 2.5 GB, a draft of 1B in
    bf16, at 20 GB/s from the host.
    """

    expand_s: float = 0.1439
    contract_s: float = 0.0119
    load_s: float = 0.125


class SimExecutor:
    """Implements `types.Executor` on a virtual clock. There are no logits, so nothing edits them.

    acceptance: mean chance that the target takes the draft's first choice: one for all requests, or a function of their
    seeds, u64[R] -> f64[R]. concentration: how little that chance varies from position to position; the draft knows it
    at each. choice_decay: as `decay` of `text.search`. synthetic: the chance by level instead, the same for all
    requests, positions and choices; 0 below the last.
    overhead_s: seconds of a step outside both models, by whether it drafts and its rows.

    If a plan asks for uncalibrated f, the draft states its chances too sharply, by OVERCONFIDENCE; what is accepted
    stays the same.
    """

    def __init__(
        self,
        limits: Limits,
        cost: CostSamples,
        acceptance: float | Callable[[np.ndarray], np.ndarray],
        clock: VirtualClock,
        *,
        concentration: float = CONCENTRATION,
        choice_decay: float = CHOICE_DECAY,
        synthetic: tuple[float, ...] | None = None,
        overhead_s: Callable[[bool, int], float] = lambda drafts, rows: 0.0,
        vocab_size: int = 1000,
        elastic_times: ElasticTimes | None = None,
    ):
        self._limits = limits
        self._cost = cost
        self._grid = CostGrid(cost, limits)
        self._acceptance = acceptance
        self._concentration = concentration
        self._choice_decay = choice_decay if synthetic is None else 1.0
        self._synthetic: np.ndarray | None = None
        if synthetic is not None:
            depth = max(limits.max_tree_depth, len(synthetic))
            padded = np.pad(np.array(synthetic, np.float64), (0, depth - len(synthetic)))
            # at 0 and 1 a search would take logarithms of 0
            self._synthetic = np.clip(padded, LEAST_CHANCE, 1 - LEAST_CHANCE)
        self._overhead_s = overhead_s
        self._clock = clock
        self._vocab_size = vocab_size
        self._draft_s = 0.0
        self._drawn: tuple[StepPlan, np.ndarray] | None = None
        self._elastic_times = elastic_times or ElasticTimes()
        self._place: State = "resident"
        self._loaded_at_s = 0.0

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def compiles_after_ready(self) -> int:
        return 0

    def warm_up(self, progress: Progress | None = None, samples: CostSamples | None = None) -> CostSamples:
        if progress is not None:
            progress("simulated programs", 1, 1)
        return samples or self._cost

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        draft = plan.draft
        if draft is None:
            raise IntegrityError("speculate needs a plan with a draft")
        self._require("resident", "a plan has a draft")
        load, depth = self._load(plan), draft.depth
        self._draft_s = self._grid.catchup_s(len(draft.catchup_tokens), load)
        if depth:
            self._draft_s += depth * self._grid.level_of(plan.num_rows, draft.width, load)
        self._clock.advance(self._draft_s)
        if draft.depth == 0:
            return CandidateTrees.empty(plan.num_decode)
        return self._candidates(plan, draft)

    def verify(
        self, plan: StepPlan, trees: DraftTrees, edits: LogitEdits | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepOutcome:  # fmt: skip
        limits, rows = self._limits, plan.num_decode
        sampled = trees.num_nodes + int(np.count_nonzero(plan.prefill_final))
        packed = trees.num_nodes + plan.num_prefill_tokens
        if sampled > limits.max_tree_tokens or packed > limits.max_tokens or plan.num_rows > limits.max_requests:
            raise IntegrityError(f"the step of {packed} tokens, {sampled} sampled, breaks {limits}")
        bucket = limits.token_edges[bisect_left(limits.token_edges, packed)]
        tokens = np.zeros((plan.num_rows, limits.max_tree_depth + 1), np.int32)
        counts = np.zeros(plan.num_rows, np.int32)
        accepted = self._walk(plan, trees, tokens, counts)
        if plan.num_rows > rows:
            ends = plan.ctx_len[rows:] + plan.prefill_counts
            sampling = plan.sampling
            tokens[rows:, 0] = token_at(sampling.seed[rows:], sampling.choice[rows:], ends, self._vocab_size)
            counts[rows:] = plan.prefill_final
        verify_s = self._grid.verify_s(bucket, plan.num_rows, self._load(plan))
        drafts = plan.draft is not None and plan.draft.depth > 0
        self._clock.advance(verify_s + self._overhead_s(drafts, plan.num_rows))
        if meanwhile is not None:
            meanwhile()
        draft_s, self._draft_s = self._draft_s, 0.0
        return StepOutcome(tokens, counts, accepted, draft_s, verify_s, draft_s + verify_s, bucket)

    def expand(self) -> None:
        self._require("resident", "expand is called")
        self._clock.advance(self._elastic_times.expand_s)
        self._place = "expanded"

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        self._require("expanded", "move_pages is called")
        if np.intersect1d(from_pages, to_pages).size:
            raise IntegrityError(f"pages are moved onto each other: {from_pages} to {to_pages}")

    def contract(self) -> None:
        self._require("expanded", "contract is called")
        self._clock.advance(self._elastic_times.contract_s)
        self._place = "loading"
        self._loaded_at_s = self._clock.now() + self._elastic_times.load_s

    def draft_ready(self) -> bool:
        self._require("loading", "draft_ready is called")
        if self._clock.now() < self._loaded_at_s:
            return False
        self._place = "resident"
        return True

    def close(self) -> None:
        return None

    def _require(self, place: State, what: str) -> None:
        if self._place != place:
            raise IntegrityError(f"{what} while the draft is {self._place}; it must be {place}")

    def _load(self, plan: StepPlan) -> float:
        """Return the context load, 0 if the machine's times do not depend on it."""
        return context_load(plan.ctx_len, self._cost.context_rows) if self._cost.context else 0.0

    def _walk(self, plan: StepPlan, trees: DraftTrees, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Follow the target's tokens down every tree; return the walked nodes, bool[N]."""
        rows = plan.num_decode
        depth = int(trees.depth.max()) if len(trees.row) > rows else 0
        target = self._target(plan, depth)
        found = walk(trees, plan.root_token, target)
        if found is None:
            raise IntegrityError("trees must bring each row's root once, in row order")
        walked, counts[:rows] = found
        tokens[:rows, : depth + 1] = target[:, : depth + 1]
        return walked

    def _target(self, plan: StepPlan, depth: int) -> np.ndarray:
        """Return the target's tokens after each root, i32[num_decode, at least depth + 1]."""
        if self._drawn is not None and self._drawn[0] is plan and self._drawn[1].shape[1] > depth:
            return self._drawn[1]
        rows, sampling = plan.num_decode, plan.sampling
        return tokens_after(
            sampling.seed[:rows], sampling.choice[:rows], plan.ctx_len[:rows], depth + 1, self._vocab_size
        )

    def _candidates(self, plan: StepPlan, draft: DraftPlan) -> CandidateTrees:
        """Build the candidates: correct nodes carry the target's token, the others a wrong one."""
        rows, depth, width = plan.num_decode, draft.depth, draft.width
        seed, choice = plan.sampling.seed[:rows], plan.sampling.choice[:rows]
        draws = Draws.of(seed, choice, plan.ctx_len[:rows], depth, self._vocab_size)
        self._drawn = (plan, draws.target)
        if self._synthetic is not None:
            a = np.tile(self._synthetic[:depth], (rows, 1))
        else:
            mean = self._acceptance(seed) if callable(self._acceptance) else self._acceptance
            a = acceptance_at(mean, draws.mood, self._concentration)
        beams = search(draws, a, width, decay=self._choice_decay, calibrated=draft.calibrated)
        log_f = np.log(beams.f).astype(np.float32)
        if np.count_nonzero(draft.speculates) < rows:
            log_f[~draft.speculates] = -np.inf
        return CandidateTrees(beams.token, beams.parent, log_f, _levels(depth, width))


@cache
def _levels(depth: int, width: int) -> np.ndarray:
    """Return the level of each candidate, from 1, i32[C]."""
    return np.repeat(np.arange(1, depth + 1, dtype=np.int32), width)
