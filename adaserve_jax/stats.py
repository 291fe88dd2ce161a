"""Statistics of an engine: each field declares its kind and the Prometheus metric that exports it."""

# ruff: noqa: RUF009  # counter() and gauge() return dataclass fields

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal, Self, cast

BREAKER_STATES = ("closed", "half_open", "open")
"""States of the link to a draft service: asked, tried, left alone for a while."""


@dataclass(frozen=True)
class MetricSpec:
    """Kind and Prometheus metric of one statistic; the exporter adds the prefix `adaserve_`.

    kind: counter (since the start), gauge (now), or peak (largest since the start, exported as a gauge). name: empty:
    not exported by itself; fields with one name are one metric, told apart by `row`, the value of the first label.
    text: help. labels: names, one for each level of a nested dict, then one for a list index or a str value. values:
    label values that are exported before they are counted.
    """

    kind: Literal["counter", "gauge", "peak"]
    name: str = ""
    text: str = ""
    labels: tuple[str, ...] = ()
    row: str = ""
    values: tuple[str, ...] = ()


def metric_field(metric: MetricSpec, default: object) -> Any:
    """Return a dataclass field that declares `metric`; a callable default is a factory."""
    metadata = {"metric": metric}
    if callable(default):
        return field(default_factory=cast("Callable[[], Any]", default), metadata=metadata)
    return field(default=default, metadata=metadata)


def counter(
    name: str, text: str, *labels: str, default: object = 0, row: str = "", values: tuple[str, ...] = ()
) -> Any:
    """Declare a count since the start; see `MetricSpec`."""
    return metric_field(MetricSpec("counter", name, text, labels, row, values), default)


def gauge(name: str = "", text: str = "", *labels: str, default: object = 0, values: tuple[str, ...] = ()) -> Any:
    """Declare a value that holds now; see `MetricSpec`."""
    return metric_field(MetricSpec("gauge", name, text, labels, values=values), default)


def peak(name: str, text: str) -> Any:
    """Declare the largest value since the start; see `MetricSpec`."""
    return metric_field(MetricSpec("peak", name, text), 0.0)


def _phase(name: str) -> Any:
    text = "Seconds in each phase of the step loop; wait is the part spent on the device, or on draft services."
    return counter("step_seconds", text, "phase", default=0.0, row=name)


def metrics_of(stats: object) -> dict[str, MetricSpec]:
    """Return the metric of every declared statistic by field name, for a dataclass or an instance of one."""
    return {one.name: one.metadata["metric"] for one in fields(cast("Any", stats)) if "metric" in one.metadata}


@dataclass
class Statistics:
    """Base of the statistics of one engine, which go on counting when the engine is replaced."""

    def ended(self) -> Self:
        """Return the statistics of an engine that is gone: gauges go back to their defaults."""
        empty = type(self)()
        return replace(self, **{
            name: getattr(empty, name) for name, metric in metrics_of(self).items() if metric.kind == "gauge"
        })  # fmt: skip

    def after(self, earlier: Self) -> Self:
        """Return the counts of this engine and of those before it; gauges are this engine's."""
        merged: dict[str, Any] = {}
        for name, metric in metrics_of(self).items():
            before, own = getattr(earlier, name), getattr(self, name)
            if metric.kind != "gauge":
                merged[name] = _sum(before, own) if metric.kind == "counter" else max(before, own)
        return replace(self, **merged)


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        counts = cast("dict[str, int]", one)
        return {key: counts.get(key, 0) + other.get(key, 0) for key in counts | other}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(cast("list[int]", one), other, fillvalue=0)]
    return one + other


