"""Prometheus metrics: per request as it ends, and the engine's totals read at each scrape. Documented in docs/http.md.

No label ever holds a raw target or anything that a user wrote; slo classes come from the server's configuration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from adaserve_jax.engine.client import EngineClient, EngineStats
from adaserve_jax.results.records import status_of
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.stats import BREAKER_STATES, DrafterStats, LearningStats

# Prometheus metrics of the draft services that an engine asks; 0, and no service, where it asks none.
#
# Labels are addresses, which the operator gave, and states of breakers: nothing that a user wrote, or a
# service.

DRAFTER_TOTALS = {
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
    for name, (field, text) in DRAFTER_TOTALS.items():
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


# Prometheus metrics of drafts that learn. Empty where nothing learns.
#
# Labels are names of drafts, which the operator gave, and reasons, which the engine has: nothing that a user
# wrote.

GAUGES = {
    "draft_version": ("version", "Version of the draft in force; 0: as it was loaded."),
    "learning_held_out_acceptance": (
        "held_out_acceptance", "Mean over held-out positions of sum min(p, q), of the version in force.",
    ),
    "learning_loss": ("loss", "Loss of the latest update."),
    "learning_records": ("records", "Finished choices that are kept to learn from."),
    "learning_held_out_records": ("held_out", "Those of them that only check updates."),
}  # fmt: skip
"""Per draft, as of now: metric, field of LearningStats, meaning."""
COUNTERS = {
    "draft_drafted_tokens": ("drafted_tokens", "draft", "Draft tokens verified, by the draft that made them."),
    "draft_accepted_tokens": ("accepted_tokens", "draft", "Draft tokens accepted, by the draft that made them."),
    "learning_updates": ("updates", "draft", "Updates that came to serve."),
    "learning_refused": ("refused", "draft", "Updates that a check kept from serving."),
    "learning_rolled_back": ("rolled_back", "draft", "Versions taken back once they served."),
    "learning_left_out": ("left_out", "reason", "Choices that were not learned from, by reason."),
    "learning_lost": ("lost", "reason", "Positions whose target scores were fetched and not kept, by reason."),
}
"""Since the start: metric, field of LearningStats, label, meaning. Every draft has them, from 0, so that rates can be
taken of their first count too; so has every reason."""
REASONS = {
    "left_out": ("opt_out", "abort", "error", "no_positions", "failed"),
    "lost": ("no_room", "not_finite"),
}
"""By field of LearningStats: why nothing is learned from a request, and why not from one of its positions."""
LEARNING_TOTALS = {
    "learning_target_tokens": ("target_tokens", "Positions whose target scores were kept."),
    "learning_micro_steps": ("micro_steps", "Pieces of training between steps."),
    "learning_train_seconds": ("train_s", "Seconds of the step loop that training took."),
    "learning_delay_seconds": ("delay_s", "Those of them in which requests ran and waited for it."),
}
"""Since the start: metric, field of LearningStats, meaning."""


def learning_metrics(stats: LearningStats) -> Iterator[Metric]:
    """What LearningStats says, as metric families."""
    for name, (field, text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"adaserve_{name}", text, labels=("draft",))
        for draft, value in getattr(stats, field).items():
            gauge.add_metric((draft,), value)
        yield gauge
    for name, (field, label, text) in COUNTERS.items():
        known = REASONS.get(field, stats.version) if stats.version else ()
        counter = CounterMetricFamily(f"adaserve_{name}", text, labels=(label,))
        for key, value in (dict.fromkeys(known, 0) | getattr(stats, field)).items():
            counter.add_metric((key,), value)
        yield counter
    for name, (field, text) in LEARNING_TOTALS.items():
        yield CounterMetricFamily(f"adaserve_{name}", text, getattr(stats, field))
    longest = "Longest piece of training that requests which ran waited for."
    yield GaugeMetricFamily("adaserve_learning_delay_max_seconds", longest, stats.delay_max_s)


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
RATIO_EDGES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Upper edges of TPOT / target; met is <= 1."""


