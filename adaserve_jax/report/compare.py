"""A run beside an earlier one: the same points matched, differences with their intervals, and what was not alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.estimates import Pair, cells, columns, how_paired, listed, tally
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT
from adaserve_jax.report.points import AXES, Group, Measured, Setting
from adaserve_jax.report.view import View, differing


def comparison(view: View, against: Measured) -> Section:
    """Every difference is this run minus the earlier one."""
    pairs = match(view.measured, against)
    then = listed(against.sources)
    items: list[Text | Table] = [Text(text, warns=True) for text in _unlike(view, pairs, then)]
    if pairs:
        items += [Text(tally(view.estimates, pairs, measure)) for measure in (ATTAINMENT, GOODPUT)]
        items.append(_table(view, pairs, then))
    items += [Text(text) for text in _unmatched(view.measured, against, "this run")]
    items += [Text(text) for text in _unmatched(against, view.measured, then)]
    return Section("comparison", f"Compared with {then}", tuple(items))


def match(now: Measured, then: Measured) -> list[Pair]:
    """Groups that both have once, by policy and setting."""
    ours, theirs = _by_key(now), _by_key(then)
    return [
        Pair(groups[0], theirs[key][0])
        for key, groups in ours.items()
        if len(groups) == 1 and len(theirs.get(key, ())) == 1
    ]


def _by_key(measured: Measured) -> dict[tuple[str, Setting], list[Group]]:
    """By policy without the folder before it: several folders may have the same one."""
    keyed: dict[tuple[str, Setting], list[Group]] = defaultdict(list)
    for group in measured.groups.values():
        keyed[group.points[0].served_by, group.setting].append(group)
    return keyed


def _unmatched(measured: Measured, other: Measured, where: str) -> Iterator[str]:
    """Which groups are compared with nothing, and why."""
    own, others = _by_key(measured), _by_key(other)
    axes = dict.fromkeys(("rate_rps", *measured.varied))
    alone = [group for key, groups in own.items() if key not in others for group in groups]
    several = [group for key, groups in own.items() if key in others and len(groups) > 1 for group in groups]
    for groups, why in ((alone, f"only in {where}"), (several, f"in {where} more than once")):
        if groups:
            named = [f"{group.who} {group.setting.describe(axes)}" for group in groups]
            yield f"Not compared, being {why}: {listed(named)}."


def _unlike(view: View, pairs: Sequence[Pair], then: str) -> Iterator[str]:
    """What makes the differences something else than those of the code."""
    if not pairs:
        yield f"No point of this run has one of the same policy and setting in {then}."
        return
    now_points = [point for pair in pairs for point in pair.ours.points]
    then_points = [point for pair in pairs for point in pair.theirs.points]
    for name, here, there in differing(now_points, then_points):
        yield f"The {name} differs: {here} now, {there} in {then}."
    yield from how_paired(view.estimates, pairs)


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


# One policy against each of the others, setting by setting: differences, and how many of them are sure.

OURS = "adaserve"
"""Who is set against the others; the first policy where it was not measured."""
MOST_ROWS = 60


def versus(view: View) -> Section | None:
    """None: no setting has a second policy."""
    ours = who_is_ours(view)
    pairs = {other: pairs for other in view.measured.whos if other != ours and (pairs := pairs_of(view, ours, other))}
    if not pairs:
        return None
    texts = [
        Text(f"{ours} against {other}. {' '.join(tally(view.estimates, each, m) for m in (ATTAINMENT, GOODPUT))}")
        for other, each in pairs.items()
    ]
    every = [pair for each in pairs.values() for pair in each]
    texts += [Text(text) for text in how_paired(view.estimates, every)]
    return Section("versus", f"{ours} against the others", (*texts, _versus_table(view, ours, pairs)))


def who_is_ours(view: View) -> str:
    ours = (group.who for group in view.measured.groups.values() if group.points[0].served_by == OURS)
    return next(ours, view.measured.whos[0])


def pairs_of(view: View, ours: str, theirs: str) -> list[Pair]:
    """Of the settings that both were measured at."""
    groups = view.measured.groups
    return [
        Pair(groups[ours, setting], groups[theirs, setting])
        for setting in view.measured.settings
        if (ours, setting) in groups and (theirs, setting) in groups
    ]


def _versus_table(view: View, ours: str, pairs: dict[str, list[Pair]]) -> Table:
    axes = view.measured.varied
    shown = view.measured.settings if sum(map(len, pairs.values())) <= MOST_ROWS else view.line
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    for other, each in pairs.items():
        for pair in each:
            if pair.ours.setting in shown:
                found, better = cells(view.estimates, pair)
                strong |= {(len(rows), len(axes) + 1 + column) for column in better}
                rows.append((other, *(pair.ours.setting.cell(axis) for axis in axes), *found))
    titles = ("against", *(AXES[axis][0] for axis in axes), *columns(f"theirs / of {ours}"))
    caption = (
        f"{ours} minus the other, in parentheses the 95% intervals of differences, paired where both had the same "
        "requests; better and worse are said where the interval excludes 0. Above 1 the ratio says that the other "
        "violates more."
    )
    numeric = frozenset(range(len(axes) + 1, len(titles)))
    return Table("versus", "Differences", view.caption(caption), titles, tuple(rows), numeric, frozenset(strong))
