"""What a client notes of one request, whoever it asks, and the record that comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.types import RequestMetrics


@dataclass(frozen=True)
class AtPoint:
    """What the records of a point have in common. start_s: time.monotonic at the loop's start. baseline_s: what
    relative targets multiply."""

    run_id: str
    point: str
    policy: str
    rate_rps: float
    start_s: float
    baseline_s: float


class Probe(ABC):
    """One request, from when it was due; times are time.monotonic. token_times_s: of each output token."""

    def __init__(self, due_at_s: float) -> None:
        self.due_at_s = self.submitted_at_s = due_at_s
        self.ended_at_s: float | None = None
        self.token_times_s: list[float] = []

    @property
    def late_s(self) -> float:
        """How much later than due it was submitted."""
        return max(0.0, self.submitted_at_s - self.due_at_s)

    @property
    def ended(self) -> bool:
        return self.ended_at_s is not None

    @abstractmethod
    def record(self, at: AtPoint) -> RequestRecord:
        """Its line of requests.jsonl."""

    def _record_of(
        self, metrics: RequestMetrics, at: AtPoint, request_id: str, status: Status, code: str | None
    ) -> RequestRecord:
        times = self.token_times_s
        return RequestRecord.of(
            metrics,
            run_id=at.run_id,
            point=at.point,
            policy=at.policy,
            rate_rps=at.rate_rps,
            request_id=request_id,
            status=status,
            error_code=code,
            due_s=round(self.due_at_s - at.start_s, 6),
            late_s=round(self.late_s, 6),
            token_offsets_s=tuple(round(t - times[0], 6) for t in times),
        )
