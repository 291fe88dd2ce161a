"""An executor without a device: a virtual clock, a cost table for its times, and text that is a pure function.

The token at position p of a request is `token_at(seed, choice, p)`, whatever the policy; candidate trees carry it with
a given acceptance and f's that say so honestly. With `strict` it also keeps track of every KV slot, and raises when a
plan reads KV that was never written, writes another request's page, or breaks a limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve_jax.errors import IntegrityError
from adaserve_jax.scheduler.cost_grid import CostGrid
from adaserve_jax.types import (
    CandidateTrees,
    CostSamples,
    DraftTrees,
    Limits,
    Progress,
    StepOutcome,
    StepPlan,
    context_load,
)

_TOKEN_SALT, _DRAFT_SALT = 1, 2


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


def token_at(
    seed: np.ndarray | int, choice: np.ndarray | int, position: np.ndarray | int, vocab_size: int
) -> np.ndarray:
    """i32, the target's token at `position`; arguments broadcast."""
    return (_mix(seed, choice, position, _TOKEN_SALT) % np.uint64(vocab_size)).astype(np.int32)


class SimExecutor:
    """Implements `types.Executor`. acceptance: chance that the target takes the draft's first choice, of all requests,
    or by request: a function of their seeds, u64[R] to f64[R]."""

    def __init__(
        self,
        limits: Limits,
        cost: CostSamples,
        acceptance: float | Callable[[np.ndarray], np.ndarray],
        clock: VirtualClock,
        *,
        vocab_size: int = 1000,
        strict: bool = True,
    ):
        self._limits = limits
        self._cost = cost
        self._grid = CostGrid(cost, limits)
        self._acceptance = acceptance
        self._clock = clock
        self._vocab_size = vocab_size
        self._draft_s = 0.0
        self._target_kv = KVRecord(limits) if strict else None
        self._draft_kv = KVRecord(limits) if strict else None

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def compiles_after_ready(self) -> int:
        return 0

    def warm_up(self, progress: Progress | None = None) -> CostSamples:
        if progress is not None:
            progress("simulated programs", 1, 1)
        return self._cost

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        draft = plan.draft
        if draft is None:
            raise IntegrityError("speculate needs a plan with a draft")
        if self._draft_kv is not None:
            self._draft_kv.extend(plan, draft.draft_ctx, draft.catchup_counts)
            ends = draft.draft_ctx + draft.catchup_counts
            caught_up = ends[: plan.num_decode] == plan.ctx_len[: plan.num_decode] + 1
            if draft.depth and not caught_up[draft.speculates].all():
                raise IntegrityError("a row that speculates does not end its catch-up with the root")
        self._draft_s = self._grid.catchup_s(int(draft.catchup_counts.sum()), self._load(plan))
        if draft.depth:
            self._draft_s += draft.depth * self._grid.level_of(plan.num_decode, draft.width, self._load(plan))
        self._clock.advance(self._draft_s)
        if draft.depth == 0:
            return CandidateTrees.empty(plan.num_decode)
        return self._candidates(plan, draft.depth, draft.width, draft.speculates)

    def verify(self, plan: StepPlan, trees: DraftTrees) -> StepOutcome:
        limits, rows = self._limits, plan.num_decode
        sampled = trees.num_nodes + int(plan.prefill_final.sum())
        packed = trees.num_nodes + plan.num_prefill_tokens
        if sampled > limits.max_tree_tokens or packed > limits.max_tokens or plan.num_rows > limits.max_requests:
            raise IntegrityError(f"the step of {packed} tokens, {sampled} sampled, breaks {limits}")
        bucket = limits.bucket(packed)
        tokens = np.zeros((plan.num_rows, limits.max_depth + 1), np.int32)
        counts = np.zeros(plan.num_rows, np.int32)
        accepted = self._walk(plan, trees, tokens, counts)
        ends = plan.ctx_len[rows:] + plan.prefill_counts
        sampling = plan.sampling
        tokens[rows:, 0] = token_at(sampling.seed[rows:], sampling.choice[rows:], ends, self._vocab_size)
        counts[rows:] = plan.prefill_final
        if self._target_kv is not None:
            written = np.concatenate([counts[:rows], plan.prefill_counts])
            self._target_kv.extend(plan, plan.ctx_len, written)
        verify_s = self._grid.verify_s(bucket, plan.num_rows, self._load(plan))
        self._clock.advance(verify_s)
        draft_s, self._draft_s = self._draft_s, 0.0
        return StepOutcome(tokens, counts, accepted, draft_s, verify_s, draft_s + verify_s, bucket)

    def close(self) -> None:
        return None

    def _load(self, plan: StepPlan) -> float:
        """Where context costs nothing, it is not counted."""
        return context_load(plan.ctx_len, self._cost.context_rows) if self._cost.context else 0.0

    def _walk(self, plan: StepPlan, trees: DraftTrees, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Follow the target's tokens down every tree, level by level for all rows at once; bool[N], nodes walked."""
        rows = np.arange(plan.num_decode)
        seed, choice = plan.sampling.seed[rows], plan.sampling.choice[rows]
        accepted = trees.parent < 0
        if not (trees.row[accepted] == rows).all() or not (trees.token[accepted] == plan.root_token).all():
            raise IntegrityError("trees must bring each row's root once, in row order")
        here = np.flatnonzero(accepted)
        alive = rows
        for level in range(self._limits.max_depth + 1):
            target = token_at(seed[alive], choice[alive], plan.ctx_len[alive] + level + 1, self._vocab_size)
            tokens[alive, level] = target
            counts[alive] = level + 1
            wanted = np.full(plan.num_decode, -1, np.int32)
            wanted[alive] = target
            above = np.full(plan.num_decode, -2, np.int64)
            above[alive] = here
            here = np.flatnonzero((trees.parent == above[trees.row]) & (trees.token == wanted[trees.row]))
            if not len(here):
                break
            accepted[here] = True
            alive = trees.row[here]
        return accepted

    def _candidates(self, plan: StepPlan, depth: int, width: int, speculates: np.ndarray) -> CandidateTrees:
        """Two lanes of likely tokens, first and second choice, and at each level side branches of the first lane.

        f[t, 0] = a^t; f[t, 1] = a (1 - a) a^(t-1); f[t, r] = a^(t-1) a (1 - a)^r for r >= 2, each the true chance.
        """
        rows = plan.num_decode
        root = plan.ctx_len[:rows].astype(np.int64)
        seed, choice = plan.sampling.seed[:rows], plan.sampling.choice[:rows]
        mean = self._acceptance(seed) if callable(self._acceptance) else self._acceptance
        a = np.clip(mean + 0.3 * (_uniform(seed, choice, root // 64, _DRAFT_SALT + 1) - 0.5), 0.02, 0.98)
        level, rank = np.arange(1, depth + 1)[:, None], np.arange(width)[None, :]
        lane = a[:, None, None] ** level * (1 - a[:, None, None]) ** rank
        true_rank = self._true_ranks(plan, a, depth, width)
        true = token_at(seed[:, None], choice[:, None], root[:, None] + np.arange(1, depth + 1), self._vocab_size)
        token = (true[:, :, None] + 1 + rank) % self._vocab_size
        token = np.where(true_rank[:, :, None] == rank, true[:, :, None], token)
        parent = np.where(level == 1, -1, (level - 2) * width + np.where(rank == 1, 1, 0))
        log_f = np.log(lane)
        log_f[~speculates] = -np.inf
        size = depth * width
        return CandidateTrees(
            token=token.reshape(rows, size).astype(np.int32),
            parent=np.broadcast_to(parent.reshape(1, size), (rows, size)).astype(np.int32),
            log_f=log_f.reshape(rows, size).astype(np.float32),
            depth=np.repeat(np.arange(1, depth + 1), width).astype(np.int32),
        )

    def _true_ranks(self, plan: StepPlan, a: np.ndarray, depth: int, width: int) -> np.ndarray:
        """i64[R, depth]: the rank that carries the target's token at each level, `width` when none does."""
        rows = plan.num_decode
        seed, choice = plan.sampling.seed[:rows, None], plan.sampling.choice[:rows, None]
        position = plan.ctx_len[:rows, None].astype(np.int64) + np.arange(1, depth + 1)
        draw = _uniform(seed, choice, position, _DRAFT_SALT)
        bounds = np.cumsum(a[:, None] * (1 - a[:, None]) ** np.arange(width), axis=1)
        pick = (draw[:, :, None] >= bounds[:, None, :]).sum(axis=2)
        ranks = np.full((rows, depth), width)
        lane = pick[:, 0]
        for level in range(depth):
            if level:
                first = np.where(pick[:, level] == 1, width, pick[:, level])
                second = np.where(pick[:, level] == 0, 1, width)
                lane = np.where(lane == 0, first, np.where(lane == 1, second, width))
            ranks[:, level] = lane
        return ranks


class KVRecord:
    """Which (request, position) each KV slot holds, so that a misplaced or missing entry is found at once."""

    def __init__(self, limits: Limits):
        self._page_size = limits.page_size
        self._content = np.zeros((limits.num_pages, limits.page_size), np.uint64)

    def extend(self, plan: StepPlan, ctx: np.ndarray, counts: np.ndarray) -> None:
        """Check the first `ctx` tokens (i32[R]) of every row, then write the `counts` next ones."""
        for row in range(plan.num_rows):
            end = int(ctx[row]) + int(counts[row])
            position = np.arange(end)
            page, slot = plan.page_table[row][position // self._page_size], position % self._page_size
            name = _mix(plan.sampling.seed[row], plan.sampling.choice[row], position, 0)
            if not (self._content[page, slot] == name)[: ctx[row]].all():
                raise IntegrityError(f"row {row} reads KV that it did not write")
            self._content[page[ctx[row] :], slot[ctx[row] :]] = name[ctx[row] :]
        ends = -(-(ctx + counts) // self._page_size)
        held = np.concatenate([plan.page_table[row, : ends[row]] for row in range(plan.num_rows)])
        if len(np.unique(held)) != len(held):
            raise IntegrityError("two rows of one step hold the same page")


def _mix(*parts: np.ndarray | int) -> np.ndarray:
    """u64, a well-mixed hash of broadcast integers (splitmix64 over each in turn)."""
    value = np.zeros(1, np.uint64)
    for part in parts:
        value = value + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value


def _uniform(*parts: np.ndarray | int) -> np.ndarray:
    return (_mix(*parts) >> np.uint64(11)).astype(np.float64) / 2.0**53
