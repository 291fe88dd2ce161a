"""One policy against each of the others, setting by setting: differences, and how many of them are sure."""

from __future__ import annotations

from adaserve_jax.report.differences import Pair, cells, columns, how_paired, tally
from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT
from adaserve_jax.report.setting import AXES
from adaserve_jax.report.view import View

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
    return Section("versus", f"{ours} against the others", (*texts, _table(view, ours, pairs)))


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


def _table(view: View, ours: str, pairs: dict[str, list[Pair]]) -> Table:
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
