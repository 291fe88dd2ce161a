"""A run beside an earlier one: the same points matched, differences with their intervals, and what was not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from adaserve_jax.report.conditions import differing
from adaserve_jax.report.differences import Pair, cells, columns, tally
from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT
from adaserve_jax.report.points import Group, Measured
from adaserve_jax.report.setting import AXES, Setting
from adaserve_jax.report.view import View
from adaserve_jax.report.words import listed


def comparison(view: View, against: Measured) -> Section:
    """Every difference is this run minus the earlier one."""
    pairs, only_now, only_then = match(view.measured, against)
    then = listed(against.sources)
    items: list[Text | Table] = [Text(text, warns=True) for text in _unlike(pairs, then)]
    if pairs:
        items += [Text(tally(view.estimates, pairs, measure)) for measure in (ATTAINMENT, GOODPUT)]
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
    axes = dict.fromkeys(("rate_rps", *measured.varied))
    return [f"{group.who} {group.setting.describe(axes)}" for group in left]


def _unlike(pairs: Sequence[Pair], then: str) -> Iterator[str]:
    """What makes the differences something else than those of the code."""
    if not pairs:
        yield f"No point of this run has one of the same policy and setting in {then}."
        return
    now_points = [point for pair in pairs for point in pair.ours.points]
    then_points = [point for pair in pairs for point in pair.theirs.points]
    for name, here, there in differing(now_points, then_points):
        yield f"The {name} differs: {here} now, {there} in {then}."
    unpaired = [pair for pair in pairs if pair.has_records and not pair.same_requests]
    if unpaired:
        yield (
            f"{len(unpaired)} of {len(pairs)} points did not get the same requests at the same times: their "
            "differences are those of independent samples, with wider intervals."
        )


def _table(view: View, pairs: Sequence[Pair], then: str) -> Table:
    axes = view.measured.varied
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    first = len(axes) + 2
    for pair in sorted(pairs, key=lambda pair: pair.ours.setting.order):
        for name in view.classes:
            if _holds(pair.ours, name) and _holds(pair.theirs, name):
                found, better = cells(view.estimates, pair, name)
                strong |= {(len(rows), first + column) for column in better}
                rows.append((pair.ours.who, *(pair.ours.setting.cell(axis) for axis in axes), name, *found))
    titles = ("policy", *(AXES[axis][0] for axis in axes), "requests", *columns("then / now"))
    caption = (
        f"This run minus {then}, 95% intervals in parentheses; better and worse are said where the interval "
        "excludes 0. The ratio is that of violations then to violations now: above 1 there are fewer now."
    )
    numeric = frozenset(range(first, len(titles)))
    return Table("differences", "Differences", view.caption(caption), titles, tuple(rows), numeric, frozenset(strong))


def _holds(group: Group, slo_class: str) -> bool:
    return any(slo_class in point.rows for point in group.points)
