"""Joint controller of `adaserve`: depth, width, verify budget and prefill chunk of a step, chosen by predicted value.

It maximises sequences on pace + prompts in time for their TTFT targets + a * emitted tokens per second + b * prefilled
tokens per second (docs/equations.md, joint objective). Token edges are searched coarsely for every shape of the draft,
then finely around the best. Before drafting only average f are known, so the budget is chosen again after drafting,
from the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load, SoloSpeed
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.shapes import Shapes, all_on_pace, cumulated, gain, kernels, value_options
from adaserve_jax.types import Limits

GRID = 16
"""Steps per token to which the tokens that a row must gain are rounded up."""
FINE_SHAPES = 3
"""Shapes that are also tried with the edges between the coarse ones."""
CHUNK_SHARES = np.array([1.0, 0.5, 0.25])
"""Shares of a step's tokens beside the roots that prefill may take, rounded up: prefill always progresses."""
COARSE_EDGES = 12
"""Token edges that are tried with every shape; those between are tried with the best shapes only."""
TEXT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the nodes of text already seen that are weighed beside a draft's."""
REACH_STEPS = 4
"""Updates of the acceptance averages for which the expected tokens of shapes are reused."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Factors on predictions, f64[shapes] each: of a step's seconds, and of its expected tokens beyond the roots."""

    seconds: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Choices:
    """Values of O shapes x E edges x F shares of prefill.

    value, on_pace: f64[O, E, F]; on_pace is the number of sequences on pace within value. chunk: i64[E, F], prefill
    tokens.
    """

    value: np.ndarray
    on_pace: np.ndarray
    chunk: np.ndarray

    def best(self) -> tuple[int, int, int]:
        """Return the indices of the most valuable choice."""
        shape, edge, share = np.unravel_index(int(self.value.argmax()), self.value.shape)
        return int(shape), int(edge), int(share)

    def of(self, shape: int) -> Choices:
        """Return the choices of one shape."""
        only = slice(shape, shape + 1)
        return Choices(self.value[only], self.on_pace[only], self.chunk)

    def neighbours(self, shapes: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the best shapes, and all edges around the best edge of any of them."""
        by_edge = self.value.max(axis=2)
        finest = np.argsort(-by_edge.max(axis=1), kind="stable")[:FINE_SHAPES]
        at = by_edge[finest].argmax(axis=1)
        first, last = edges[max(int(at.min()) - 1, 0)], edges[min(int(at.max()) + 1, len(edges) - 1)]
        return shapes[finest], np.arange(first, last + 1)


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen decision. shape: its index. on_pace: sequences that it keeps on pace, with corrections."""

    decision: Decision
    shape: int
    on_pace: float


@dataclass(frozen=True, eq=False)
class Weighed:
    """All options of one step with their values.

    choices: of `shapes` at the coarse `edges`, both indices. look: returns the choices of some shapes at some edges;
    None if there are no edges between the coarse ones. decide: returns the decision for a shape and a prefill chunk.
    """

    shapes: np.ndarray
    edges: np.ndarray
    choices: Choices
    look: Callable[[np.ndarray, np.ndarray], Choices] | None
    decide: Callable[[int, int], Decision]

    def pick(self, shape: int | None = None) -> Pick:
        """Return the best option, of one shape or of all."""
        shapes, edges, choices = self.shapes, self.edges, self.choices
        if shape is not None:
            shapes, choices = shapes[shape : shape + 1], choices.of(shape)
        if self.look is not None:
            shapes, edges = choices.neighbours(shapes, edges)
            choices = self.look(shapes, edges)
        best, edge, share = choices.best()
        chosen = int(shapes[best])
        return Pick(
            self.decide(chosen, int(choices.chunk[edge, share])), chosen,
            choices.on_pace.item(best, edge, share),
        )  # fmt: skip


class JointController(Controller):
    """Controller that picks the option of highest predicted value; its only state are the tables that it reads."""

    reads_prompts: ClassVar[bool] = True

    def __init__(
        self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance, objective: Objective,
        *, prefill_tokens: int | None = None, admits_by_pace: bool = True,
    ):  # fmt: skip
        """Set up over tables that learn elsewhere.

        prefill_tokens: of every step while prompts wait; None: chosen with the rest, so that prefill takes the slack.
        admits_by_pace: `sustains` may refuse.
        """
        self._limits = limits
        self._cost = cost
        self._acceptance = acceptance
        self._objective = objective
        self._prefill_tokens = prefill_tokens
        self._admits_by_pace = admits_by_pace
        self.shapes = Shapes.of(limits, cost.draft_widths)
        """Shapes that are weighed; shape 0 drafts nothing."""
        self._edges = np.array(limits.token_edges)
        sizes = np.geomspace(1, self._edges[-1], 2 * COARSE_EDGES).round()
        self._coarse = np.unique(np.searchsorted(self._edges, sizes))
        self._tokens: np.ndarray | None = None
        self._tokens_age = 0
        kernels()

    def decide(self, load: Load) -> Decision:
        return self.weigh(load).pick().decision

    def weigh(self, load: Load, correction: Correction | None = None, switch_s: float | None = None) -> Weighed:
        """Value every shape at the coarse edges. switch_s: seconds until drafts that lag have caught up; None: by the
        tables.
        """
        shapes = np.arange(len(self.shapes.depth) if load.can_speculate.any() else 1)
        low, high = self._edge_range(load, len(shapes))
        all_rows, context = load.num_decode + load.num_prefill, self._cost.context_load(load.context)
        catchup_s = self._catchup_s(load, int(self._edges[high]), context, switch_s)
        draft_s = self._draft_s(all_rows, catchup_s, context)
        verify_s = self._cost.verify_s(all_rows, context)
        edges = _spread(low, high, COARSE_EDGES)
        with_target = (load.need_rate > 0) & np.isfinite(load.need_rate)
        drafted, plain = with_target & load.can_speculate, with_target & ~load.can_speculate
        text = None if load.suffix_f is None else cumulated(load.suffix_f)
        value = partial(
            value_options, load.need_rate[drafted], load.need_rate[plain],
            root_tokens=load.num_decode,
            emit=self._objective.emit,
            prefill=self._objective.prefill_weight(load.wait_ratio),
            baseline_s=self._cost.baseline_s,
            prompt_rates=load.prompt_rates,  # a prompt in time is worth a row on pace
            drafted_text=None if text is None else text[drafted],
            plain_text=None if text is None else text[plain],
        )  # fmt: skip
        look = partial(self._look, load, value, draft_s, verify_s, correction)
        choices = look(shapes, edges)
        return Weighed(
            shapes, edges, choices, look if high - low >= len(edges) else None, partial(self._decision, load)
        )

    def _decision(self, load: Load, shape: int, prefill: int) -> Decision:
        depth, rows = int(self.shapes.depth[shape]), load.num_decode
        most = min(self._limits.max_tree_tokens, self._limits.max_tokens - prefill)
        feed_draft = self._limits.max_depth > 0 and (depth > 0 or rows == 0)
        speculates = depth > 0 or load.suffix_f is not None
        return Decision(depth, int(self.shapes.width[shape]), most if speculates else rows, prefill, feed_draft)

    def sustains(
        self, need_rate: np.ndarray, others: int, prefill_tokens: float, share: float, *, can_draft: bool = True
    ) -> bool:  # fmt: skip
        """Return whether every sequence can be on pace, by the tables of `decide`, if all draft at the best shape and
        edge.

        A rate that not even an empty machine reaches counts among the others: it must not keep everything waiting.
        """
        if not self._admits_by_pace:
            return True
        shapes = slice(None if can_draft else 1)
        feasible = need_rate[need_rate <= self._fastest_alone(shapes)]
        if not len(feasible):
            return True
        rows = len(need_rate) + others
        budget = share * np.minimum(self._edges[self._coarse] - prefill_tokens, self._limits.max_tree_tokens)
        extra = np.floor(budget).astype(np.int64) - rows
        return all_on_pace(feasible, self._step_s(rows)[shapes], extra, self._tokens_now()[shapes], GRID)

    def _look(
        self, load: Load, value: Callable[..., tuple[np.ndarray, np.ndarray]], draft_s: np.ndarray,
        verify_s: np.ndarray, correction: Correction | None, shapes: np.ndarray, at: np.ndarray,
    ) -> Choices:  # fmt: skip
        """Value `shapes` at the edges `at` (indices) for every share of prefill.

        value: `value_options` of the load. draft_s: f64[O], of all shapes; verify_s: f64[E], of all edges.
        """
        tokens, edges = self._tokens_now()[shapes], self._edges[at]
        step_s = draft_s[shapes, None] + verify_s[at]
        chunk = self._chunks(load, edges)
        extra = np.minimum(edges[:, None] - chunk, self._limits.max_tree_tokens) - load.num_decode
        factor = 1.0
        if correction is not None:
            step_s *= correction.seconds[shapes, None]
            factor = correction.tokens[shapes, None, None]
        if load.suffix_f is None:
            speculating = max(int(np.count_nonzero(load.can_speculate)), 1)
            gained = speculating * gain(tokens, extra / speculating) * factor
        else:
            gained = _gain_of_both(load, load.suffix_f, tokens, extra, factor)
        return Choices(*value(step_s, extra, tokens, GRID, gained=gained, chunk=chunk), chunk)

    def _tokens_now(self) -> np.ndarray:
        """Return the expected tokens of shapes, f64[O, 1 + K], computed anew after some updates of the averages."""
        age = self._acceptance.updates // REACH_STEPS
        if self._tokens is None or age != self._tokens_age:
            self._tokens, self._tokens_age = self.shapes.tokens(self._acceptance.expected()), age
        return self._tokens

    def fastest_alone(self, alone: SoloSpeed) -> float:
        """Return the tokens per second of the best shape, by this controller's own tables."""
        return self._fastest_alone()

    def _fastest_alone(self, shapes: slice = slice(None)) -> float:
        """Return expected tokens per second of one sequence on an empty machine, at the best of `shapes` and edges."""
        nodes = np.minimum(self._edges[self._coarse], self._limits.max_tree_tokens) - 1
        return float(((1.0 + gain(self._tokens_now(), nodes)) / self._step_s(1))[shapes].max())

    def _step_s(self, rows: int) -> np.ndarray:
        """Return f64[O, E], seconds of a step at the coarse edges, with drafts that lag by no more than usual."""
        draft_s = self._draft_s(rows, self._cost.catchup_s(2 * rows))
        return draft_s[:, None] + self._cost.verify_s(rows)[self._coarse]

    def _edge_range(self, load: Load, options: int) -> tuple[int, int]:
        """Return the first and the last token edge worth considering, as indices."""
        rows = load.num_decode
        largest = int(self.shapes.size[:options].max())
        suffix_nodes = 0 if load.suffix_f is None else int(np.count_nonzero(load.suffix_f))
        tree = min(rows * (1 + largest) + suffix_nodes, self._limits.max_tree_tokens)
        least = rows + min(load.prefill_tokens, 1)
        low, high = np.searchsorted(self._edges, [least, max(tree, rows) + load.prefill_tokens])
        return int(low), min(int(high), len(self._edges) - 1)

    def _draft_s(self, rows: int, catchup_s: float, context: float | None = None) -> np.ndarray:
        """Return f64[O], seconds of a step outside verification, by shape."""
        shapes, cost = self.shapes, self._cost
        draft_s = shapes.depth * cost.level_s(rows, context)[np.maximum(shapes.width, 1) - 1]
        draft_s += catchup_s + cost.overhead_s(True)
        draft_s[0] = cost.overhead_s(False)
        return draft_s

    def _catchup_s(self, load: Load, most_tokens: int, context: float | None, switch_s: float | None) -> float:
        """Return the seconds of this step's catch-up; the cost of a long lag is spread over the horizon."""
        lag = load.draft_lag[load.can_speculate]
        usual = int(np.minimum(lag, self._limits.max_depth + 1).sum())
        missing = int(lag.sum()) - usual
        usual += min(load.prefill_tokens, max(most_tokens - load.num_decode, 0))
        rest_s = self._cost.catchup_s(missing, context) if switch_s is None else switch_s
        return self._cost.catchup_s(usual, context) + rest_s / self._objective.horizon

    def _chunks(self, load: Load, edges: np.ndarray) -> np.ndarray:
        """Return i64[E, F], prefill tokens of every edge and share; one share while no prompt waits."""
        room = (edges - load.num_decode)[:, None]
        if not load.prefill_tokens:
            return np.zeros_like(room)
        if self._prefill_tokens is not None:
            return np.minimum(room, min(load.prefill_tokens, self._prefill_tokens))
        shares = np.ceil(room * CHUNK_SHARES).astype(np.int64)
        return np.minimum(shares, load.prefill_tokens)


@cache
def _spread(low: int, high: int, most: int) -> np.ndarray:
    """Return at most `most` indices from `low` to `high`, both included, evenly spread: i64[E]."""
    spread = np.unique(np.linspace(low, high, min(most, high - low + 1)).round().astype(np.int64))
    spread.flags.writeable = False  # shared by many steps
    return spread


def _gain_of_both(
    load: Load, suffix_f: np.ndarray, tokens: np.ndarray, extra: np.ndarray, factor: np.ndarray | float
) -> np.ndarray:
    """Return f64[O, E, F], expected tokens beyond the roots of `extra` nodes (i64[E, F]) of text and of the draft.

    factor: f64[O, 1, 1] or 1, correction of the draft's tokens. A draft adds to a row where text does not know the next
    token. The nodes are divided between the two as it brings the most, among some shares.
    """
    rows = load.can_speculate
    drafting = int(np.count_nonzero(rows))
    best = np.concatenate([[0.0], np.cumsum(-np.sort(-suffix_f[suffix_f > 0]))])
    extra = np.maximum(extra, 0)
    most = np.minimum(extra, len(best) - 1)
    if not drafting:
        return np.tile(best[most], (len(tokens), 1, 1))  # no view: a kernel is compiled again for one
    unknown = float(1.0 - np.minimum(suffix_f[rows, 0], 1.0).mean())
    found = np.zeros((len(tokens), *extra.shape))
    for share in TEXT_SHARES:
        of_text = np.ceil(most * share).astype(np.int64)
        drafted = drafting * unknown * gain(tokens, (extra - of_text) / drafting) * factor
        np.maximum(found, best[of_text] + drafted, out=found)
    return found
