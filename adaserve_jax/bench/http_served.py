"""What a server of this package says of a request in its last event, as the metrics of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from adaserve_jax.types import RequestMetrics

MOST_MS = 1e9
"""No request waits longer."""


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
        first_scheduled_s=queue_ms / 1e3 if _is_time(queue_ms) else None,
        verify_steps=_count(speculative.get("verify_steps")),
        accepted_tokens=_count(speculative.get("accepted_tokens")),
        slo_feasible=feasible if isinstance(feasible, bool) else None,
    )


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_MS


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