@dataclass
class StepStats(Statistics):
    """Statistics of the scheduler and its step loop.

    waiting_new counts those of `waiting` that never ran, and preparing those that have not reached the scheduler.
    pages_used and pages_total are of the base pool, extension_* of the extension slab (0 while there is none).
    pages_cached counts pages of both that no request holds and that are kept for prompts which begin alike;
    extension_cached counts those of the extension. calibration_error is keyed by kind of rows (greedy, coupled), then
    by prediction (raw, loaded, online). arms maps a bucket of batch sizes to the best arm.
    """

    steps: int = counter("steps", "Engine steps.")
    running: int = gauge("requests_running", "Choices that hold a slot of the engine.")
    waiting: int = gauge("requests_waiting", "Choices in the engine's queue.")
    waiting_new: int = gauge()
    preparing: int = gauge()
    pages_used: int = gauge()
    pages_total: int = gauge()
    prompt_tokens: int = counter("prompt_tokens", "Prompt tokens taken in.")
    generation_tokens: int = counter("generation_tokens", "Output tokens.")
    preemptions: int = counter("preemptions", "Requests that lost their pages and were computed again.")
    spec_steps: int = counter("spec_drafts", "Steps that speculated.")
    drafts: int = counter("spec_trees", "Trees verified: one for each request with candidates in a step.")
    draft_tokens: int = counter("spec_draft_tokens", "Draft tokens verified.")
    accepted_tokens: int = counter("spec_accepted_tokens", "Draft tokens accepted.")
    suffix_tokens: int = counter("suffix_draft_tokens", "Verified draft tokens that text already seen proposed.")
    suffix_accepted_tokens: int = counter(
        "suffix_accepted_tokens", "Accepted draft tokens that text already seen proposed."
    )
    suffix_kept_tokens: int = gauge("suffix_kept_tokens", "Tokens of ended texts that are kept to draft from.")
    suffix_calibration_error: dict[str, dict[str, float]] = gauge(
        "suffix_calibration_error", "Expected calibration error of the acceptance of text already seen, since start.",
        "rows", "prediction", default=dict[str, dict[str, float]],
    )  # fmt: skip
    accepted_per_position: list[int] = counter(
        "spec_accepted_tokens_per_position", "Draft tokens accepted, by depth in the tree from 1.", "position",
        default=list[int],
    )  # fmt: skip
    finished: dict[str, int] = counter(
        "requests_finished", "Choices that ended, by finish_reason.", "reason", default=dict[str, int]
    )
    plan_s: float = _phase("plan")
    draft_s: float = _phase("draft")
    select_s: float = _phase("select")
    verify_s: float = _phase("verify")
    commit_s: float = _phase("commit")
    wait_s: float = _phase("wait")
    calibration_outcomes: dict[str, int] = counter(
        "calibration_outcomes", "Verified nodes behind an accepted parent.", "rows", default=dict[str, int]
    )
    calibration_error: dict[str, dict[str, float]] = gauge(
        "calibration_error", "Expected calibration error of acceptance since start.", "rows", "prediction",
        default=dict[str, dict[str, float]],
    )  # fmt: skip
    last_depth: int = gauge("step_depth", "Depth of the last step's beam search.")
    last_width: int = gauge("step_width", "Width of the last step's beam search.")
    last_tree_token_cap: int = gauge("step_budget", "Tree tokens that the last step could verify.")
    last_verified_tree_tokens: int = gauge()
    pages_cached: int = gauge()
    extension_used: int = gauge()
    extension_cached: int = gauge()
    extension_total: int = gauge()
    draft_resident: bool = gauge("draft_resident", "1 while the draft is on the device.", default=False)
    cache_queried_tokens: int = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    cache_hit_tokens: int = counter("prefix_cache_hits", "Prompt tokens found there.")
    elastic_moves: dict[str, int] = counter(
        "swaps", "Exchanges of the draft and KV pages, by kind.", "kind", default=dict[str, int]
    )
    elastic_s: dict[str, float] = counter(
        "swap_seconds", "Seconds of the step loop that exchanges of the draft and KV pages took.", "kind",
        default=dict[str, float],
    )  # fmt: skip
    arms: dict[str, str] = gauge(
        "arm", "1 for the arm in force at sizes of batch up to the bucket.", "bucket", "arm", default=dict[str, str]
    )
    arm_regret_s: float = gauge(
        "arm_regret_seconds",
        "Seconds that the arms played are estimated to have cost beyond the best ones; 0 under policies that do not "
        "estimate it, adaserve among them.",
        default=0.0,
    )  # fmt: skip


