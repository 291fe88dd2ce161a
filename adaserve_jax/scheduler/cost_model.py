"""Cost model: predicted seconds of a step, from measured samples that every served step corrects.

A time is a line in the context load of the step's rows. What is learned is the ratio of measured to sampled time, so
that one table serves short and long contexts alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import CostSamples, Limits, StepOutcome, StepPlan, context_load, scaled_samples

LATEST = 4096
"""Steps whose predictions are kept."""
KINDS = ("verify", "draft", "step")
"""Times whose predictions are kept: of the target's forward, of drafting, of the whole step."""
ENTRY_RATE = 0.2
"""Weight of a new ratio (measured over sample) in its entry's moving average, and in the draft's drift."""
DRIFT_RATE = 0.05
"""Weight of a new value in the drift of verification, which stands in for entries not seen lately, in the typical
context and in the overheads."""
FIRST_STEPS = 4
"""Steps that the samples count for in the drift ratio while fewer than 1 / DRIFT_RATE steps were seen. The ratio is
a plain average at first, so that an engine on a machine busier than when it was timed soon plans by the times that
it sees.
"""
FRESH_STEPS = 200
"""Steps after which an entry's own average counts for half and the drift for the other half."""
FORGET = 0.005
"""Share of the drift of draft times that a step without an answer from a draft service takes back."""
OUTLIER = 4.0
"""Factor from the prediction to which a measurement is clipped."""


@dataclass(frozen=True, eq=False)
class Lines:
    """Times that are linear in the context load: seconds = base + slope * load. base, slope: f64 of one shape."""

    base: np.ndarray
    slope: np.ndarray

    def at(self, row: int, column: int, load: float) -> float:
        """Return the seconds of one line; both arrays have two axes."""
        return self.base.item(row, column) + self.slope.item(row, column) * load


