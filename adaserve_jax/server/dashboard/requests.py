"""Choices that ended recently, as columns, and the figures of a window of them: attainment, goodput, times, causes.

docs/metrics.md has the definitions. A choice is judged once, when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.results.records import CAUSES, Cause, RequestRecord, slowest_part, status_of, violation_cause
from adaserve_jax.server.metrics import RATIO_EDGES
from adaserve_jax.server.observers import EndedChoice

CAPACITY = 2**15
"""Least number of choices kept; the most is twice that. A window in which more ended covers less time, and says so."""
ALL = "all"
_NONE = -1
_COLUMNS = {
    "ended_s": "f8", "slo_class": "i2", "met": "i1", "cancelled": "?", "cause": "i1", "output": "i4", "verify": "i4",
    "accepted": "i4", "ttft_s": "f8", "tpot_s": "f8", "over": "f8",
}  # fmt: skip


@dataclass(frozen=True)
class Attainment:
    """Choices of one class that ended, that carried a target, that met all of theirs, and that their client cancelled.

    with_target: without the cancelled ones. attainment: met / with_target; None where that is 0.
    """

    slo_class: str
    requests: int
    with_target: int
    met: int
    attainment: float | None
    cancelled: int


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ChoiceWindow:
    """Figures of the choices that ended within the last `window_s` seconds, of which `covered_s` were observed.

    attainment: all classes together, then each class. over_target: choices by TPOT / target, up to each of RATIO_EDGES
    and above the last one. causes: choices that missed a target, by cause.
    """

    window_s: float
    covered_s: float
    attainment: list[Attainment]
    goodput_tps: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    over_target: list[int]
    mean_accepted: float | None
    causes: dict[str, int]


def record_of(choice: EndedChoice) -> RequestRecord:
    """Return the choice's record, as results judge it."""
    return RequestRecord.of(
        choice.measured, run_id="", policy="", rate_rps=0.0, request_id=choice.origin.request_id,
        status=status_of(choice.ending, choice.error_code), error_code=choice.error_code,
    )  # fmt: skip


class ChoiceHistory:
    """Newest choices, oldest first. Times are on the caller's clock, which must not run backwards."""

    def __init__(self, classes: Sequence[str], capacity: int = CAPACITY):
        self._classes = {name: number for number, name in enumerate(classes)}
        self._started_s = math.inf
        self._capacity = capacity
        self._columns = {name: np.zeros(2 * capacity, kind) for name, kind in _COLUMNS.items()}
        self._held = self._count = 0
        self._drafted = self._accepted = 0

    def __len__(self) -> int:
        """Return the number of choices that ended since the start."""
        return self._count

    def begin(self, now_s: float) -> None:
        """Begin to observe, unless that began before; windows cover no earlier time."""
        self._started_s = min(self._started_s, now_s)

    def add(self, now_s: float, record: RequestRecord) -> Cause | None:
        """Add a choice that ended now. Return why it missed a target, given the acceptance rate of all so far."""
        self.begin(now_s)
        self._drafted += record.drafted_tokens
        self._accepted += record.accepted_tokens
        cause = violation_cause(record, acceptance_rate=self._accepted / self._drafted if self._drafted else 0.0)
        target_s, tpot_s = slowest_part(record.tpot_parts)
        over = tpot_s / target_s if tpot_s is not None and target_s else np.nan
        if self._held == 2 * self._capacity:
            for column in self._columns.values():  # the newer half moves to the front: contiguous and in order
                column[: self._capacity] = column[self._capacity :]
            self._held = self._capacity
        row = (
            now_s, self._classes.setdefault(record.slo_class, len(self._classes)),
            _NONE if record.slo_met is None else record.slo_met, record.status == "cancelled",
            _NONE if cause is None else CAUSES.index(cause),
            record.output_tokens, record.verify_steps, record.accepted_tokens,
            _nan_if_none(record.ttft_s), _nan_if_none(record.tpot_s), over,
        )  # fmt: skip
        for column, value in zip(self._columns.values(), row, strict=True):
            column[self._held] = value
        self._held += 1
        self._count += 1
        return cause

    def window(self, now_s: float, window_s: float) -> ChoiceWindow:
        """Return the figures of the last `window_s` seconds."""
        ended_s = self._columns["ended_s"][: self._held]
        since_s = max(now_s - window_s, min(self._started_s, now_s))
        if self._count > self._held:
            since_s = max(since_s, float(ended_s[0]))
        first = int(np.searchsorted(ended_s, since_s))
        rows = {name: column[first : self._held] for name, column in self._columns.items()}
        covered_s = now_s - since_s
        met_tokens = int(rows["output"][rows["met"] == 1].sum())
        missed = np.bincount(rows["cause"][rows["cause"] != _NONE], minlength=len(CAUSES))
        verified = int(rows["verify"].sum())
        by_class = [_attained(name, rows, rows["slo_class"] == i) for name, i in self._classes.items()]
        return ChoiceWindow(
            window_s=window_s,
            covered_s=round(covered_s, 3),
            attainment=[_attained(ALL, rows, slice(None)), *by_class],
            goodput_tps=round(met_tokens / covered_s, 3) if covered_s > 0 else 0.0,
            ttft_ms=_percentiles_ms(rows["ttft_s"]),
            tpot_ms=_percentiles_ms(rows["tpot_s"]),
            over_target=_histogram(rows["over"]),
            mean_accepted=round(int(rows["accepted"].sum()) / verified, 4) if verified else None,
            causes={name: int(count) for name, count in zip(CAUSES, missed, strict=True) if count},
        )


def _nan_if_none(seconds: float | None) -> float:
    return np.nan if seconds is None else seconds


def _attained(name: str, rows: Mapping[str, np.ndarray], chosen: np.ndarray | slice) -> Attainment:
    met, cancelled = rows["met"][chosen], int(rows["cancelled"][chosen].sum())
    carried, kept = int((met != _NONE).sum()), int((met == 1).sum())
    return Attainment(name, len(met), carried, kept, round(kept / carried, 6) if carried else None, cancelled)


def _histogram(over: np.ndarray) -> list[int]:
    """Count the values up to and including each edge and above the one before, then those above the last."""
    known = over[~np.isnan(over)]
    return np.bincount(np.searchsorted(RATIO_EDGES, known, side="left"), minlength=len(RATIO_EDGES) + 1).tolist()


def _percentiles_ms(seconds: np.ndarray) -> Percentiles | None:
    """Return linearly interpolated percentiles in milliseconds with three decimals; None without values."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return None
    return Percentiles(*(round(float(value) * 1e3, 3) for value in np.percentile(known, (50, 90, 99))))
