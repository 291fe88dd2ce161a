"""Prometheus metrics of drafts that learn. Empty where nothing learns.

Labels are names of drafts, which the operator gave, and reasons, which the engine has: nothing that a user wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from adaserve_jax.stats import LearningStats

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
TOTALS = {
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
    for name, (field, text) in TOTALS.items():
        yield CounterMetricFamily(f"adaserve_{name}", text, getattr(stats, field))
    longest = "Longest piece of training that requests which ran waited for."
    yield GaugeMetricFamily("adaserve_learning_delay_max_seconds", longest, stats.delay_max_s)
