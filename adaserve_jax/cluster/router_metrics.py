"""Prometheus metrics of a router, documented in docs/cluster.md. Labels hold names of targets, not what users write."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from adaserve_jax.cluster.targets import TargetSet

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class RouterMetrics:
    """In a registry of its own; used from the event loop only."""

    def __init__(self, targets: TargetSet):
        self.registry = CollectorRegistry()
        self.registry.register(_TargetCollector(targets))
        self.answers = Counter(
            "adaserve_router_answers", "Requests answered, by status; 499: the client went away first.", ("status",),
            registry=self.registry,
        )  # fmt: skip
        self.retries = Counter(
            "adaserve_router_retries", "Attempts at another target, by the reason why the one before brought nothing.",
            ("reason",), registry=self.registry,
        )  # fmt: skip
        self.choosing = Histogram(
            "adaserve_router_choosing_seconds", "From a request's last byte until a target was chosen.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _TargetCollector(Collector):
    """Reads the targets at each scrape."""

    def __init__(self, targets: TargetSet):
        self._targets = targets

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("adaserve_router_target_up", "1 while the target gets requests.", labels=("target",))
        flying = GaugeMetricFamily(
            "adaserve_router_in_flight", "Requests at the target that came from here.", labels=("target",)
        )
        counters = [
            (CounterMetricFamily(f"adaserve_router_{name}", text, labels=("target",)), name)
            for name, text in (
                ("requests", "Requests sent to the target, each attempt counted."),
                ("ejections", "Times that the target was found unfit after it was fit."),
                ("cuts", "Streams that the target did not end."),
            )
        ]
        for target in self._targets:
            up.add_metric((target.name,), int(target.available))
            flying.add_metric((target.name,), len(target.flights))
            for family, name in counters:
                family.add_metric((target.name,), getattr(target, name))
        yield from (up, flying, *(family for family, _ in counters))

    def describe(self) -> list[Metric]:
        return []
