"""Times of requests: percentiles of TTFT, TPOT and queueing, and how TPOT stands to each request's own target."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from adaserve_jax.report.columns import WITH_TARGET, WITHOUT_TARGET, Columns
from adaserve_jax.report.document import Figure, Panel, Section, Series, Table, Text
from adaserve_jax.report.measures import PERCENTILES
from adaserve_jax.report.points import Group
from adaserve_jax.report.view import View
from adaserve_jax.report.words import number
from adaserve_jax.results.schema import ALL_CLASSES

TIMES_OVER = np.linspace(0.0, 3.0, 151)
"""Where the distribution of TPOT / target is told; 1 is one of them."""


def latency(view: View) -> Section:
    items: list[Text | Table | Figure] = [_table(view)]
    figure = _distribution(view)
    if figure is not None:
        items.append(figure)
    return Section("latency", "Latency", tuple(items))


def _table(view: View) -> Table:
    rows = tuple((*first, *cells) for group, first in view.along_line() for cells in _rows(view, group))
    columns = (*view.line_titles, "requests", "number", "finished", *(m.title for m in PERCENTILES))
    others = view.measured.varied[1:]
    where = f" At {view.focus.describe(others)}." if others else ""
    caption = f"Milliseconds, over all requests that have the time; those that did not finish too.{where}"
    numeric = frozenset(range(len(view.line_titles) + 1, len(columns)))
    return Table("percentiles", "TTFT and TPOT percentiles", view.caption(caption), columns, rows, numeric)


def _rows(view: View, group: Group) -> Iterator[tuple[str, ...]]:
    """Of all requests, of those with and without a target where there are both, and of each class."""
    for name in (ALL_CLASSES, *_kinds(group), *view.measured.classes):
        count = _counts(group, name)
        if count[0]:
            times = (number("s", view.estimates.value(group, measure, name)) for measure in PERCENTILES)
            yield (name, f"{count[0]:,}", f"{count[1]:,}", *times)


def _kinds(group: Group) -> tuple[str, ...]:
    if not group.has_records:
        return ()
    with_target = group.columns.mask(WITH_TARGET)
    return (WITH_TARGET, WITHOUT_TARGET) if with_target.any() and not with_target.all() else ()


def _counts(group: Group, name: str) -> tuple[int, int]:
    """Requests, and those of them that finished."""
    if name in (WITH_TARGET, WITHOUT_TARGET):
        mask = group.columns.mask(name)
        return int(mask.sum()), int(group.columns.finished[mask].sum())
    rows = [point.rows[name] for point in group.points if name in point.rows]
    return sum(row.requests for row in rows), sum(row.finished for row in rows)


def _distribution(view: View) -> Figure | None:
    """Of requests with a TPOT target: the share at or below each multiple of it. None: nobody carries one."""
    groups = [group for group in view.focus_groups() if group.has_records]
    panels = []
    for name in view.classes:
        series = tuple(
            Series(group.who, tuple(TIMES_OVER.tolist()), shares, colour=view.colour(group.who))
            for group in groups
            if (shares := shares_within(group.columns, name))
        )
        if series:
            panels.append(Panel(name, series, "share of requests", (0.0, 1.0), True))
    if not panels:
        return None
    text = (
        "Share of the requests with a TPOT target whose TPOT is at most so many times the target. At 1 it is the "
        f"TPOT-only attainment; requests that did not finish are never counted in. {view.at_focus}"
    )
    return Figure(
        key="tpot-over-target",
        title="TPOT over target",
        caption=view.caption(text.strip()),
        kind="line",
        x_label="TPOT / target",
        panels=tuple(panels),
        marks=((1.0, "target"),),
    )


def shares_within(columns: Columns, slo_class: str) -> tuple[float, ...]:
    """Share of a class's requests with TPOT / target at most each of `TIMES_OVER`; empty: nobody carries a target."""
    over = columns.tpot_over[columns.mask(slo_class)]
    over = np.sort(over[~np.isnan(over)])
    if not len(over):
        return ()
    return tuple((np.searchsorted(over, TIMES_OVER, side="right") / len(over)).tolist())
