"""The lines of sweeps.jsonl and what follows: every contender at each point, tables, and how `adaserve` stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adaserve_jax.bench.simulate import TUNED
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.results.submission import LEAST_SPAN
from benchmarks import markdown
from benchmarks.adaserve.sweeps_points import (
    BASELINE_GROUP,
    OURS,
    OVERLOAD,
    OVERLOAD_FROM_S,
    OVERLOAD_S,
    PAPER,
    SWEEPS,
    TARGETS,
    contenders,
)

KINDS = {"tpot": "TPOT targets only", "joint": "TPOT targets and TTFT within 4 s"}
"""What each kind of targets is called."""


@dataclass(frozen=True)
class Line:
    """One contender at one point.

    rows: result rows as in results.jsonl, over all classes first; of an earlier run (`lines_of`) what contenders.json
    keeps of them. recovery_s: seconds from the end of the overload to
    the first moment after which `submission.RECOVERED` of them meet their targets again; None if that never comes, and
    in other sweeps.
    """

    key: str
    machine: str
    sweep: str
    value: float
    targets: str
    contender: str
    group: str
    rows: tuple[dict[str, Any], ...]
    recovery_s: float | None = None

    @property
    def overall(self) -> dict[str, Any]:
        return next(row for row in self.rows if row["slo_class"] == ALL_CLASSES)

    @property
    def attainment(self) -> float:
        return self.overall["attainment"]

    @property
    def goodput(self) -> float:
        return self.overall["goodput_tps"]

    @property
    def setting(self) -> str:
        row = self.overall
        if "setting" in row:
            return row["setting"]
        chunk = row["max_prefill_tokens"] or "any"
        return f"{row['policy']}, chunk {chunk}, {row['max_requests']} running"


Group = tuple[str, str, str]
"""Machine, kind of targets, sweep."""


def grouped(lines: Sequence[Line]) -> dict[Group, dict[float, dict[str, Line]]]:
    """By machine, targets and sweep: by value: by contender; sweeps, values and contenders in order."""
    names = [contender.name for contender in contenders()]

    def place(line: Line) -> tuple[int, int, int]:
        name = names.index(line.contender) if line.contender in names else len(names)
        return list(TARGETS).index(line.targets), list(SWEEPS).index(line.sweep), name

    order = sorted(lines, key=place)
    groups: dict[Group, dict[float, dict[str, Line]]] = {}
    for line in sorted(order, key=lambda line: line.machine):
        by_value = groups.setdefault((line.machine, line.targets, line.sweep), {})
        by_value.setdefault(line.value, {})[line.contender] = line
    return {group: dict(sorted(by_value.items())) for group, by_value in groups.items()}


def best_baseline(at_point: dict[str, Line], judge: Callable[[Line], float]) -> Line | None:
    """The baseline at the paper's setting with the highest figure; of equals the first."""
    return max((line for line in at_point.values() if line.group == BASELINE_GROUP), key=judge, default=None)


def tables(result: dict[str, Any]) -> str:
    """Return a table of contenders.json for each machine, kind of targets and sweep: attainment and goodput by
    contender and value."""
    groups: dict[Group, list[dict[str, Any]]] = {}
    for point in result["points"]:
        groups.setdefault((point["machine"], point["targets"], point["sweep"]), []).append(point)
    parts = []
    for (machine, targets, sweep), points in groups.items():
        names = list(dict.fromkeys(name for point in points for name in point["contenders"]))
        head = markdown.line("policy", *(f"{point['value']:g}" for point in points))
        rows = [markdown.line(f"`{name}`", *(_cell(point, name) for point in points)) for name in names]
        settings = [
            f"{point['value']:g}: {point['contenders'][TUNED]['setting']}"
            for point in points if TUNED in point["contenders"]
        ]  # fmt: skip
        parts += [
            f"## {machine}, {KINDS[targets]}: by {SWEEPS[sweep]}",
            f"{max(point['requests'] for point in points)} requests at most.",
            "\n".join([head, f"|{'---|' * (1 + len(points))}", *rows]),
            *([f"Settings of `{TUNED}`, by column: {'; '.join(settings)}."] if settings else []),
        ]
    commits = ", ".join(markdown.short_commit(commit) for commit in result["commit"].split(", "))
    return "\n\n".join([*parts, f"Simulated at commit {commits}."])


def _cell(point: dict[str, Any], policy: str) -> str:
    contender = point["contenders"].get(policy)
    if contender is None:
        return "-"
    cell = f"{contender['attainment']:.1%} / {contender['goodput_tps']:.0f}"
    if "recovery_s" not in contender:
        return cell
    recovered = contender["recovery_s"]
    # Older results have moments of the last seconds too, which `recovery_s` leaves out now.
    after_s = point["requests"] / point["value"] - OVERLOAD_FROM_S - 2 * OVERLOAD_S
    never = recovered is None or recovered > (1 - LEAST_SPAN) * after_s
    return f"{cell} / {'never' if never else f'{recovered:.0f} s'}"


