"""Prometheus metrics of the draft services that an engine asks; 0, and no service, where it asks none.

Labels are addresses, which the operator gave, and states of breakers: nothing that a user wrote, or a service.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adaserve_jax.stats import BREAKER_STATES, DrafterStats

TOTALS = {
    "rounds": ("rounds", "Steps that asked draft services for trees."),
    "trees": ("trees", "Trees that came in time."),
    "late": ("late", "Trees that did not: their rows were decoded without."),
    "stale": ("stale", "Answers to what was no longer asked."),
    "resyncs": ("resyncs", "Sessions sent anew because the service asked for it."),
    "refused": ("refused", "Refusals, of sessions and of this engine."),
    "invalid": ("invalid", "Answers that make no sense."),
    "lost": ("lost", "Streams to services that ended."),
    "breaker_opens": ("breaker_opens", "Times that a service was left alone for a while."),
    "moved": ("moved", "Sessions that went to another service."),
    "errors": ("errors", "Steps whose drafting failed on this side; the log has the first."),
    "wait_seconds": ("wait_s", "Seconds of the step loop spent waiting for services."),
    "round_seconds": ("round_s", "Seconds until the last tree of each round was there."),
}
"""Since the start: metric, field of DrafterStats, meaning."""
SERVICE_GAUGES = {
    "sessions": ("sessions", "Sessions of this engine at the service."),
    "busy": ("busy", "Share of the last seconds that the service worked, as it said last."),
    "queue_seconds": ("queue_s", "Seconds of work that wait at the service, as it said last."),
}
"""By service, as of now: metric, field of ServiceState, meaning."""


def drafter_metrics(stats: DrafterStats | None) -> Iterator[Metric]:
    """What DrafterStats says, as metric families."""
    stats = stats or DrafterStats()
    for name, (field, text) in TOTALS.items():
        yield CounterMetricFamily(f"adaserve_drafter_{name}", text, getattr(stats, field))
    breaker = GaugeMetricFamily(
        "adaserve_drafter_breaker", "1 for the state that the service's breaker is in (closed, half_open, open).",
        labels=("service", "state"),
    )  # fmt: skip
    for service, state in stats.services.items():
        for name in BREAKER_STATES:
            breaker.add_metric((service, name), int(state.breaker == name))
    yield breaker
    for name, (field, text) in SERVICE_GAUGES.items():
        gauge = GaugeMetricFamily(f"adaserve_drafter_{name}", text, labels=("service",))
        for service, state in stats.services.items():
            gauge.add_metric((service,), getattr(state, field))
        yield gauge
