"""Measures against whatever a run varied: rate, urgent share, scale of targets, burstiness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaserve_jax.report.document import Figure, Panel, Section, Series, Text
from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    GOODPUT_TPOT,
    MEAN_ACCEPTED,
    THROUGHPUT,
    Measure,
)
from adaserve_jax.report.setting import AXES, AXIS_LABELS, Setting
from adaserve_jax.report.view import View, series_of
from adaserve_jax.report.words import heading, titled
from adaserve_jax.results.schema import ALL_CLASSES

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
    for number, (held, settings) in enumerate(view.slices(axis)):
        key = f"{axis.removesuffix('_rps').replace('_', '-')}{f'-{number + 1}' if number else ''}"
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
