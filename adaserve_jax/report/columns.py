"""Request records as columns of numbers, so that a figure of thousands of requests is a product of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.results.records import RequestRecord, arrival_order
from adaserve_jax.results.schema import ALL_CLASSES

WITH_TARGET, WITHOUT_TARGET = "with a target", "without a target"
"""Names that select requests by what they carry, as the name of a class selects by class."""


@dataclass(frozen=True, eq=False)
class Columns:
    """f64[N] each, nan for what a record does not have; sizes: records of each repeat, one after the other.

    wall_s: of the repeat, divided among its records, so that its sum is the wall time of whatever repeats are held.
    tpot_over: TPOT / target of requests that carry one; 0 of a single token, infinite of those that did not finish,
    which meet no target. ttft_over: likewise.
    """

    sizes: tuple[int, ...]
    slo_class: np.ndarray
    due_s: np.ndarray
    wall_s: np.ndarray
    finished: np.ndarray
    slo_met: np.ndarray
    tpot_met: np.ndarray
    ttft_met: np.ndarray
    output_tokens: np.ndarray
    queue_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    tpot_slo_s: np.ndarray
    ttft_slo_s: np.ndarray
    tpot_over: np.ndarray
    ttft_over: np.ndarray
    verify_steps: np.ndarray
    drafted_tokens: np.ndarray
    accepted_tokens: np.ndarray

    @classmethod
    def of(cls, repeats: Sequence[tuple[Sequence[RequestRecord], float]]) -> Columns:
        """repeats: records and wall time, seconds, of each. Requests of a repeat are in the order of their arrival."""
        records = [record for each, _ in repeats for record in sorted(each, key=arrival_order)]
        walls = [wall_s / len(each) for each, wall_s in repeats for _ in each]
        done = [record.status == "finished" for record in records]
        return cls(
            sizes=tuple(len(each) for each, _ in repeats),
            slo_class=np.array([record.slo_class for record in records], dtype=np.str_),
            wall_s=_numbers(walls),
            finished=_numbers(done),
            tpot_over=_over(done, [(r.tpot_s, r.tpot_slo_s) for r in records], one_token=0.0),
            ttft_over=_over(done, [(r.ttft_s, r.ttft_slo_s) for r in records], one_token=np.inf),
            **{name: _numbers(getattr(record, name) for record in records) for name in _SAME_NAME},
        )

    def mask(self, slo_class: str) -> np.ndarray:
        """bool[N]: the requests of a class, of all, or those with or without a target."""
        if slo_class == ALL_CLASSES:
            return np.ones(len(self.slo_class), bool)
        carries = ~np.isnan(self.slo_met)
        if slo_class in (WITH_TARGET, WITHOUT_TARGET):
            return carries if slo_class == WITH_TARGET else ~carries
        return self.slo_class == slo_class

    def same_requests(self, other: Columns) -> bool:
        """Whether both hold the same arrivals in the same order, so that one system can be paired with the other."""
        if self.sizes != other.sizes or not np.array_equal(self.slo_class, other.slo_class):
            return False
        return bool(np.allclose(self.due_s, other.due_s, rtol=0, atol=DUE_S))


DUE_S = 1e-3
"""Arrivals that were due within this of each other are the same one: schedules are stored rounded."""
_SAME_NAME = (
    "due_s", "slo_met", "tpot_met", "ttft_met", "output_tokens", "queue_s", "ttft_s", "tpot_s", "tpot_slo_s",
    "ttft_slo_s", "verify_steps", "drafted_tokens", "accepted_tokens",
)  # fmt: skip


def _numbers(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _over(done: Sequence[bool], pairs: Sequence[tuple[float | None, float | None]], one_token: float) -> np.ndarray:
    """Measured over target; one_token: of a request that finished without the measured time."""
    values: list[float | None] = []
    for finished, (measured_s, target_s) in zip(done, pairs, strict=True):
        if target_s is None:
            values.append(None)
        elif not finished:
            values.append(np.inf)
        else:
            values.append(one_token if measured_s is None else measured_s / target_s)
    return _numbers(values)
