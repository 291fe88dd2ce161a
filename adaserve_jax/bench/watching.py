"""What a bench run tells while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.bench.plan import Point
from adaserve_jax.results.schema import ResultRow


class Watch:
    """Notified of a run's progress; this one ignores it."""

    def opened(self, todo: Sequence[Point], done: Sequence[ResultRow]) -> None:
        """What will be measured; rows of what already was."""

    def begins(self, point: Point) -> None:
        """Its warm-up begins."""

    def in_flight(self, requests: int) -> None:
        """So many requests are in flight. From any thread, often: it must be quick."""

    def ended(self, point: Point, rows: Sequence[ResultRow], notes: Sequence[str]) -> None:
        """Its rows are written. notes: sentences of the engine."""