class CostGrid:
    """Sampled seconds by token edge, rows, width and context load, without corrections. E: limits.token_edges."""

    def __init__(self, samples: CostSamples, limits: Limits):
        """Fit the lines. Raises ConfigError if there is no verify time, or one that is not above 0."""
        if not samples.verify_s:
            raise ConfigError("the cost table needs at least one verify time; run the executor's warm_up first")
        self._samples = samples
        self._edges = limits.token_edges
        self.row_buckets = sorted({rows for _, rows in samples.verify_s})
        self.verify = self._verify()
        self.catchup_tokens = sorted(samples.catchup_s)
        self._catchup = [
            self._line(samples.catchup_s, samples.catchup_per_context_s, tokens, min(tokens, self.row_buckets[-1]))
            for tokens in self.catchup_tokens
        ]
        self.level_rows = sorted({rows for rows, _ in samples.draft_level_s})
        self._levels = self._level(max(limits.max_width, 1))

    def row_bucket(self, rows: int) -> int:
        """Return the index of the smallest timed number of rows that holds `rows`, or of the largest."""
        return bucket_of(self.row_buckets, rows)

    def groups(self, rows: int) -> int:
        """Return the number of groups in which rows read their contexts."""
        return -(-rows // self._samples.context_rows)

    def verify_s(self, tokens: int, rows: int, load: float) -> float:
        """Return the seconds to verify a step of so many packed tokens."""
        edge, column = min(bisect_left(self._edges, tokens), len(self._edges) - 1), self.row_bucket(rows)
        return self.verify.at(edge, column, load)

    def level_s(self, rows: int, load: float) -> np.ndarray:
        """Return f64[max_width], seconds of one level of the beam search of width 1, 2, ..."""
        row = bucket_of(self.level_rows, rows)
        return self._levels.base[row] + self._levels.slope[row] * load

    def level_of(self, rows: int, width: int, load: float) -> float:
        """Return the seconds of one level of that width."""
        return self._levels.at(bucket_of(self.level_rows, rows), width - 1, load)

    def catchup_s(self, tokens: int, load: float) -> float:
        """Return the seconds to feed `tokens` tokens to the draft; beyond the largest timed size, in proportion."""
        if tokens <= 0 or not self.catchup_tokens:
            return 0.0
        index = bucket_of(self.catchup_tokens, tokens)
        base, slope = self._catchup[index]
        return (base + slope * load) * max(1.0, tokens / self.catchup_tokens[index])

    def _line(self, seconds: Mapping, slopes: Mapping, key: object, rows: int) -> tuple[float, float]:
        """Return base and slope of one sample, which was taken with `context` tokens in each of `rows` rows."""
        slope = slopes.get(key, 0.0)
        base = seconds[key] - slope * self._samples.context * self.groups(rows)
        if base < 0:
            raise ConfigError(f"the times of {key} must not be below 0 seconds without context, got {base:g}")
        return base, slope

    def _verify(self) -> Lines:
        """Return the lines [E, row buckets]; edges that were not timed are interpolated."""
        samples, shape = self._samples, (len(self._edges), len(self.row_buckets))
        grid = Lines(np.empty(shape), np.empty(shape))
        for column, rows in enumerate(self.row_buckets):
            timed = sorted(key for key in samples.verify_s if key[1] == rows)
            tokens = [key[0] for key in timed]
            lines = [self._line(samples.verify_s, samples.verify_per_context_s, key, min(*key)) for key in timed]
            grid.base[:, column] = np.interp(self._edges, tokens, [base for base, _ in lines])
            grid.slope[:, column] = np.interp(self._edges, tokens, [slope for _, slope in lines])
        if not (grid.base > 0).all():
            raise ConfigError("every verify time must be above 0 seconds; run the executor's warm_up again")
        return grid

    def _level(self, max_width: int) -> Lines:
        """Return the lines [rows, max_width], from the next wider width that was timed; zeros if nothing was."""
        samples, shape = self._samples, (max(len(self.level_rows), 1), max_width)
        grid = Lines(np.zeros(shape), np.zeros(shape))
        for index, rows in enumerate(self.level_rows):
            widths = sorted(width for r, width in samples.draft_level_s if r == rows)
            for width in range(1, max_width + 1):
                key = rows, widths[bucket_of(widths, width)]
                line = self._line(samples.draft_level_s, samples.level_per_context_s, key, rows)
                grid.base[index, width - 1], grid.slope[index, width - 1] = line
        return grid


def bucket_of(buckets: list[int], value: int) -> int:
    """Return the index of the smallest bucket that holds `value`, or of the largest."""
    return max(min(bisect_left(buckets, value), len(buckets) - 1), 0)


@dataclass(frozen=True)
class PredictionError:
    """Absolute relative error, |predicted - measured| / measured, over `steps` steps; None if none was measured."""

    steps: int
    median: float | None
    p90: float | None

    @classmethod
    def of(cls, predicted_s: np.ndarray, measured_s: np.ndarray) -> PredictionError:
        """Return the error over the steps whose measured time is above 0."""
        there = measured_s > 0
        if not there.any():
            return cls(0, None, None)
        error = np.abs(predicted_s[there] / measured_s[there] - 1)
        return cls(int(there.sum()), float(np.median(error)), float(np.quantile(error, 0.9)))


@dataclass
class TimesOfKind:
    """Steps of one kind, their summed seconds, and what the samples predict for them."""

    steps: int = 0
    seconds: float = 0.0
    sampled_s: float = 0.0

    def count(self, seconds: float, sampled_s: float = 0.0) -> None:
        """Count one step."""
        self.steps += 1
        self.seconds += seconds
        self.sampled_s += sampled_s

    def add(self, other: TimesOfKind) -> None:
        """Count the other's steps too."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.sampled_s += other.sampled_s


@dataclass(frozen=True)
class ServedTimes:
    """Times of served steps by kind, beside the samples, each of which is the least time of a program alone.

    verify: by (token edge, rows). overhead: outside draft and verification, which has no sample, by (drafts, rows).
    rows: the smallest timed number that holds the step's.
    """

    verify: dict[tuple[int, int], TimesOfKind] = field(default_factory=lambda: defaultdict(TimesOfKind))
    draft: TimesOfKind = field(default_factory=TimesOfKind)
    overhead: dict[tuple[bool, int], TimesOfKind] = field(default_factory=lambda: defaultdict(TimesOfKind))

    def add(self, other: ServedTimes) -> None:
        """Count the other's steps too."""
        self.draft.add(other.draft)
        for size, times in other.verify.items():
            self.verify[size].add(times)
        for kind, times in other.overhead.items():
            self.overhead[kind].add(times)


def errors_of(seconds: np.ndarray) -> dict[str, PredictionError]:
    """Return the errors by kind. seconds: f64[steps, KINDS, 2]."""
    return {kind: PredictionError.of(*seconds[:, index].T) for index, kind in enumerate(KINDS)}


class DriftRatios:
    """Ratios of measured to sampled time: each entry has an average of its own while it is fresh, and a common drift
    else.
    """

    def __init__(self, size: int):
        self._average = np.ones(size)
        self._seen = np.full(size, -np.inf)
        self._blended = self._average
        self._blended_at = -1

    def blend(self, drift: float, step: int) -> np.ndarray:
        """Return all entries as of `step`, f64[size]; computed once per step."""
        if self._blended_at != step:
            fresh = np.exp2((self._seen - step) / FRESH_STEPS)
            self._blended = fresh * self._average + (1 - fresh) * drift
            self._blended_at = step
        return self._blended

    def of(self, entry: int, drift: float, step: int) -> float:
        """Return one entry of `blend`."""
        fresh = 2.0 ** ((self._seen.item(entry) - step) / FRESH_STEPS)
        return fresh * self._average.item(entry) + (1 - fresh) * drift

    def learn(self, entry: int, before: float, ratio: float, step: int) -> None:
        """Take in a ratio. before: the entry as blended until now."""
        self._average[entry] = before + ENTRY_RATE * (ratio - before)
        self._seen[entry] = step
        self._blended_at = -1


class CostTable:
    """Predicted seconds of verification, catch-up and draft levels, corrected by served steps. E: limits.token_edges.

    Every time depends on the context load (`types.context_load`) of the step's rows; without one, contexts are assumed
    to be as long as they were lately.
    """

    def __init__(self, samples: CostSamples, limits: Limits, *, drafts_cost: bool = True):
        """Set up from samples. drafts_cost: False where text already seen is the draft, so that a step that drafts
        takes what one of the same size without takes, whatever draft is loaded."""
        self._drafts_cost = drafts_cost
        self.samples = self._charged(samples)
        """Samples as measured at the start; after `retime_draft`, with the draft's times of a service."""
        self._limits = limits
        self.grid = CostGrid(self.samples, limits)
        self._predictions: deque[tuple[tuple[float, float], ...]] = deque(maxlen=LATEST)
        self.served = ServedTimes()
        self._edges = limits.token_edges
        self._verify_ratios = [DriftRatios(len(self._edges)) for _ in self.grid.row_buckets]
        self._draft_ratios = DriftRatios(max(len(self.grid.level_rows), 1))
        self._steps = 0
        self._verify_drift = 1.0
        self._draft_drift = 1.0
        self._typical_context = float(samples.context)
        self._overhead_s = dict.fromkeys(product((False, True), repeat=2), 0.0)
        """Seconds outside draft and verification, by whether the step has edits and whether it drafts."""
        self._edits = False
        """True if the last step had edits."""
        self.baseline_s = self.grid.verify_s(1, 1, samples.context)
        """Sampled seconds of one token of one sequence, without speculation."""
        self.draft_widths = tuple(sorted({width for _, width in samples.draft_level_s}))
        """Widths that were timed; a width between them costs as much as the next wider one."""

    def retime_draft(self, samples: CostSamples) -> None:
        """Use the draft's times in these samples from now on, and forget what was learned about the old ones."""
        self.samples = self._charged(samples)
        self.grid = CostGrid(self.samples, self._limits)
        self.draft_widths = tuple(sorted({width for _, width in samples.draft_level_s}))
        self._draft_ratios = DriftRatios(max(len(self.grid.level_rows), 1))
        self._draft_drift = 1.0

    def _charged(self, samples: CostSamples) -> CostSamples:
        return samples if self._drafts_cost else scaled_samples(samples, verify=1.0, draft=0.0)

    def predictions(self) -> np.ndarray:
        """Return f64[steps, KINDS, 2], predicted and measured seconds of the last LATEST steps, oldest first.

        Predicted before the step was learned from; measured 0 means that there was none.
        """
        return np.array(self._predictions, np.float64).reshape(-1, len(KINDS), 2)

    @property
    def max_catchup_tokens(self) -> int:
        """Most catch-up tokens of one step: the largest size that was timed, else the largest token edge."""
        return self.grid.catchup_tokens[-1] if self.grid.catchup_tokens else self._edges[-1]

    def context_load(self, context: np.ndarray | None) -> float | None:
        """Return the context load of a step's rows (i64[R] committed tokens, in order).

        None if `context` is None; 0 if the samples have no context.
        """
        if not self.samples.context:
            return 0.0
        return None if context is None else context_load(context, self.samples.context_rows)

    def overhead_s(self, drafting: bool) -> float:
        """Return the average seconds outside draft and verification, and before them since the last commit, of the
        steps that draft, or of those that do not.

        While steps have edits of logits it is that of steps with edits, whose second program counts as overhead. A kind
        that was never seen counts as free, so that it is tried.
        """
        return self._overhead_s[self._edits, drafting and self._drafts_cost]

    def verify_s(self, rows: int, load: float | None = None) -> np.ndarray:
        """Return f64[E], seconds to verify each token edge with `rows` rows, non-decreasing."""
        column = self.grid.row_bucket(rows)
        lines = self.grid.verify
        seconds = lines.base[:, column] + lines.slope[:, column] * self._or_typical(load, rows)
        seconds *= self._verify_ratios[column].blend(self._verify_drift, self._steps)
        return np.maximum.accumulate(seconds, out=seconds)

    def step_at_warm_up_s(self, tokens: int, rows: int, depth: int, width: int, load: float | None = None) -> float:
        """Return the seconds of a step of so many packed tokens by the samples alone: a t_spec that never learns."""
        edge = min(bisect_left(self._edges, tokens), len(self._edges) - 1)
        return float(self.steps_at_warm_up_s(rows, depth, width, load)[edge])

    def steps_at_warm_up_s(self, rows: int, depth: int, width: int, load: float | None = None) -> np.ndarray:
        """Return f64[E], `step_at_warm_up_s` of every token edge."""
        load = self.samples.context * self.grid.groups(rows) if load is None else load
        lines, column = self.grid.verify, self.grid.row_bucket(rows)
        verify_s = lines.base[:, column] + lines.slope[:, column] * load
        if not depth or not self.grid.level_rows:
            return verify_s
        return verify_s + depth * self.grid.level_of(rows, width, load)

    def level_s(self, rows: int, load: float | None = None) -> np.ndarray:
        """Return f64[max_width], seconds of one level of the beam search of width 1, 2, ..."""
        ratio = self._draft_ratios.blend(self._draft_drift, self._steps)[bucket_of(self.grid.level_rows, rows)]
        return self.grid.level_s(rows, self._or_typical(load, rows)) * ratio

    def catchup_s(self, tokens: int, load: float | None = None) -> float:
        """Return the seconds to feed `tokens` tokens to the draft; without a load, as of so many rows with typical
        contexts.
        """
        rows = min(tokens, self.grid.row_buckets[-1])
        return self.grid.catchup_s(tokens, self._or_typical(load, rows)) * self._draft_drift

    def forget_draft(self) -> None:
        """Move the draft's times back towards the samples after a step without a draft.

        What was learned of a draft service may be waits for answers that never came; forgetting lets it be tried again.
        """
        self._draft_drift += FORGET * (1 - self._draft_drift)

    def observe(self, plan: StepPlan, outcome: StepOutcome, step_s: float, *, drafted: bool = True) -> float:
        """Learn from one step and log how well it was predicted.

        A draft call that only catches up is not waited for, so its time is ignored. So is the time of a verification
        with edits, which includes a second program; what such a step took beyond its draft and the predicted
        verification is learned as an overhead of its own. A draft call without candidates teaches how long it was
        waited for, never that drafts are quick.

        step_s: as of `Feedback`. drafted: any candidates came. Returns the predicted seconds of what was run; 0 if
        nothing was predicted.
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
            verify, step = (verify_predicted_s, alone_s or 0.0), (predicted_s, step_s)
            draft = draft_predicted_s, outcome.draft_s if drafting else 0.0
            self._predictions.append((verify, draft, step))
        overhead_s = min(max(step_s - outcome.draft_s - verify_s, 0.0), OUTLIER * self.baseline_s)
        if not self._edits:
            timed_rows = self.grid.row_buckets[self.grid.row_bucket(rows)]
            self.served.overhead[drafting, timed_rows].count(overhead_s)
        self._overhead_s[self._edits, drafting] += DRIFT_RATE * (overhead_s - overhead_predicted_s)
        return predicted_s

    def _observe_draft(self, plan: StepPlan, seconds: float, load: float, drafted: bool) -> float:
        """Learn the draft's time; return the seconds that were predicted."""
        draft = plan.draft
        assert draft is not None
        row = bucket_of(self.grid.level_rows, plan.num_rows)
        before = self._draft_ratios.of(row, self._draft_drift, self._steps)
        catchup_s = self.grid.catchup_s(draft.waited_tokens, load)
        levels_s = draft.depth * self.grid.level_of(plan.num_rows, draft.width, load)
        predicted = catchup_s * self._draft_drift + levels_s * before
        if not drafted and seconds <= predicted:
            return predicted
        self.served.draft.count(seconds, catchup_s + levels_s)
        if seconds > 0 and predicted > 0:
            factor = min(max(seconds / predicted, 1 / OUTLIER), OUTLIER)
            self._draft_ratios.learn(row, before, before * factor, self._steps)
            self._draft_drift *= 1 + ENTRY_RATE * (factor - 1)
        return predicted

    def _observe_verify(self, edge: int, rows: int, load: float, seconds: float | None) -> float:
        """Learn the verification's time; return the seconds that were predicted. seconds: None if not known by
        itself.
        """
        column = self.grid.row_bucket(rows)
        ratios = self._verify_ratios[column]
        before = ratios.of(edge, self._verify_drift, self._steps)
        sample_s = self.grid.verify.at(edge, column, load)
        if seconds is None:
            return before * sample_s
        self.served.verify[self._edges[edge], self.grid.row_buckets[column]].count(seconds, sample_s)
        ratio = min(max(seconds / sample_s, before / OUTLIER), before * OUTLIER)
        ratios.learn(edge, before, ratio, self._steps)
        rate = max(DRIFT_RATE, 1 / (FIRST_STEPS + self._steps))
        self._verify_drift += rate * (ratio - self._verify_drift)
        return before * sample_s

    def _or_typical(self, load: float | None, rows: int) -> float:
        return self._typical_context * self.grid.groups(rows) if load is None else load
