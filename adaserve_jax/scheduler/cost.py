"""What a step will take: a live table of seconds, seeded by measured samples and corrected by every outcome.

Knows nothing of requests or policies. A time is a line in the context load of the step's rows; what is learned is the
ratio of measured to predicted, so that one table serves short and long contexts alike.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import product

import numpy as np

from adaserve_jax.scheduler.cost_grid import CostGrid, bucket_of
from adaserve_jax.scheduler.prediction import PredictionLog, Served
from adaserve_jax.types import CostSamples, Limits, StepOutcome, StepPlan, context_load

ENTRY_RATE = 0.2
"""Weight of a new ratio (measured over sample) in its entry's moving average."""
DRIFT_RATE = 0.05
"""Weight of a new ratio in the ratio that stands in for entries not seen lately, and of a new typical context."""
FIRST_STEPS = 4
"""Steps that the samples count for in that ratio, while fewer than 1 / DRIFT_RATE were seen: it is a plain average at
first, so that an engine on a machine busier than when it was timed does not plan long by times that are gone."""
FRESH_STEPS = 200
"""Steps after which an entry's own average counts for half, and the drift ratio for the other half."""
FORGET = 0.005
"""Share of the drift of draft times that is taken back by each step in which no draft came, where it was told so."""
OUTLIER = 4.0
"""A measurement further than this factor from the prediction is taken at this factor."""


class Ratios:
    """Measured over sample of some entries, each an average of its own while it is fresh, and a common drift else."""

    def __init__(self, size: int):
        self._average = np.ones(size)
        self._seen = np.full(size, -np.inf)
        self._blended = self._average
        self._blended_at = -1

    def blend(self, drift: float, step: int) -> np.ndarray:
        """f64[size], made once per step."""
        if self._blended_at != step:
            fresh = np.exp2((self._seen - step) / FRESH_STEPS)
            self._blended = fresh * self._average + (1 - fresh) * drift
            self._blended_at = step
        return self._blended

    def of(self, entry: int, drift: float, step: int) -> float:
        """One entry of `blend`."""
        fresh = 2.0 ** ((self._seen.item(entry) - step) / FRESH_STEPS)
        return fresh * self._average.item(entry) + (1 - fresh) * drift

    def learn(self, entry: int, before: float, ratio: float, step: int) -> None:
        """before: the entry as it was blended until now."""
        self._average[entry] = before + ENTRY_RATE * (ratio - before)
        self._seen[entry] = step
        self._blended_at = -1


