"""A run beside an earlier one: the same points matched, differences with their intervals, and what was not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adaserve_jax.report.conditions import differing
from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.estimates import Estimate, Estimates
from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    TPOT_P50,
    TPOT_P99,
    TTFT_P99,
    VIOLATIONS,
    Measure,
)
from adaserve_jax.report.points import Group, Measured
from adaserve_jax.report.setting import AXES, Setting
from adaserve_jax.report.view import View
from adaserve_jax.report.words import difference_cell, heading, listed
from adaserve_jax.results.schema import ALL_CLASSES

MEASURES = (ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, TPOT_P50, TPOT_P99, TTFT_P99)


@dataclass(frozen=True)
class Pair:
    """The same setting under the same policy, now and then."""

    now: Group
    then: Group


def comparison(view: View, against: Measured) -> Section:
    """Every difference is this run minus the earlier one."""
    pairs, only_now, only_then = match(view.measured, against)
    then = listed(against.sources)
    items: list[Text | Table] = [Text(text, warns=True) for text in _unlike(pairs, then)]
    if pairs:
        items += [Text(_summary(view.estimates, pairs, measure)) for measure in (ATTAINMENT, GOODPUT)]
        items.append(_table(view, pairs, then))
    for names, where in ((only_now, "only in this run"), (only_then, f"only in {then}")):
        if names:
            items.append(Text(f"Not compared, being {where}: {listed(names)}."))
    return Section("comparison", f"Compared with {then}", tuple(items))


def match(now: Measured, then: Measured) -> tuple[list[Pair], list[str], list[str]]:
    """Groups that both have, by policy and setting, and the names of those that only one has."""
    ours, theirs = _by_key(now), _by_key(then)
    pairs = [Pair(ours[key], theirs[key]) for key in ours if key in theirs]
    return pairs, _names(now, ours, theirs), _names(then, theirs, ours)


def _by_key(measured: Measured) -> dict[tuple[str, Setting], Group]:
    """By policy without the folder before it; what is there twice cannot be matched."""
    keyed = [((group.points[0].served_by, group.setting), group) for group in measured.groups.values()]
    count = Counter(key for key, _ in keyed)
    return {key: group for key, group in keyed if count[key] == 1}


def _names(
    measured: Measured, keyed: dict[tuple[str, Setting], Group], other: dict[tuple[str, Setting], Group]
) -> list[str]:  # fmt: skip
    matched = {id(group) for key, group in keyed.items() if key in other}
    left = (group for group in measured.groups.values() if id(group) not in matched)
    return [f"{group.who} {group.setting.describe()}" for group in left]


def _unlike(pairs: Sequence[Pair], then: str) -> Iterator[str]:
    """What makes the differences something else than those of the code."""
    if not pairs:
        yield f"No point of this run has one of the same policy and setting in {then}."
        return
    now_points = [point for pair in pairs for point in pair.now.points]
    then_points = [point for pair in pairs for point in pair.then.points]
    for name, here, there in differing(now_points, then_points):
        yield f"The {name} differs: {here} now, {there} in {then}."
    unpaired = [
        pair for pair in pairs
        if pair.now.has_records and pair.then.has_records and not pair.now.columns.same_requests(pair.then.columns)
    ]  # fmt: skip
    if unpaired:
        yield (
            f"{len(unpaired)} of {len(pairs)} points did not get the same requests at the same times: their "
            "differences are those of independent samples, with wider intervals."
        )


def _summary(estimates: Estimates, pairs: Sequence[Pair], measure: Measure) -> str:
    """How often it is better, worse, and neither beyond chance."""
    found = [estimates.difference(pair.now, pair.then, measure) for pair in pairs]
    sure = [each.value for each in found if each.is_not_zero and each.value is not None]
    better = sum(measure.better(value, 0.0) for value in sure)
    name = f"{measure.title[0].upper()}{measure.title[1:]}"
    return (
        f"{name}: better at {better} of {len(pairs)} points, worse at {len(sure) - better}, and at "
        f"{len(pairs) - len(sure)} not told apart (95% intervals)."
    )


def _table(view: View, pairs: Sequence[Pair], then: str) -> Table:
    axes = view.measured.varied
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    first = len(axes) + 2
    for pair in sorted(pairs, key=lambda pair: pair.now.setting.order):
        for name in view.classes:
            if name != ALL_CLASSES and not all(_holds(group, name) for group in (pair.now, pair.then)):
                continue
            found = [view.estimates.difference(pair.now, pair.then, measure, name) for measure in MEASURES]
            for column, (measure, each) in enumerate(zip(MEASURES, found, strict=True), first):
                if each.is_not_zero and measure.better(each.value or 0.0, 0.0):
                    strong.add((len(rows), column))
            cells = (difference_cell(measure, each) for measure, each in zip(MEASURES, found, strict=True))
            ratio = _ratio_cell(view.estimates.violation_ratio(pair.then, pair.now, name))
            rows.append((*(pair.now.setting.cell(axis) for axis in axes), pair.now.who, name, *cells, ratio))
    titles = (heading(m) + (", points" if m.unit == "share" else "") for m in MEASURES)
    columns = (*(AXES[axis][0] for axis in axes), "policy", "requests", *titles, f"{VIOLATIONS.title}, then / now")
    caption = (
        f"This run minus {then}, 95% intervals in parentheses; better and worse are said where the interval excludes "
        "0. The ratio is that of violations then to violations now: above 1 there are fewer now."
    )
    numeric = frozenset(range(first, len(columns)))
    return Table("differences", "Differences", view.caption(caption), columns, tuple(rows), numeric, frozenset(strong))


def _holds(group: Group, slo_class: str) -> bool:
    return any(slo_class in point.rows for point in group.points)


def _ratio_cell(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    text = f"{estimate.value:.2f}"
    return (
        text if estimate.low is None or estimate.high is None else f"{text} ({estimate.low:.2f} to {estimate.high:.2f})"
    )
