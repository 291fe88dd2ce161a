"""Interface of controllers: the load that a controller sees, the decision it makes, and the feedback it learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import Limits

ALL_SIZES = "all"
"""Bucket of a controller that does not tell batch sizes apart."""


class SoloSpeed:
    """Speed of one sequence alone on an empty machine, by the shape of its trees; reads the tables that learn while
    serving.
    """

    def __init__(self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance):
        self.limits = limits
        self._cost = cost
        self._acceptance = acceptance

    def rate(self, depth: int, width: int, nodes: int) -> float:
        """Return expected tokens per second.

        Every step drafts `depth` levels of `width` and verifies the `nodes` best of them beside the root, fewer where
        a tree or a step holds no more; depth 0 verifies one token per step.
        """
        verify_s = self._cost.verify_s(1)
        nodes = min(nodes, depth * width, self.limits.max_tree_tokens - 1)
        if not depth:
            return 1.0 / float(verify_s[self._edge(1)] + self._cost.overhead_s(False))
        chance = np.sort(self._acceptance.expected()[:depth, :width], axis=None)[::-1]
        tokens = 1.0 + float(chance[:nodes].sum())
        step_s = verify_s[self._edge(1 + nodes)] + self._cost.overhead_s(True)
        step_s += self._cost.catchup_s(math.ceil(tokens)) + depth * self._cost.level_s(1)[width - 1]
        return tokens / float(step_s)

    def fastest_chain(self, shortest: int) -> float:
        """Return the best rate of all chains of `shortest` to max_depth tokens."""
        return max(self.rate(k, min(k, 1), k) for k in range(shortest, max(self.limits.max_depth, shortest) + 1))

    def _edge(self, tokens: int) -> int:
        return self.limits.token_edges.index(self.limits.bucket(tokens))


@dataclass(frozen=True, eq=False)
class Load:
    """Load of a step before it is planned.

    need_rate: f64[num_decode], tokens per second that keep each decode row on pace; 0 without a target, inf if
    hopeless. draft_lag: i64[num_decode], tokens that the draft's KV lacks, root included. can_speculate:
    bool[num_decode], rows that can still use a draft, also if they need more than this step to catch up. num_prefill:
    rows whose prompt is not computed. prefill_tokens: prompt tokens of them that this step may compute, at most
    max_prefill_tokens. wait_ratio: largest ratio of wait to patience (the TTFT target, what a deadline leaves, or
    PATIENCE_S) of the prompts that run and the first sequence that waits. context:
    i64[rows], committed tokens of decode rows, then prefill rows; None if not known. can_draft: False while no draft
    can be asked, whatever is decided: its memory is KV pages, it is being loaded, or no draft service is available.
    suffix_f: f64[num_decode, C], f of the nodes that text already seen proposes for each row, best first, 0 for absent
    ones; None: no nodes. due_s, tpot_slo_s: f64[num_decode], seconds until each decode row's next token is due, 0 if it
    is late, and between its tokens; inf without a target. due_s is None unless the controller has `reads_due` or the
    draft is a service; tpot_slo_s is None if not known. prompt_rates: f64[P] in increasing order, for each prompt that
    is not computed the prompt tokens per second that keep its TTFT target, with the prompts before it served first; inf
    if hopeless; None unless the controller has `reads_prompts`.
    """

    need_rate: np.ndarray
    draft_lag: np.ndarray
    can_speculate: np.ndarray
    num_prefill: int
    prefill_tokens: int
    wait_ratio: float
    context: np.ndarray | None = None
    can_draft: bool = True
    suffix_f: np.ndarray | None = None
    due_s: np.ndarray | None = None
    tpot_slo_s: np.ndarray | None = None
    prompt_rates: np.ndarray | None = None

    @classmethod
    def of_one(cls) -> Load:
        """Return the load of one decode row without a target that can draft, and nothing else."""
        return cls(
            np.zeros(1), np.ones(1, np.int64), np.ones(1, bool), num_prefill=0, prefill_tokens=0, wait_ratio=0.0,
            due_s=np.full(1, np.inf), tpot_slo_s=np.full(1, np.inf), prompt_rates=np.zeros(0),
        )  # fmt: skip

    @property
    def num_decode(self) -> int:
        """Number of decode rows."""
        return len(self.need_rate)

    @property
    def speculates(self) -> bool:
        """True if any row can use a draft, or text already seen proposes nodes."""
        return self.suffix_f is not None or bool(self.can_speculate.any())


@dataclass(frozen=True)
class Decision:
    """Decision for one step.

    depth: levels of the beam search, 0 for no speculation. width: of each level. tree_token_cap: most tree tokens,
    roots included. prefill_tokens: of all chunks of the step. feed_draft: the draft is fed the prefill chunks too.
    """

    depth: int
    width: int
    tree_token_cap: int
    prefill_tokens: int
    feed_draft: bool


def checked(decision: object, limits: Limits, load: Load) -> Decision:
    """Return what a controller decided, in Python's integers.

    Raises ConfigError for a decision that no step can run: a controller's mistake, which nothing later would name.
    """
    if not isinstance(decision, Decision):
        raise ConfigError(f"a controller's decide() must return a Decision, got {decision!r:.80}; fix it")
    rows, max_width, feeds = load.num_decode, max(limits.max_width, 1), decision.feed_draft
    least_prefill = 1 if load.num_prefill and not rows else 0
    decided = (decision.depth, decision.width, decision.tree_token_cap, decision.prefill_tokens)
    depth, width, tree_token_cap, prefill_tokens = decided
    if (
        all(isinstance(value, int | np.integer) for value in decided)
        and 0 <= depth <= limits.max_depth
        and min(depth, 1) <= width <= max_width
        and tree_token_cap >= rows
        and prefill_tokens >= least_prefill
        and isinstance(feeds, bool | np.bool_)
    ):
        is_plain = all(type(value) is int for value in decided)
        return decision if is_plain else Decision(*map(int, decided), feed_draft=bool(feeds))
    undrafted = "" if limits.max_depth else " (there is no draft, or the policy has uses_draft=False)"
    raise ConfigError(
        f"a policy's controller must decide, in integers, a depth of 0 to {limits.max_depth}{undrafted}, a width of 1 "
        f"to {max_width} (0 only at depth 0), a tree_token_cap of at least {rows}, one token for each row, and "
        f"prefill_tokens of at least {least_prefill}, got depth {depth}, width {width}, tree_token_cap "
        f"{tree_token_cap}, prefill_tokens {prefill_tokens}, and whether to feed the draft, got {feeds!r:.20}; fix its "
        "decide()"
    )


@dataclass(frozen=True)
class Feedback:
    """Result of a step with decode rows.

    rows: decode rows that speculated. drafted, accepted: nodes, roots left out. emitted: tokens of the rows that
    speculated. decode_rows, decoded: all decode rows, and their tokens. prefill_tokens: prompt tokens computed beside
    them. catchup_tokens: tokens that the draft was fed for decode rows. step_s: seconds from the commit before, or from
    the step's plan where the engine was idle, to its commit. predicted_s: by the tables, 0 if they predicted nothing.
    expected: accepted nodes that the tables expected of those verified.
    """

    rows: int
    drafted: int
    accepted: int
    emitted: int
    decode_rows: int = 0
    decoded: int = 0
    prefill_tokens: int = 0
    catchup_tokens: int = 0
    step_s: float = 0.0
    predicted_s: float = 0.0
    expected: float = 0.0


@dataclass(frozen=True)
class ArmReport:
    """Arms of a controller, for metrics.

    arms: the arm thought best, by the largest number of decode rows of a size bucket, or ALL_SIZES. regret_s: seconds
    that the arms played are estimated to have cost beyond the best ones, by the controller's own statistics.
    """

    arms: dict[str, str] = field(default_factory=dict)
    regret_s: float = 0.0


def arm_name(depth: int, width: int = 1) -> str:
    """Return the name of an arm in metrics: "off", or depth x width."""
    return f"{depth}x{width}" if depth else "off"


class Controller(Protocol):
    """Choice of depth, width, most tree tokens and prefill tokens for each step.

    Explicit subclasses that learn nothing, have no arms and admit everything inherit `learn`, `arms`, `sustains` and
    `fastest_alone`. reads_due, reads_prompts: `decide` reads `Load.due_s`, `Load.prompt_rates`; plans compute these for
    such controllers only.
    """

    reads_due: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = False

    def decide(self, load: Load) -> Decision:
        """Return the decision for the next step."""
        ...

    def sustains(
        self, need_rate: np.ndarray, others: int, prefill_tokens: float, share: float, *, can_draft: bool = True
    ) -> bool:  # fmt: skip
        """Return whether steps could keep all these sequences on pace at once, with a share of the budget.

        need_rate: f64[R], tokens per second, finite. others: rows beside them that need no pace. prefill_tokens: prompt
        tokens of a step meanwhile.
        """
        return True

    def fastest_alone(self, alone: SoloSpeed) -> float:
        """Return expected tokens per second of one sequence on an empty machine.

        By default the rate of what `decide` gives one row; `decide` must then change nothing. Raises ConfigError as
        `checked`.
        """
        load = Load.of_one()
        decision = checked(self.decide(load), alone.limits, load)
        return alone.rate(decision.depth, decision.width, decision.tree_token_cap - 1)

    def learn(self, feedback: Feedback) -> None:
        """Take in the result of the step that was decided last."""

    def retimed(self, cost: CostTable) -> None:
        """Use new draft times of the cost table."""

    def arms(self) -> ArmReport:
        """Return the arms thought best, for metrics; empty for a controller without arms."""
        return ArmReport()


class ChainController(Controller):
    """Controller that chooses among chains, none included."""

    def fastest_alone(self, alone: SoloSpeed) -> float:
        """Return the rate of the best chain."""
        return alone.fastest_chain(0)