class CostTable:
    """Predicted seconds of verification, catch-up and draft levels. E: limits.token_edges.

    Every time depends on the context load (`types.context_load`) of the step's rows; without one, it is for contexts as
    they have been lately.
    """

    def __init__(self, samples: CostSamples, limits: Limits):
        self.samples = samples
        """As measured at the start; those of a draft service that answers later, by it."""
        self._limits = limits
        self.grid = CostGrid(samples, limits)
        self.predictions = PredictionLog()
        self.served = Served()
        self._edges = limits.token_edges
        self._verify_ratios = [Ratios(len(self._edges)) for _ in self.grid.row_buckets]
        self._draft_ratios = Ratios(max(len(self.grid.level_rows), 1))
        self._steps = 0
        self._verify_drift = 1.0
        self._draft_drift = 1.0
        self._typical_context = float(samples.context)
        self._overhead_s = dict.fromkeys(product((False, True), repeat=2), 0.0)
        """By whether the step has edits, and whether it drafts."""
        self._edits = False
        """Of the last step."""
        self.baseline_s = self.grid.verify_s(1, 1, samples.context)
        """Seconds of one token of one request, without speculation, as the samples have it."""
        self.draft_widths = tuple(sorted({width for _, width in samples.draft_level_s}))
        """Widths that were timed; a width between them costs what the next wider one costs."""

    def retime_draft(self, samples: CostSamples) -> None:
        """Go by the draft's times in these samples from now on: what was learned of it was of others."""
        self.samples = samples
        self.grid = CostGrid(samples, self._limits)
        self.draft_widths = tuple(sorted({width for _, width in samples.draft_level_s}))
        self._draft_ratios = Ratios(max(len(self.grid.level_rows), 1))
        self._draft_drift = 1.0

    @property
    def max_catchup_tokens(self) -> int:
        """Most catch-up tokens of one step: the largest size that was timed, else the largest token edge."""
        return self.grid.catchup_tokens[-1] if self.grid.catchup_tokens else self._edges[-1]

    def context_load(self, context: np.ndarray | None) -> float | None:
        """Of the committed tokens of a step's rows, in their order, i64[R]; None where they are not known, and 0 where
        the samples have no context."""
        if not self.samples.context:
            return 0.0
        return None if context is None else context_load(context, self.samples.context_rows)

    def overhead_s(self, drafting: bool) -> float:
        """Seconds of a step outside draft and verification, averaged over the steps that draft, or that do not. While
        steps have edits of logits, of those, whose second program counts as overhead.

        A kind that was never seen counts as free, so that it is tried.
        """
        return self._overhead_s[self._edits, drafting]

    def verify_s(self, rows: int, load: float | None = None) -> np.ndarray:
        """f64[E], seconds to verify each token edge with `rows` rows, non-decreasing."""
        column = self.grid.row_bucket(rows)
        lines = self.grid.verify
        seconds = lines.base[:, column] + lines.slope[:, column] * self._or_typical(load, rows)
        seconds *= self._verify_ratios[column].blend(self._verify_drift, self._steps)
        return np.maximum.accumulate(seconds, out=seconds)

    def step_at_warm_up_s(self, tokens: int, rows: int, depth: int, width: int, load: float | None = None) -> float:
        """Seconds of a step of so many packed tokens, by the samples alone: a t_spec that never learns."""
        load = self.samples.context * self.grid.groups(rows) if load is None else load
        verify_s = self.grid.verify_s(tokens, rows, load)
        if not depth or not self.grid.level_rows:
            return verify_s
        return verify_s + depth * self.grid.level_of(rows, width, load)

    def level_s(self, rows: int, load: float | None = None) -> np.ndarray:
        """f64[max_width], seconds of one level of the beam search of width 1, 2, ..."""
        ratio = self._draft_ratios.blend(self._draft_drift, self._steps)[bucket_of(self.grid.level_rows, rows)]
        return self.grid.level_s(rows, self._or_typical(load, rows)) * ratio

    def catchup_s(self, tokens: int, load: float | None = None) -> float:
        """Seconds to feed `tokens` tokens to the draft. Without a load: as of so many rows, with contexts as lately."""
        rows = min(tokens, self.grid.row_buckets[-1])
        return self.grid.catchup_s(tokens, self._or_typical(load, rows)) * self._draft_drift

    def forget_draft(self) -> None:
        """A step brought no draft: what was learned of a service's times, waits for what never came perhaps, gives way
        to the samples, so that it is tried again."""
        self._draft_drift += FORGET * (1 - self._draft_drift)

    def observe(self, plan: StepPlan, outcome: StepOutcome, step_s: float, *, drafted: bool = True) -> float:
        """Learn from one step, and log how well it was predicted; step_s: seconds from its plan to its commit. drafted:
        whether any candidates came. Returns seconds as they were predicted of what was run, 0 where nothing was.

        A call of the draft that only catches up is not waited for, so that its time says nothing. Nor does that of a
        verification with edits, of which one does not see what the second program takes: what the step took beside its
        draft and the verification predicted is learned as an overhead of its own. A call of the draft that brought
        nothing teaches how long it was waited for, and never that drafts are quick.
        """
        self._steps += 1
        self._edits = outcome.edited is not None
        rows = plan.num_rows
        load = self.context_load(plan.ctx_len) or 0.0
        self._typical_context += DRIFT_RATE * (load / self.grid.groups(rows) - self._typical_context)
        drafting = plan.draft is not None and plan.draft.depth > 0
        overhead_predicted_s = self.overhead_s(drafting)
        draft_predicted_s = self._observe_draft(plan, outcome.draft_s, load, drafted) if drafting else 0.0
        predicted_s, verify_s = 0.0, outcome.verify_s
        if outcome.verify_s > 0 and outcome.bucket <= self._edges[-1]:
            edge = bisect_left(self._edges, outcome.bucket)
            alone_s = None if self._edits else verify_s
            verify_predicted_s = self._observe_verify(edge, rows, load, alone_s)
            predicted_s = verify_predicted_s + draft_predicted_s + overhead_predicted_s
            verify_s = verify_predicted_s if alone_s is None else alone_s
            self.predictions.add(
                verify=(verify_predicted_s, alone_s or 0.0),
                draft=(draft_predicted_s, outcome.draft_s if drafting else 0.0),
                step=(predicted_s, step_s),
            )
        overhead_s = min(max(step_s - outcome.draft_s - verify_s, 0.0), OUTLIER * self.baseline_s)
        if not self._edits:
            self.served.steps += 1
            self.served.overhead_s += overhead_s
        self._overhead_s[self._edits, drafting] += DRIFT_RATE * (overhead_s - overhead_predicted_s)
        return predicted_s

    def _observe_draft(self, plan: StepPlan, seconds: float, load: float, drafted: bool) -> float:
        """Seconds as they were predicted."""
        draft = plan.draft
        assert draft is not None
        row = bucket_of(self.grid.level_rows, plan.num_rows)
        before = self._draft_ratios.of(row, self._draft_drift, self._steps)
        catchup_s = self.grid.catchup_s(draft.waited_tokens, load)
        levels_s = draft.depth * self.grid.level_of(plan.num_rows, draft.width, load)
        predicted = catchup_s * self._draft_drift + levels_s * before
        if not drafted and seconds <= predicted:
            return predicted
        self.served.draft_s += seconds
        self.served.draft_sampled_s += catchup_s + levels_s
        if seconds > 0 and predicted > 0:
            factor = min(max(seconds / predicted, 1 / OUTLIER), OUTLIER)
            self._draft_ratios.learn(row, before, before * factor, self._steps)
            self._draft_drift *= 1 + ENTRY_RATE * (factor - 1)
        return predicted

    def _observe_verify(self, edge: int, rows: int, load: float, seconds: float | None) -> float:
        """Seconds as they were predicted. seconds: None: not known of the verification alone."""
        column = self.grid.row_bucket(rows)
        ratios = self._verify_ratios[column]
        before = ratios.of(edge, self._verify_drift, self._steps)
        sample_s = self.grid.verify.at(edge, column, load)
        if seconds is None:
            return before * sample_s
        self.served.verify_s += seconds
        self.served.verify_sampled_s += sample_s
        ratio = min(max(seconds / sample_s, before / OUTLIER), before * OUTLIER)
        ratios.learn(edge, before, ratio, self._steps)
        rate = max(DRIFT_RATE, 1 / (FIRST_STEPS + self._steps))
        self._verify_drift += rate * (ratio - self._verify_drift)
        return before * sample_s

    def _or_typical(self, load: float | None, rows: int) -> float:
        return self._typical_context * self.grid.groups(rows) if load is None else load
