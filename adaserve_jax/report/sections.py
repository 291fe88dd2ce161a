"""Measures against whatever a run varied: rate, urgent share, scale of targets, burstiness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from adaserve_jax.report.document import Figure, Panel, Section, Series, Table, Text
from adaserve_jax.report.estimates import cell, heading, listed, ms, number, percent, titled
from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    GOODPUT_TPOT,
    MEAN_ACCEPTED,
    PERCENTILES,
    THROUGHPUT,
    TPOT_P50,
    WITH_TARGET,
    WITHOUT_TARGET,
    Columns,
    Measure,
)
from adaserve_jax.report.points import AXES, AXIS_LABELS, Group, Setting
from adaserve_jax.report.view import MOST_PANELS, View, series_of, spread
from adaserve_jax.results.schema import ALL_CLASSES, Summary

JOINT = (ATTAINMENT, GOODPUT)
TPOT_ONLY = (ATTAINMENT_TPOT, GOODPUT_TPOT)
ONLY_ALL = (THROUGHPUT,)
"""Measures of the whole machine, that have no use by class."""
SAME = (
    "Joint and TPOT-only figures are the same here, as no request missed its TTFT target alone: only the joint ones "
    "are drawn."
)


def curves(view: View) -> Section:
    """One figure per axis and measure, a panel per class; bars by class where nothing varies."""
    measures = _measures(view)
    drawn = figures(view, measures)
    if ATTAINMENT_TPOT in measures:
        return Section("curves", "Attainment and goodput", tuple(drawn))
    return Section("curves", "Attainment and goodput", (Text(SAME), *drawn))


def figures(view: View, measures: Sequence[Measure]) -> list[Figure]:
    """Each measure along each axis that varies; by class at the focus where none does."""
    lines = [figure for axis in view.axes for figure in _along(view, axis, measures)]
    return lines or [by_class(view, measure) for measure in measures]


def _measures(view: View) -> tuple[Measure, ...]:
    """Those worth a figure: TPOT-only ones where they differ from the joint ones anywhere."""
    groups = view.measured.groups.values()
    differ = any(
        view.estimates.value(group, joint) != view.estimates.value(group, tpot)
        for group in groups
        for joint, tpot in zip(JOINT, TPOT_ONLY, strict=True)
    )
    return (*JOINT, *(TPOT_ONLY if differ else ()), THROUGHPUT)


def _along(view: View, axis: str, measures: Sequence[Measure]) -> Iterator[Figure]:
    for index, (held, settings) in enumerate(view.slices(axis)):
        key = f"{axis.removesuffix('_rps').replace('_', '-')}{f'-{index + 1}' if index else ''}"
        for measure in measures:
            yield _figure(view, axis, settings, held, measure, key)


def _figure(view: View, axis: str, settings: Sequence[Setting], held: str, measure: Measure, key: str) -> Figure:
    classes = (ALL_CLASSES,) if measure in ONLY_ALL else view.classes
    x = [setting.number(axis) for setting in settings]
    intervals = "Bands: 95% intervals." if any(group.has_records for group in view.measured.groups.values()) else ""
    return Figure(
        key=f"{measure.name.removesuffix('_tps').replace('_', '-')}-by-{key}",
        title=f"{titled(measure)} against {AXES[axis][0]}" + (f", at {held}" if held else ""),
        caption=view.caption(f"{_said(measure)} {intervals}".strip()),
        kind="line",
        x_label=AXIS_LABELS[axis],
        panels=tuple(_panel(view, axis, settings, measure, name) for name in classes),
        log_x=axis == "rate_rps" and len(x) > 2 and x[0] > 0 and x[-1] / x[0] >= 16,
    )


def _panel(view: View, axis: str, settings: Sequence[Setting], measure: Measure, slo_class: str) -> Panel:
    series = []
    for who in view.measured.whos:
        groups = [view.measured.groups.get((who, setting)) for setting in settings]
        known = [(s, g) for s, g in zip(settings, groups, strict=True) if g is not None]
        estimates = [view.estimates.of(group, measure, slo_class) for _, group in known]
        if any(each.value is not None for each in estimates):
            x = [setting.number(axis) for setting, _ in known]
            series.append(series_of(who, x, estimates, view.colour(who)))
    return _axes(slo_class, series, measure)


def by_class(view: View, measure: Measure) -> Figure:
    """Bars at the focus, of all requests and of each class."""
    classes = (ALL_CLASSES,) if measure in ONLY_ALL else view.classes
    found = {g.who: [view.estimates.of(g, measure, name) for name in classes] for g in view.focus_groups()}
    series = [
        series_of(who, classes, estimates, view.colour(who))
        for who, estimates in found.items()
        if any(each.value is not None for each in estimates)
    ]
    return Figure(
        key=f"{measure.name.removesuffix('_tps').replace('_', '-')}-by-class",
        title=f"{titled(measure)} by class",
        caption=view.caption(f"{_said(measure)} {view.at_focus} Whiskers: 95% intervals."),
        kind="bars",
        x_label="SLO class",
        panels=(_axes("", series, measure),),
    )


def _axes(title: str, series: Sequence[Series], measure: Measure) -> Panel:
    share = measure.unit == "share"
    return Panel(title, tuple(series), heading(measure), (0.0, 1.0) if share else None, share)


def _said(measure: Measure) -> str:
    return {
        ATTAINMENT: "Requests that finished and met all targets that they carry, of all that carry one.",
        ATTAINMENT_TPOT: "Requests that met their TPOT target, of all that carry one; the first token may be late.",
        GOODPUT: "Output tokens of requests that met all their targets, per second.",
        GOODPUT_TPOT: "Output tokens of requests that met their TPOT target, per second.",
        THROUGHPUT: "All output tokens per second.",
        MEAN_ACCEPTED: "Accepted draft tokens per verification of a request; the bonus token is not counted.",
    }[measure]


# Times of requests: percentiles of TTFT, TPOT and queueing, and how TPOT stands to each request's own target.

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


# How much speculation earned: accepted tokens per verification, and the drafts they are of.


def acceptance(view: View) -> Section | None:
    """None: nobody drafted."""
    if not any(_sums(group)[1] for group in view.measured.groups.values()):
        return None
    bars = by_class(view, MEAN_ACCEPTED)
    lines = [figure for figure in figures(view, (MEAN_ACCEPTED,)) if figure.key != bars.key]
    return Section("acceptance", "Accepted tokens", (bars, *lines, _acceptance_table(view)))


def _acceptance_table(view: View) -> Table:
    rows = []
    for group, first in view.along_line():
        steps, drafted, accepted = _sums(group)
        if drafted:
            rate = percent(accepted / drafted)
            counts = (f"{steps:,}", f"{drafted:,}", f"{accepted:,}", rate)
            rows.append((*first, *counts, cell(MEAN_ACCEPTED, view.estimates.of(group, MEAN_ACCEPTED))))
    columns = (
        *view.line_titles, "verifications", "drafted", "accepted", "acceptance rate",
        MEAN_ACCEPTED.title,
    )  # fmt: skip
    numeric = frozenset(range(len(view.line_titles), len(columns)))
    caption = "Verifications are counted per request; drafted tokens are those that were verified."
    return Table("drafts", "Drafts and what became of them", view.caption(caption), columns, tuple(rows), numeric)


def _sums(group: Group) -> tuple[int, int, int]:
    """Verifications, drafted and accepted tokens of all repeats."""
    rows = [point.row for point in group.points]
    return (
        sum(row.verify_steps for row in rows), sum(row.drafted_tokens for row in rows),
        sum(row.accepted_tokens for row in rows),
    )  # fmt: skip


# What one user gets against what the machine gives: tokens per second of one request, and of all together.


def pareto(view: View) -> Section | None:
    """None: no group has both figures."""
    axes = view.measured.varied
    known = [(group, at) for group in view.measured.groups.values() if (at := _place(view, group)) is not None]
    if not known:
        return None
    series = []
    for who in view.measured.whos:
        own = sorted(((g, at) for g, at in known if g.who == who), key=lambda each: each[0].setting.order)
        if own:
            x, y = zip(*(at for _, at in own), strict=True)
            labels = tuple(group.setting.describe(axes) for group, _ in own)
            series.append(Series(who, x, y, labels=labels, colour=view.colour(who)))
    front = [f"{group.who} {group.setting.describe(axes)}".strip() for group, _ in undominated(known)]
    figure = Figure(
        key="pareto",
        title="Tokens per second and user against tokens per second",
        caption=view.caption("Each mark is one setting. A user's rate is 1 / median TPOT over all requests."),
        kind="scatter",
        x_label="all output tokens per second",
        panels=(Panel("", tuple(series), "tokens per second and user"),),
    )
    text = f"No other setting gives both more to each user and more in all than {listed(front)}."
    return Section("pareto", "Users and machine", (figure, Text(text)))


def undominated(
    placed: Sequence[tuple[Group, tuple[float, float]]],
) -> list[tuple[Group, tuple[float, float]]]:
    """Those to which no other is equal or better in both and better in one, from least to most throughput."""
    front = [
        (group, at)
        for group, at in placed
        if not any(other[0] >= at[0] and other[1] >= at[1] and other != at for _, other in placed)
    ]
    return sorted(front, key=lambda each: each[1])


def _place(view: View, group: Group) -> tuple[float, float] | None:
    throughput, tpot_s = (view.estimates.value(group, measure) for measure in (THROUGHPUT, TPOT_P50))
    return (throughput, 1 / tpot_s) if throughput and tpot_s else None


# Where the time of a step goes: planning, drafting, selecting, verifying and committing, from samples.

TITLE = "Where the time goes"
NO_SAMPLES = "No point has samples: what was measured through a URL has none, nor have runs from before they existed."
PHASES = ("plan_s", "draft_s", "select_s", "verify_s", "commit_s")


@dataclass(frozen=True)
class Steps:
    """What the last samples of all repeats counted. seconds: by phase; of_s: that they cover; wait_s: waiting for the
    device, inside of drafting and verifying."""

    steps: int
    spec_steps: int
    preemptions: int
    swaps: int
    seconds: tuple[float, ...]
    wait_s: float
    of_s: float

    @classmethod
    def of(cls, group: Group) -> Steps | None:
        """None: a point has no samples, or no step was taken."""
        if not all(point.samples for point in group.points):
            return None
        last = [max(point.samples, key=lambda s: s.t_s) for point in group.points]
        if not any(sample.steps for sample in last):
            return None
        return cls(
            steps=sum(s.steps for s in last),
            spec_steps=sum(s.spec_steps for s in last),
            preemptions=sum(s.preemptions for s in last),
            swaps=sum(s.swaps for s in last),
            seconds=tuple(sum(getattr(s, phase) for s in last) for phase in PHASES),
            wait_s=sum(s.wait_s for s in last),
            of_s=sum(s.t_s for s in last),
        )


def phases(view: View) -> Section:
    known = {group: steps for group in view.measured.groups.values() if (steps := Steps.of(group)) is not None}
    if not known:
        return Section("phases", TITLE, (Text(NO_SAMPLES),))
    panels = []
    for setting in spread(view.line, MOST_PANELS):
        groups = [group for group in view.measured.at(setting) if group in known]
        if groups:
            series = tuple(
                Series(
                    phase.removesuffix("_s"),
                    tuple(group.who for group in groups),
                    tuple(known[group].seconds[i] / known[group].steps * 1e3 for group in groups),
                    colour=i,
                )
                for i, phase in enumerate(PHASES)
            )
            panels.append(Panel(setting.describe(view.measured.varied), series, "ms per step"))
    items: list[Figure | Table | Text] = []
    if panels:
        text = "Mean milliseconds of a step by phase; drafting is spread over all steps, also those without a draft."
        items.append(Figure("phases", "Time per phase", view.caption(text), "stack", "policy", tuple(panels)))
    items.append(_phases_table(view, known))
    absent = dict.fromkeys(group.who for group in view.measured.groups.values() if group not in known)
    if absent:
        items.append(Text(f"Without samples, and so without phases, at some setting or all: {listed(list(absent))}."))
    return Section("phases", TITLE, tuple(items))


def _phases_table(view: View, known: dict[Group, Steps]) -> Table:
    rows = []
    for group, first in view.along_line():
        if group in known:
            steps = known[group]
            busy_s = sum(steps.seconds)
            cells = (
                f"{steps.steps:,}", percent(steps.spec_steps / steps.steps), ms(busy_s / steps.steps),
                percent(steps.wait_s / busy_s if busy_s else None),
                percent(busy_s / steps.of_s if steps.of_s else None), f"{steps.preemptions:,}", f"{steps.swaps:,}",
            )  # fmt: skip
            rows.append((*first, *cells))
    columns = (
        *view.line_titles, "steps", "that drafted", "ms per step", "waiting for the device",
        "of the time in steps", "preemptions", "swaps of the draft",
    )  # fmt: skip
    numeric = frozenset(range(len(view.line_titles), len(columns)))
    caption = "From the last sample of each point, warm-up not counted."
    return Table("steps", "Steps", view.caption(caption), columns, tuple(rows), numeric)


# Why requests missed their targets: the causes that results name, stacked to all violations.

CAUSES = tuple(field.name for field in fields(Summary) if field.name.startswith("cause_"))


def violations(view: View) -> Section | None:
    """None: no request carries a target."""
    missed = [setting for setting in view.measured.settings if any(map(_missed, view.measured.at(setting)))]
    settings = [setting for setting in view.line if setting in missed] or missed
    shown = spread(settings, MOST_PANELS)
    panels = []
    for setting in shown:
        groups = [group for group in view.measured.at(setting) if targeted(group)]
        series = tuple(
            Series(
                _name(cause), tuple(g.who for g in groups), tuple(cause_share(g, cause) for g in groups), colour=colour
            )
            for colour, cause in enumerate(CAUSES)
            if any(cause_share(group, cause) for group in groups)
        )
        title = setting.describe(view.measured.varied)
        panels.append(Panel(title, series, "share of requests with a target", None, True))
    if not panels:
        if not any(targeted(group) for group in view.measured.groups.values()):
            return None
        return Section("violations", "Violations", (Text("Every request met every target that it carries."),))
    figure = Figure(
        key="causes",
        title="Violations by cause",
        caption=view.caption(
            "Of the requests with a target those that missed one, by the first cause that applies (docs/metrics.md); a "
            "stack's height is 1 - attainment."
            + (f" {more} more settings with violations are not shown." if (more := len(missed) - len(shown)) else "")
        ),
        kind="stack",
        x_label="policy",
        panels=tuple(panels),
    )
    return Section("violations", "Violations", (figure,))


def targeted(group: Group) -> int:
    """Requests with a target, of all repeats."""
    return sum(point.row.requests_with_slo for point in group.points)


def _missed(group: Group) -> bool:
    return any(getattr(point.row, cause) for point in group.points for cause in CAUSES)


def cause_share(group: Group, cause: str) -> float:
    """Violations of one cause over the requests with a target."""
    return sum(getattr(point.row, cause) for point in group.points) / targeted(group)


def _name(cause: str) -> str:
    return cause.removeprefix("cause_").replace("_", " ")