def contenders_by_point(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Every contender at every point: attainment, goodput and, of the tuned one, its setting."""
    return [
        {
            "machine": machine,
            "targets": targets,
            "sweep": sweep,
            "value": value,
            "requests": next(iter(at_point.values())).overall["requests"],
            "contenders": {
                name: {
                    "attainment": line.attainment,
                    "goodput_tps": line.goodput,
                    "setting": line.setting if name == TUNED else None,
                    **({"recovery_s": line.recovery_s} if sweep == OVERLOAD else {}),
                }
                for name, line in at_point.items()
            },
        }
        for (machine, targets, sweep), by_value in grouped(lines).items()
        for value, at_point in by_value.items()
    ]


def lines_of(result: dict[str, Any]) -> list[Line]:
    """Return the lines, without keys, of the contenders of an earlier run's contenders.json that there still are."""
    groups = {contender.name: contender.group for contender in contenders()}
    return [
        Line(
            "", point["machine"], point["sweep"], point["value"], point["targets"], name, groups[name],
            rows=({
                "slo_class": ALL_CLASSES, "requests": point["requests"], "attainment": told["attainment"],
                "goodput_tps": told["goodput_tps"], "setting": told["setting"], "commit": result["commit"],
            },),
            recovery_s=told.get("recovery_s"),
        )
        for point in result["points"] for name, told in point["contenders"].items() if name in groups
    ]  # fmt: skip


def verdict(lines: Sequence[Line]) -> dict[str, Any]:
    """points: how `adaserve` stands at each. overall: by machine and kind of targets, the extremes.

    violation_ratio: violations of the best baseline at the paper's setting over ours; None where we have none. A figure
    is None as well where the contender that it needs was not run.
    """
    judged = [
        _judge(group, value, at_point)
        for group, by_value in grouped(lines).items()
        for value, at_point in by_value.items()
        if OURS in at_point
    ]
    overall = {}
    for machine, targets in dict.fromkeys((point["machine"], point["targets"]) for point in judged):
        mine = [point for point in judged if (point["machine"], point["targets"]) == (machine, targets)]
        rates = [point for point in mine if point["sweep"] == "rate"]
        highest = max(rates, key=lambda point: point["value"], default=None)
        overall[f"{machine} {targets}"] = {
            "points": len(mine),
            "points_without_violations": sum(point["attainment"] == 1 for point in mine),
            "points_below_best_baseline": _below(mine, "minus_best_baseline"),
            "points_below_tuned": _below(mine, "minus_tuned"),
            "largest_violation_ratio": _extreme(max, mine, "violation_ratio"),
            "least_violation_ratio": _extreme(min, mine, "violation_ratio"),
            "goodput_ratio_at_highest_rate": None if highest is None else highest["goodput_ratio"],
            "least_minus_tuned": _extreme(min, mine, "minus_tuned"),
            "largest_minus_tuned": _extreme(max, mine, "minus_tuned"),
            "least_minus_paper": _extreme(min, mine, "minus_paper"),
        }
    return {"overall": overall, "points": judged}


def _judge(group: Group, value: float, at_point: dict[str, Line]) -> dict[str, Any]:
    ours, tuned, paper = at_point[OURS], at_point.get(TUNED), at_point.get(PAPER)
    best = best_baseline(at_point, lambda line: line.attainment)
    richest = best_baseline(at_point, lambda line: line.goodput)
    violations = 1 - ours.attainment
    ratio = None if best is None or violations <= 0 else (1 - best.attainment) / violations
    return {
        "machine": group[0],
        "targets": group[1],
        "sweep": group[2],
        "value": value,
        "attainment": ours.attainment,
        "goodput_tps": ours.goodput,
        "best_baseline": None if best is None else best.contender,
        "best_baseline_attainment": None if best is None else best.attainment,
        "minus_best_baseline": None if best is None else ours.attainment - best.attainment,
        "violation_ratio": ratio,
        "best_goodput_baseline": None if richest is None else richest.contender,
        "goodput_ratio": None if richest is None or not richest.goodput else ours.goodput / richest.goodput,
        "tuned_setting": None if tuned is None else tuned.setting,
        "minus_tuned": None if tuned is None else ours.attainment - tuned.attainment,
        "goodput_ratio_to_tuned": None if tuned is None or not tuned.goodput else ours.goodput / tuned.goodput,
        "minus_paper": None if paper is None else ours.attainment - paper.attainment,
    }


def _below(points: Sequence[dict[str, Any]], name: str) -> int:
    return sum(point[name] is not None and point[name] < 0 for point in points)


def _extreme(pick: Callable[..., Any], points: Sequence[dict[str, Any]], name: str) -> float | None:
    return pick((point[name] for point in points if point[name] is not None), default=None)
