"""Prometheus metrics of one server: requests as they end, and the engine's statistics at each scrape.

docs/prometheus.md lists them. No label holds a raw target or anything that a user wrote: classes come from the server's
configuration, drafts and services from the operator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from adaserve_jax.engine.client import EngineClient
from adaserve_jax.results.records import judged, slowest_part, status_of
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.stats import DrafterStats, MetricSpec, ServiceState, StepStats, metrics_of

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
RATIO_EDGES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Upper edges of the histogram of TPOT / target; a target is met at <= 1."""
OUTCOMES = ("met", "missed", "rejected", "cancelled")


class ServerMetrics:
    """All metrics of one server, in a registry of their own.

    Used from the event loop, except records_dropped and spans_dropped, which other threads count.
    """

    def __init__(self, client: EngineClient, model_name: str | None = None):
        """Register everything. model_name: of the API; None: that of the target's folder."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client, model_name))
        self._slo = Counter(
            "adaserve_slo_requests",
            "Choices with a target, by class, metric (all targets of a choice, or one kind: tpot, thinking_tpot, ttft, "
            f"e2e) and outcome ({', '.join(OUTCOMES)}).",
            ("class", "metric", "outcome"),
            registry=self.registry,
        )
        self._refused = Counter(
            "adaserve_refused_choices", "Choices that were refused, with or without a target, by code of the error.",
            ("code",), registry=self.registry,
        )  # fmt: skip
        self.records_dropped = Counter(
            "adaserve_records_dropped", "Choices that have no record: their file could not be written.",
            registry=self.registry,
        )  # fmt: skip
        self.spans_dropped = Counter(
            "adaserve_spans_dropped", "Spans that the collector did not get.", registry=self.registry
        )
        self._limited = Counter(
            "adaserve_rate_limited",
            "Requests refused because their API key was over a limit (requests, inflight, tokens).",
            ("limit",),
            registry=self.registry,
        )
        self._over = self._histogram("tpot_over_target", "Measured TPOT over its target; met is <= 1.", RATIO_EDGES)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._gap = GapHistogram()
        self.registry.register(self._gap)
        self._e2e = self._histogram("e2e_seconds", "Arrival to last token.", _SECONDS)
        self._queue = self._histogram("queue_seconds", "Arrival until first scheduled.", _SECONDS)
        self._prefill = self._histogram("prefill_seconds", "First scheduled until first token.", _SECONDS)
        self._decode = self._histogram("decode_seconds", "First to last token.", _SECONDS)

    def _histogram(self, name: str, text: str, edges: tuple[float, ...]) -> Histogram:
        return Histogram(f"adaserve_{name}", text, buckets=edges, registry=self.registry)

    def text(self) -> bytes:
        """Return the exposition in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_tokens(self, gap_s: float, count: int) -> None:
        """Count `count` tokens of one choice that arrived together, `gap_s` seconds after those before."""
        self._gap.observe(gap_s)
        if count > 1:
            self._gap.observe(0.0, count - 1)

    def observe_rate_limited(self, limit: str) -> None:
        """Count a request that was refused because its API key was over `limit`."""
        self._limited.labels(limit).inc()

    def observe_end(self, choice: EndedChoice) -> None:
        """Count a choice that ended; one that did not finish met no target, and a cancelled one is not judged."""
        status, metrics = status_of(choice.ending, choice.error_code), choice.metrics
        measured = choice.measured
        if status == "rejected":
            self._refused.labels(choice.error_code or "").inc()
        outcomes = (
            ("all", measured.slo_met), ("tpot", measured.tpot_met), ("thinking_tpot", measured.thinking_tpot_met),
            ("ttft", measured.ttft_met), ("e2e", measured.e2e_met),
        )  # fmt: skip
        for kind, kept in outcomes:
            if kept is not None:
                outcome = status if status in ("rejected", "cancelled") else "met" if judged(kept, status) else "missed"
                for each in OUTCOMES:  # a share needs a 0 where nothing was met
                    self._slo.labels(choice.slo_class, kind, each).inc(each == outcome)
        if metrics is None:
            return
        target_s, tpot_s = slowest_part(metrics.tpot_parts)
        if target_s and tpot_s is not None:
            self._over.observe(tpot_s / target_s)
        spans = (
            (self._queue, metrics.arrival_s, metrics.first_scheduled_s),
            (self._ttft, metrics.arrival_s, metrics.first_token_s),
            (self._prefill, metrics.first_scheduled_s, metrics.first_token_s),
            (self._decode, metrics.first_token_s, metrics.last_token_s),
            (self._e2e, metrics.arrival_s, metrics.last_token_s),
        )
        for histogram, begin, end in spans:
            if begin is not None and end is not None:
                histogram.observe(end - begin)