@dataclass
class LearningStats(Statistics):
    """Statistics of drafts that learn from served requests; dicts are by draft, or by reason. Empty without learning.

    A draft's version counts from 0, the draft that was loaded. Its tokens are those of the requests that it speculated
    for. left_out counts requests that were not learned from; lost counts positions: no_room (running texts had all
    rows), not_finite (the scores were no distribution).
    """

    version: dict[str, int] = gauge(
        "draft_version", "Version of the draft in force; 0: as it was loaded.", "draft", default=dict[str, int]
    )
    drafted_tokens: dict[str, int] = counter(
        "draft_drafted_tokens", "Draft tokens verified, by the draft that made them.", "draft", default=dict[str, int]
    )
    accepted_tokens: dict[str, int] = counter(
        "draft_accepted_tokens", "Draft tokens accepted, by the draft that made them.", "draft", default=dict[str, int]
    )
    held_out_acceptance: dict[str, float] = gauge(
        "learning_held_out_acceptance", "Sum min(p, q) of the version in force on held-out records: mean over clients, "
        "weighted by their shares of the records.",
        "draft", default=dict[str, float],
    )  # fmt: skip
    loss: dict[str, float] = gauge("learning_loss", "Loss of the latest update.", "draft", default=dict[str, float])
    updates: dict[str, int] = counter(
        "learning_updates", "Updates that came to serve.", "draft", default=dict[str, int]
    )
    refused: dict[str, int] = counter(
        "learning_refused", "Updates that a check kept from serving.", "draft", default=dict[str, int]
    )
    rolled_back: dict[str, int] = counter(
        "learning_rolled_back", "Versions taken back once they served.", "draft", default=dict[str, int]
    )
    records: dict[str, int] = gauge(
        "learning_records", "Finished choices that are kept to learn from.", "draft", default=dict[str, int]
    )
    held_out: dict[str, int] = gauge(
        "learning_held_out_records", "Those of them that only check updates.", "draft", default=dict[str, int]
    )
    left_out: dict[str, int] = counter(
        "learning_left_out", "Choices that were not learned from, by reason.", "reason", default=dict[str, int],
        values=("opt_out", "abort", "error", "no_positions", "adapter", "failed"),
    )  # fmt: skip
    micro_steps: int = counter("learning_micro_steps", "Pieces of training between steps.")
    train_s: float = counter("learning_train_seconds", "Seconds of the step loop that training took.", default=0.0)
    delay_s: float = counter(
        "learning_delay_seconds", "Those of them in which requests ran and waited for it.", default=0.0
    )
    delay_max_s: float = peak(
        "learning_delay_max_seconds", "Longest piece of training that requests which ran waited for."
    )
    target_tokens: int = counter("learning_target_tokens", "Positions whose target scores were kept.")
    lost: dict[str, int] = counter(
        "learning_lost", "Positions whose target scores were fetched and not kept, by reason.", "reason",
        default=dict[str, int], values=("no_room", "not_finite"),
    )  # fmt: skip


@dataclass
class ServiceState:
    """State of one draft service as its target sees it.

    version is that of its draft, empty while unknown; reason says why it is not asked, empty where it is.
    """

    breaker: Literal["closed", "half_open", "open"] = gauge(
        "drafter_breaker", "1 for the state that the service's breaker is in (closed, half_open, open).",
        "service", "state", default="closed", values=BREAKER_STATES,
    )  # fmt: skip
    version: str = ""
    sessions: int = gauge("drafter_sessions", "Sessions of this engine at the service.", "service")
    busy: float = gauge(
        "drafter_busy", "Share of the last seconds that the service worked, as it said last.", "service", default=0.0
    )
    queue_s: float = gauge(
        "drafter_queue_seconds", "Seconds of work that wait at the service, as it said last.", "service", default=0.0
    )
    reason: str = ""
    connected: int = gauge("drafter_connected", "1 while the service has admitted this engine.", "service")


@dataclass
class DrafterStats(Statistics):
    """Statistics of asking draft services; services is keyed by address."""

    rounds: int = counter("drafter_rounds", "Steps that asked draft services for trees.")
    trees: int = counter("drafter_trees", "Trees that came in time.")
    late: int = counter("drafter_late", "Trees that did not: their rows were decoded without.")
    stale: int = counter("drafter_stale", "Answers to what was no longer asked.")
    resyncs: int = counter("drafter_resyncs", "Sessions sent anew because the service asked for it.")
    refused: int = counter("drafter_refused", "Refusals, of sessions and of this engine.")
    invalid: int = counter("drafter_invalid", "Answers that make no sense.")
    lost: int = counter("drafter_lost", "Streams to services that ended.")
    breaker_opens: int = counter("drafter_breaker_opens", "Times that a service was left alone for a while.")
    moved: int = counter("drafter_moved", "Sessions that went to another service.")
    errors: int = counter("drafter_errors", "Steps whose drafting failed on this side; the log has the first.")
    wait_s: float = counter("drafter_wait_seconds", "Seconds of the step loop spent waiting for services.", default=0.0)
    round_s: float = counter(
        "drafter_round_seconds", "Seconds until the last tree of each round was there.", default=0.0
    )
    services: dict[str, ServiceState] = gauge(default=dict)
