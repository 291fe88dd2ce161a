"""What the runs of benchmarks/nightjar/engine.py say: medians over rounds, ratios within rounds, bootstrap intervals.

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from adaserve_jax.cli.terminal import table_console
from benchmarks.engine.throughput_rows import Ratio, paired_ratio
from benchmarks.nightjar.points import OURS, PLAIN
from benchmarks.nightjar.rounds import Rounds
from benchmarks.nightjar.views import BUSY, FEWER_IS_BETTER, LATENCY, THROUGHPUT

JUDGED = (THROUGHPUT, BUSY, LATENCY)
AIM_LOAD, AIM = "low", 1.2
"""`nightjar` over `ar`, by throughput while busy, at the low load."""

Figures = list[dict[str, Any]]
"""Of one policy at one load: the figures of each round."""


def over(ours: Figures, theirs: Figures, figure: str) -> dict[str, float]:
    """How many times theirs: median of the rounds' ratios, and its interval."""
    return asdict(paired_ratio([each[figure] for each in ours], [each[figure] for each in theirs]))


def spread(figures: Figures, figure: str) -> dict[str, float]:
    """Median over rounds, and its interval."""
    return asdict(paired_ratio([each[figure] for each in figures], [1.0] * len(figures)))


def points_of(rounds: Rounds, loads: Sequence[str], policies: Sequence[str], most_rounds: int) -> list[dict[str, Any]]:
    """One entry per load and policy, of the rounds in which every policy was measured; loads without one are left
    out."""
    found = []
    for load in loads:
        whole = rounds.whole_rounds(load, policies, most_rounds)
        if whole:
            by_policy = {policy: rounds.figures(load, policy, whole) for policy in policies}
            rate = rounds.rate_rps(load, PLAIN, whole)
            found += judged(load, rate, by_policy)
    return found


def judged(load: str, rate_rps: float, by_policy: dict[str, Figures]) -> list[dict[str, Any]]:
    """Every policy beside `ar` and beside the fixed length that is best in the same rounds, none included."""
    fixed = [policy for policy in by_policy if policy == PLAIN or policy.startswith("spec:")]
    best = {figure: best_of(fixed, by_policy, figure) for figure in (THROUGHPUT, LATENCY)}
    return [
        {
            "load": load,
            "rate_rps": rate_rps,
            "policy": policy,
            "rounds": figures,
            **{figure: spread(figures, figure) for figure in JUDGED},
            "times_plain": {figure: over(figures, by_policy[PLAIN], figure) for figure in JUDGED},
            "best_fixed": best,
            "times_best_fixed": {name: over(figures, by_policy[at], name) for name, at in best.items()},
        }
        for policy, figures in by_policy.items()
    ]


def best_of(policies: Sequence[str], by_policy: dict[str, Figures], figure: str) -> str:
    """By the median over rounds; of equals the first."""
    sign = -1 if figure in FEWER_IS_BETTER else 1
    return max(policies, key=lambda policy: sign * median(each[figure] for each in by_policy[policy]))


def aims(points: Sequence[dict[str, Any]]) -> list[str]:
    """What `nightjar` is to reach, beside what it reached, in words."""
    texts = []
    for point in points:
        if point["policy"] != OURS:
            continue
        if point["load"] == AIM_LOAD:
            found = Ratio(**point["times_plain"][BUSY])
            texts.append(
                f"{OURS} at the low load: {found} times `{PLAIN}` by tokens/s while busy; the aim is {AIM:g}: "
                f"{'met' if found.median >= AIM else 'missed'}"
            )
        found = Ratio(**point["times_best_fixed"][THROUGHPUT])
        best = point["best_fixed"][THROUGHPUT]
        texts.append(f"{OURS} at the {point['load']} load: {found} times the best fixed length ({best}) by tokens/s")
    return texts


def show(points: Sequence[dict[str, Any]]) -> None:
    """The table, to stdout."""
    table = Table(title="medians over rounds (of few, least to largest)", title_justify="left")
    for header in ("load", "policy", "tokens/s", f"times {PLAIN}", "busy, times", "latency, s", f"times {PLAIN}"):
        table.add_column(header, justify="right")
    for point in points:
        times = [Ratio(**point["times_plain"][figure]) for figure in JUDGED]
        table.add_row(
            f"{point['load']}, {point['rate_rps']:.2f}/s", point["policy"], f"{point[THROUGHPUT]['median']:.1f}",
            str(times[0]), str(times[1]), f"{point[LATENCY]['median']:.2f}", str(times[2]),
        )  # fmt: skip
    console = table_console(table)
    console.print(table)
    for text in aims(points):
        console.print(text, highlight=False, soft_wrap=True)