class ServerMetrics:
    """All metrics of one server, in a registry of their own. Used from the event loop only, but for the counters of
    what was dropped."""

    def __init__(self, client: EngineClient):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        self._slo = Counter(
            "adaserve_slo_requests",
            "Choices that carried a target, by class, target (tpot, ttft) and outcome (met, missed, rejected).",
            ("class", "metric", "outcome"),
            registry=self.registry,
        )
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
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_tokens(self, gap_s: float, count: int) -> None:
        """`count` tokens of one choice arrived together, `gap_s` after those before."""
        self._gap.observe(gap_s)
        if count > 1:
            self._gap.observe(0.0, count - 1)

    def observe_rate_limited(self, limit: str) -> None:
        """One request was refused because its key was over that limit."""
        self._limited.labels(limit).inc()

    def observe_end(self, choice: EndedChoice) -> None:
        """One choice ended, for whatever reason; one that did not finish has met no target."""
        status, metrics = status_of(choice.ending, choice.error_code), choice.metrics
        met = (metrics.tpot_met, metrics.ttft_met) if metrics is not None and status == "finished" else (False, False)
        for kind, target_s, kept in zip(("tpot", "ttft"), (choice.tpot_slo_s, choice.ttft_slo_s), met, strict=True):
            if target_s is not None:
                outcome = "rejected" if status == "rejected" else "met" if kept else "missed"
                self._slo.labels(choice.slo_class, kind, outcome).inc()
        if metrics is None:
            return
        if metrics.tpot_slo_s and metrics.tpot_s is not None:
            self._over.observe(metrics.tpot_s / metrics.tpot_slo_s)
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
    """What is observed for every token, and so without the locks of the library's histogram: event loop only."""

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
    """Reads `EngineClient.stats()` at each scrape."""

    def __init__(self, client: EngineClient):
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        up = "1 while the engine can serve; 0 while it starts, is started again, or is dead."
        yield GaugeMetricFamily("adaserve_engine_up", up, int(self._client.is_alive()))
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from learning_metrics(stats.learning)
        yield from drafter_metrics(stats.drafter)

    def describe(self) -> list[Metric]:
        return []


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    steps = stats.scheduler
    total = steps.pages_total + steps.extension_total
    usage = (steps.pages_used + steps.extension_used) / total if total else 0.0
    for name, text, value in (
        ("requests_running", "Choices that hold a slot of the engine.", steps.running),
        ("requests_waiting", "Choices in the engine's queue.", steps.waiting),
        ("kv_cache_usage_ratio", "Used KV pages over all.", usage),
        ("draft_resident", "1 while the draft is on the device.", int(steps.draft_resident)),
        ("step_age_seconds", "Seconds since the last completed step; 0 when idle.", stats.step_age_s),
        ("step_depth", "Depth of the last step's beam search.", steps.last_depth),
        ("step_width", "Width of the last step's beam search.", steps.last_width),
        ("step_budget", "Tree tokens that the last step could verify.", steps.last_verified_tree_tokens),
    ):
        yield GaugeMetricFamily(f"adaserve_{name}", text, value)
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
    errors = GaugeMetricFamily(
        "adaserve_calibration_error", "Expected calibration error of acceptance since start.",
        labels=("rows", "prediction"),
    )  # fmt: skip
    for rows, by_prediction in steps.calibration_error.items():
        for prediction, error in by_prediction.items():
            errors.add_metric((rows, prediction), error)
    yield errors
    arms = GaugeMetricFamily(
        "adaserve_arm", "1 for the arm in force at sizes of batch up to the bucket.", labels=("bucket", "arm")
    )
    for bucket, arm in steps.arms.items():
        arms.add_metric((bucket, arm), 1)
    yield arms
    regret_s = "Seconds that the arms played are estimated to have cost beyond the best ones."
    yield GaugeMetricFamily("adaserve_arm_regret_seconds", regret_s, steps.arm_regret_s)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    steps = stats.scheduler
    for name, text, value in (
        ("steps", "Engine steps.", steps.steps),
        ("prompt_tokens", "Prompt tokens taken in.", steps.prompt_tokens),
        ("generation_tokens", "Output tokens.", steps.generation_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", steps.cache_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found there.", steps.cache_hit_tokens),
        ("preemptions", "Requests that lost their pages and were computed again.", steps.preemptions),
        ("spec_drafts", "Steps that speculated.", steps.spec_steps),
        ("spec_draft_tokens", "Draft tokens verified.", steps.draft_tokens),
        ("spec_accepted_tokens", "Draft tokens accepted.", steps.accepted_tokens),
        ("engine_restarts", "Engine processes that ended and were replaced.", stats.restarts),
        ("compiles_after_ready", "Compilations since ready; anything but 0 is a bug.", stats.compiles_after_ready),
    ):
        yield CounterMetricFamily(f"adaserve_{name}", text, value)
    yield _by_label(
        "spec_accepted_tokens_per_position", "Draft tokens accepted, by depth in the tree from 1.", "position",
        {str(i): n for i, n in enumerate(steps.accepted_per_position, 1)},
    )  # fmt: skip
    yield _by_label(
        "calibration_outcomes", "Verified nodes behind an accepted parent.", "rows", steps.calibration_outcomes
    )
    yield _by_label("requests_finished", "Choices that ended, by finish_reason.", "reason", steps.finished)
    yield _by_label("swaps", "Exchanges of the draft and KV pages, by kind.", "kind", steps.elastic_moves)
    yield _by_label(
        "swap_seconds",
        "Seconds of the step loop that exchanges of the draft and KV pages took.",
        "kind",
        steps.elastic_s,
    )
    phases = ("plan", "draft", "select", "verify", "commit", "wait")
    yield _by_label(
        "step_seconds",
        "Seconds in each phase of the step loop; wait is the part spent on the device, or on draft services.", "phase",
        {phase: getattr(steps, f"{phase}_s") for phase in phases},
    )  # fmt: skip


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"adaserve_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
