"""What a server of this package says of a request in its last event, as the metrics of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaserve_jax.types import RequestMetrics


def served_metrics(said: Mapping[str, Any]) -> RequestMetrics:
    """Counts of verifications and the wait before the first of them, `first_scheduled_s` counting from an arrival at 0.
    What is absent, or no number, is as if nothing was said."""
    speculative = said.get("speculative")
    speculative = speculative if isinstance(speculative, Mapping) else {}
    slo = said.get("slo")
    feasible = slo.get("feasible") if isinstance(slo, Mapping) else None
    queue_ms = said.get("queue_time_ms")
    return RequestMetrics(
        0.0,
        first_scheduled_s=queue_ms / 1e3 if isinstance(queue_ms, int | float) else None,
        verify_steps=_count(speculative.get("verify_steps")),
        accepted_tokens=_count(speculative.get("accepted_tokens")),
        slo_feasible=feasible if isinstance(feasible, bool) else None,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
