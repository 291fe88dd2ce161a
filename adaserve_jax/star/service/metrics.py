"""Prometheus metrics of a draft service, read at each scrape. Documented in docs/star.md.

No label ever holds anything that a target said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from adaserve_jax.star.service.model import DraftModel
from adaserve_jax.star.service.server import Audit
from adaserve_jax.star.service.session import ROWS_EDGES
from adaserve_jax.star.service.worker import Worker

PREFIX = "adaserve_draft_service_"


class ServiceCollector(Collector):
    """Reads worker, audit and model; numbers are at most a moment old."""

    def __init__(self, worker: Worker, audit: Audit, model: DraftModel) -> None:
        self._worker, self._audit, self._model = worker, audit, model

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._labelled()
        yield self._rows()

    def _gauges(self) -> Iterator[Metric]:
        seen, audit, pool = self._worker.snapshot, self._audit, self._model.pool
        compiled = self._model.compiles_after_ready
        for name, text, value in (
            ("load", "Share of the last 2 seconds that the device worked.", seen.load.busy),
            ("backlog_seconds", "Work that waits, by the service's own times.", seen.load.queue_s),
            ("sessions", "Requests that are drafted for, of all targets.", seen.load.sessions),
            ("sessions_with_kv", "Those of them whose KV is there.", seen.holding),
            ("targets", "Targets that are connected and admitted.", seen.load.targets),
            ("streams", "Connections, admitted or not.", audit.streams),
            ("waiting_drafts", "Drafts that wait for a batch.", seen.waiting),
            ("kv_pages", "KV pages.", pool.pages_in_force),
            ("kv_pages_used", "KV pages that sessions hold.", pool.num_used),
            ("compiles_after_ready", "Programs compiled after ready: 0, or there is a bug.", compiled),
        ):  # fmt: skip
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _counters(self) -> Iterator[Metric]:
        seen = self._worker.snapshot
        core, worker = seen.core, seen.worker
        for name, text, value in (
            ("rounds", "Drafts searched.", core.rounds),
            ("trees", "Trees answered, with those sent again.", core.trees),
            ("queue_seconds", "Waiting for the device, summed over answered Drafts.", core.queue_s),
            ("loop_seconds", "The loop runs; service and idle are parts of it.", worker.loop_s),
            ("service_seconds", "The device worked.", worker.service_s),
            ("idle_seconds", "The device had nothing to do.", worker.idle_s),
            ("searches", "Batches that searched.", worker.searches),
            ("search_seconds", "Batches that searched, their catch-up included.", worker.search_s),
            ("fed_tokens", "Tokens fed into the draft's KV.", core.fed_tokens),
            ("frames", "Frames of targets.", worker.frames),
            ("stale", "Messages and trees of an epoch or round that is over.", core.stale),
            ("duplicates", "Messages heard before.", core.duplicates),
            ("resyncs", "Sessions that had to be opened anew.", core.resyncs),
            ("expired", "Drafts whose tree could not be ready before the target gave up.", core.expired),
            ("failed", "Drafts whose batch failed on the device.", core.failed),
            ("leases_ended", "Sessions freed because nobody spoke of them.", core.leases_ended),
            ("evicted", "Times that a session's KV went for another's.", core.evicted),
            ("streams_opened", "Connections that were let in.", self._audit.opened),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)

    def _labelled(self) -> Iterator[Metric]:
        seen = self._worker.snapshot
        for name, text, label, counts in (
            ("refused", "Targets and sessions refused, by code.", "code", seen.core.refused),
            ("streams_refused", "Connections refused, or ended for what came.", "why", self._audit.refused()),
            ("nonsense", "Messages that made no sense: of a session, or of a target.", "of", seen.worker.nonsense),
        ):
            yield _by(PREFIX + name, text, label, counts)

    def _rows(self) -> Metric:
        worker = self._worker.snapshot.worker
        edges = [*map(str, ROWS_EDGES), "+Inf"]
        counts = [worker.rows[edge] for edge in (*ROWS_EDGES, float("inf"))]
        return HistogramMetricFamily(
            PREFIX + "batch_rows", "Requests of a batch that searched.",
            buckets=list(zip(edges, accumulate(counts), strict=True)), sum_value=worker.rows_searched,
        )  # fmt: skip


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family


def exposition(collector: ServiceCollector) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