class GapHistogram(Collector):
    """Histogram of the gaps between tokens, used from the event loop only.

    It is observed for every token, so it does without the locks of the library's histogram.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float, count: int = 1) -> None:
        self._counts[bisect_left(_TOKEN_SECONDS, gap_s)] += count
        self._sum_s += gap_s * count

    def collect(self) -> Iterator[Metric]:
        edges = (*map(str, _TOKEN_SECONDS), "+Inf")
        yield HistogramMetricFamily(
            "adaserve_inter_token_latency_seconds", "Gaps between tokens; 0 for tokens of the same step.",
            buckets=list(zip(edges, accumulate(self._counts), strict=True)), sum_value=self._sum_s,
        )  # fmt: skip


class EngineCollector(Collector):
    """Collector of the engine's statistics, read at each scrape.

    A statistic declares its metric (`stats.MetricSpec`); only what follows from several statistics is written here.
    """

    def __init__(self, client: EngineClient, model_name: str | None = None):
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        up = "1 while the engine can serve; 0 while it starts, is started again, or is dead."
        yield GaugeMetricFamily("adaserve_engine_up", up, int(self._client.is_alive()))
        yield from _page_metrics(stats.scheduler)
        if self._model_name is None and self._client.is_alive():
            self._model_name = PurePath(self._client.info.target).name
        if self._model_name is not None:
            yield from _vllm_metrics(stats.scheduler, self._model_name)
        drafter = stats.drafter or DrafterStats()
        for part in (stats, stats.scheduler, stats.learning, drafter):
            yield from _families(metrics_of(part), vars(part), stats.learning.version)
        by_service = {
            name: {address: getattr(state, name) for address, state in drafter.services.items()}
            for name in metrics_of(ServiceState)
        }
        yield from _families(metrics_of(ServiceState), by_service)

    def describe(self) -> list[Metric]:
        return []


def _families(
    specs: Mapping[str, MetricSpec], values: Mapping[str, Any], drafts: Collection[str] = ()
) -> Iterator[Metric]:
    """Yield a metric family per declared name.

    Counters by draft or by reason begin at 0 for all of them once there are drafts, so that rates see the first count.
    specs, values: by field of the statistics. drafts: names of the drafts that learn.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for field, spec in specs.items():
        if not spec.name:
            continue
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = families.setdefault(spec.name, kind(f"adaserve_{spec.name}", spec.text, labels=spec.labels))
        value = values[field]
        keys = spec.values or (drafts if spec.labels == ("draft",) else ())
        if drafts and keys and spec.kind == "counter":
            value = dict.fromkeys(keys, 0) | value
        for labels, number in _samples(value, spec.values):
            family.add_metric((spec.row, *labels) if spec.row else labels, number)
    yield from families.values()


def _samples(value: Any, states: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield (label values, number): dicts and lists by key and by position from 1, a text as 1 among its states."""
    if isinstance(value, list):
        value = {str(position): one for position, one in enumerate(cast("list[Any]", value), 1)}
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            for labels, number in _samples(inner, states):
                yield (key, *labels), number
    elif isinstance(value, str):
        for state in states or (value,):
            yield (state,), int(value == state)
    else:
        yield (), float(value)


def _vllm_metrics(steps: StepStats, model: str) -> Iterator[Metric]:
    """Yield the counters of speculation under vLLM's names and labels (vllm/v1/spec_decode/metrics.py), which load
    generators and dashboards read."""
    labels, values = ("model_name", "engine"), (model, "0")
    for name, text, value in (
        ("drafts", "Trees verified", steps.drafts),
        ("draft_tokens", "Draft tokens verified", steps.draft_tokens),
        ("accepted_tokens", "Draft tokens accepted", steps.accepted_tokens),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", f"{text}, under vLLM's name.", labels=labels)
        family.add_metric(values, value)
        yield family
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted by position from 0, under vLLM's name.",
        labels=(*labels, "position"),
    )  # fmt: skip
    for position, value in enumerate(steps.accepted_per_position):
        by_position.add_metric((*values, str(position)), value)
    yield by_position


def _page_metrics(steps: StepStats) -> Iterator[Metric]:
    """Yield the usage of KV pages, of both slabs together and of each."""
    total = steps.pages_total + steps.extension_total
    usage = (steps.pages_used + steps.extension_used) / total if total else 0.0
    yield GaugeMetricFamily("adaserve_kv_cache_usage_ratio", "Used KV pages over all.", usage)
    pages = GaugeMetricFamily(
        "adaserve_kv_pages", "KV pages by slab (base, extension) and state (used, cached, free).",
        labels=("slab", "state"),
    )  # fmt: skip
    for slab, total, used, cached in (
        ("base", steps.pages_total, steps.pages_used, steps.pages_cached - steps.extension_cached),
        ("extension", steps.extension_total, steps.extension_used, steps.extension_cached),
    ):
        for state, value in (("used", used), ("cached", cached), ("free", total - used - cached)):
            pages.add_metric((slab, state), value)
    yield pages
