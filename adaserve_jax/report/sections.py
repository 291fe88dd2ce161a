"""Sections of a report: curves, latency, accepted tokens, users and machine, phases of a step, violations, timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
    Measure,
    MeasureColumns,
)
from adaserve_jax.report.points import AXES, AXIS_LABELS, LoadSetting, MeasuredPoint, PointGroup, find_point
from adaserve_jax.report.view import MOST_PANELS, View, condition_line, invalid_point, series_of, spread
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ALL_CLASSES, CAUSE_COLUMNS

JOINT = (ATTAINMENT, GOODPUT)
TPOT_ONLY = (ATTAINMENT_TPOT, GOODPUT_TPOT)
ONLY_ALL = (THROUGHPUT,)
"""Measures of the whole machine, without figures by class."""
SAME_FIGURES = (
    "Joint and TPOT-only figures are the same here, as no request missed its TTFT target alone: only the joint ones "
    "are drawn."
)
TIMES_OVER = np.linspace(0.0, 3.0, 151)
"""Values of TPOT / target at which its distribution is shown; 1 is one of them."""
PHASES_TITLE = "Where the time goes"
NO_SAMPLES = "No point has samples: what was measured through a URL has none, nor have runs from before they existed."
PHASES = ("plan_s", "draft_s", "select_s", "verify_s", "commit_s")
TOKEN_RATE_S = 1.0
"""Shortest time over which a rate of tokens is taken: between two samples there may be no step, or two."""
Read = Callable[[Sample], float]
TIMELINE_PANELS: tuple[tuple[str, str, tuple[tuple[str, Read], ...]], ...] = (
    ("Draft", "levels, nodes", (("depth", lambda s: s.depth), ("width", lambda s: s.width))),
    ("Verified tree nodes", "nodes", (("verified", lambda s: s.budget),)),
    ("Requests", "requests", (("running", lambda s: s.running), ("waiting", lambda s: s.waiting))),
    ("KV pages", "pages", (
        ("used", lambda s: s.pages_used), ("all", lambda s: s.pages_total),
        ("extension used", lambda s: s.extension_used), ("extension", lambda s: s.extension_total))),
    ("Draft in device memory", "1: there", (("draft", lambda s: float(s.draft_resident)),)),
    ("Tokens", "tokens per second", ()),
)  # fmt: skip
"""Title, y axis and series of each panel over time; the last one is a rate between samples."""


def curves(view: View) -> Section:
    """Build a figure per axis and measure, with a panel per class; bars by class where nothing varies."""
    measures = _measures(view)
    drawn = figures(view, measures)
    notes = () if ATTAINMENT_TPOT in measures else (Text(SAME_FIGURES),)
    return Section("curves", "Attainment and goodput", (*notes, *drawn))


def overview(view: View) -> Figure:
    """Draw joint attainment and goodput side by side, along the first axis that varies alone, else as bars."""
    line = next(((axis, *found) for axis in view.axes for found in view.slices(axis)), None)
    if line is None:
        drawn = [by_class(view, measure) for measure in JOINT]
    else:
        axis, others, settings = line
        drawn = [_figure(view, axis, settings, others, measure, 1) for measure in JOINT]
    panels = tuple(replace(each.panels[0], title=titled(measure)) for each, measure in zip(drawn, JOINT, strict=True))
    return replace(drawn[0], key="overview", title="Attainment and goodput", caption="", panels=panels)


def figures(view: View, measures: Sequence[Measure]) -> list[Figure]:
    """Return each measure along each axis that varies, or by class at the focus where none does."""
    lines = [
        _figure(view, axis, settings, others, measure, index)
        for axis in view.axes
        for index, (others, settings) in enumerate(view.slices(axis), 1)
        for measure in measures
    ]
    return lines or [by_class(view, measure) for measure in measures]


def _measures(view: View) -> tuple[Measure, ...]:
    """Return the measures to draw: TPOT-only ones where they differ from the joint ones anywhere."""
    groups = view.measured.groups.values()
    differ = any(
        view.estimates.value(group, joint) != view.estimates.value(group, tpot)
        for group in groups
        for joint, tpot in zip(JOINT, TPOT_ONLY, strict=True)
    )
    return (*JOINT, *(TPOT_ONLY if differ else ()), THROUGHPUT)


def _figure(
    view: View, axis: str, settings: Sequence[LoadSetting], others: str, measure: Measure, index: int
) -> Figure:
    classes = (ALL_CLASSES,) if measure in ONLY_ALL else view.classes
    x = [setting.number(axis) for setting in settings]
    intervals = "Bands: 95% intervals." if any(group.has_records for group in view.measured.groups.values()) else ""
    return Figure(
        key=f"{key_of(measure.name)}-by-{key_of(axis)}" + (f"-{index}" if index > 1 else ""),
        title=f"{titled(measure)} against {AXES[axis][0]}" + (f", at {others}" if others else ""),
        caption=f"{_explanation(measure)} {intervals}".strip(),
        kind="line",
        x_label=AXIS_LABELS[axis],
        panels=tuple(_panel(view, axis, settings, measure, name) for name in classes),
        log_x=axis == "rate_rps" and len(x) > 2 and x[0] > 0 and x[-1] / x[0] >= 16,
    )


def key_of(column: str) -> str:
    """Return the name in links of a measure or an axis, without its unit."""
    return column.removesuffix("_tps").removesuffix("_rps").replace("_", "-")


def _panel(view: View, axis: str, settings: Sequence[LoadSetting], measure: Measure, slo_class: str) -> Panel:
    series = []
    for policy in view.measured.policies:
        groups = [view.measured.groups.get((policy, setting)) for setting in settings]
        known = [(s, g) for s, g in zip(settings, groups, strict=True) if g is not None]
        estimates = [view.estimates.of(group, measure, slo_class) for _, group in known]
        if any(each.value is not None for each in estimates):
            x = [setting.number(axis) for setting, _ in known]
            series.append(series_of(policy, x, estimates, view.measured.colour(policy)))
    return _axes(slo_class, series, measure)


def by_class(view: View, measure: Measure) -> Figure:
    """Draw bars at the focus, of all requests and of each class."""
    classes = (ALL_CLASSES,) if measure in ONLY_ALL else view.classes
    found = {
        g.policy: [view.estimates.of(g, measure, name) for name in classes] for g in view.measured.groups_at(view.focus)
    }
    series = [
        series_of(policy, classes, estimates, view.measured.colour(policy))
        for policy, estimates in found.items()
        if any(each.value is not None for each in estimates)
    ]
    drawn = (each for estimates in found.values() for each in estimates)
    whiskers = "Whiskers: 95% intervals." if any(each.low is not None for each in drawn) else ""
    return Figure(
        key=f"{key_of(measure.name)}-by-class",
        title=f"{titled(measure)} by class" if len(classes) > 1 else titled(measure),
        caption=" ".join(filter(None, (_explanation(measure), view.at_focus, whiskers))),
        kind="bars",
        x_label="SLO class",
        panels=(_axes("", series, measure),),
    )


def _axes(title: str, series: Sequence[Series], measure: Measure) -> Panel:
    share = measure.unit == "share"
    return Panel(title, tuple(series), heading(measure), (0.0, 1.0) if share else None, share)


def _explanation(measure: Measure) -> str:
    return {
        ATTAINMENT: "Requests that finished and met all targets that they carry, of all that carry one.",
        ATTAINMENT_TPOT: "Requests that met their TPOT target, of all that carry one; the first token may be late.",
        GOODPUT: "Output tokens of requests that met all their targets, per second.",
        GOODPUT_TPOT: "Output tokens of requests that met their TPOT target, per second.",
        THROUGHPUT: "All output tokens per second.",
        MEAN_ACCEPTED: "Accepted draft tokens per verification of a request; the bonus token is not counted.",
    }[measure]


def latency(view: View) -> Section:
    """Build the percentiles of TTFT, TPOT and queue time, and the distribution of TPOT / target."""
    figure = _distribution(view)
    return Section("latency", "Latency", (_latency_table(view), *(() if figure is None else (figure,))))


def _latency_table(view: View) -> Table:
    cancelled = any(_counts(group, ALL_CLASSES)[2] for group in view.measured.groups.values())
    ends = ("finished", "cancelled") if cancelled else ("finished",)
    columns = ("requests", "number", *ends, *(m.title for m in PERCENTILES))
    others = view.measured.varied[1:]
    where = f" At {view.focus.describe(others)}." if others else ""
    rows = ((*first, *cells) for group, first in view.along_line() for cells in _rows(view, group, len(ends)))
    text = f"Milliseconds, over all requests that have the time; those that did not finish too.{where}"
    return view.line_table("percentiles", "TTFT and TPOT percentiles", text, columns, rows, texts=1)


def _rows(view: View, group: PointGroup, ends: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for all requests, for those with and without a target where there are both, and for each class."""
    for name in (ALL_CLASSES, *_kinds(group), *view.measured.classes):
        count = _counts(group, name)
        if count[0]:
            times = (number("s", view.estimates.value(group, measure, name)) for measure in PERCENTILES)
            yield (name, *(f"{each:,}" for each in count[: 1 + ends]), *times)


def _kinds(group: PointGroup) -> tuple[str, ...]:
    if not group.has_records:
        return ()
    with_target = group.columns.mask(WITH_TARGET)
    return (WITH_TARGET, WITHOUT_TARGET) if with_target.any() and not with_target.all() else ()


def _counts(group: PointGroup, name: str) -> tuple[int, int, int]:
    """Return the number of requests, of those that finished, and of those that their client cancelled."""
    if name in (WITH_TARGET, WITHOUT_TARGET):
        mask = group.columns.mask(name)
        return int(mask.sum()), int(group.columns.finished[mask].sum()), int(group.columns.cancelled[mask].sum())
    rows = [point.rows[name] for point in group.points if name in point.rows]
    return sum(row.requests for row in rows), sum(row.finished for row in rows), sum(row.cancelled for row in rows)


def _distribution(view: View) -> Figure | None:
    """Draw the share of requests with a TPOT target at or below each multiple of it; None if no request has one."""
    groups = [group for group in view.measured.groups_at(view.focus) if group.has_records]
    panels = []
    for name in view.classes:
        series = tuple(
            Series(group.policy, tuple(TIMES_OVER.tolist()), shares, colour=view.measured.colour(group.policy))
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
        caption=text.strip(),
        kind="line",
        x_label="TPOT / target",
        panels=tuple(panels),
        marks=((1.0, "target"),),
    )


def shares_within(columns: MeasureColumns, slo_class: str) -> tuple[float, ...]:
    """Return the share of a class's requests with TPOT / target at most each of `TIMES_OVER`; empty without targets."""
    over = columns.tpot_over[columns.mask(slo_class)]
    over = np.sort(over[~np.isnan(over)])
    if not len(over):
        return ()
    return tuple((np.searchsorted(over, TIMES_OVER, side="right") / len(over)).tolist())


def acceptance(view: View) -> Section | None:
    """Build accepted tokens per verification, and counts of drafts; None if no policy drafted."""
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
    columns = ("verifications", "drafted", "accepted", "acceptance rate", MEAN_ACCEPTED.title)
    text = "Verifications are counted per request; drafted tokens are those that were verified."
    return view.line_table("drafts", "Drafts and what became of them", text, columns, rows)


def _sums(group: PointGroup) -> tuple[int, int, int]:
    """Return verifications, drafted and accepted tokens of all repeats."""
    rows = [(point.row.verify_steps, point.row.drafted_tokens, point.row.accepted_tokens) for point in group.points]
    verifications, drafted, accepted = map(sum, zip(*rows, strict=True))
    return verifications, drafted, accepted


def pareto(view: View) -> Section | None:
    """Build the figure of tokens per second and user over tokens per second; None if no group has both."""
    axes = view.measured.varied
    known = [(group, at) for group in view.measured.groups.values() if (at := _place(view, group)) is not None]
    if not known:
        return None
    series = []
    for policy in view.measured.policies:
        own = sorted(((g, at) for g, at in known if g.policy == policy), key=lambda each: each[0].setting.order)
        if own:
            x, y = zip(*(at for _, at in own), strict=True)
            labels = tuple(group.setting.describe(axes) for group, _ in own)
            series.append(Series(policy, x, y, labels=labels, colour=view.measured.colour(policy)))
    front = [f"{group.policy} {group.setting.describe(axes)}".strip() for group, _ in undominated(known)]
    figure = Figure(
        key="pareto",
        title="Tokens per second and user against tokens per second",
        caption="Each mark is one setting. A user's rate is 1 / median TPOT over all requests.",
        kind="scatter",
        x_label="all output tokens per second",
        panels=(Panel("", tuple(series), "tokens per second and user"),),
    )
    text = f"No other setting gives both more to each user and more in all than {listed(front)}."
    return Section("pareto", "Users and machine", (figure, Text(text)))


def undominated(
    placed: Sequence[tuple[PointGroup, tuple[float, float]]],
) -> list[tuple[PointGroup, tuple[float, float]]]:
    """Return the groups that no other dominates, from least to most throughput."""
    front = [
        (group, at)
        for group, at in placed
        if not any(other[0] >= at[0] and other[1] >= at[1] and other != at for _, other in placed)
    ]
    return sorted(front, key=lambda each: each[1])


def _place(view: View, group: PointGroup) -> tuple[float, float] | None:
    throughput, tpot_s = (view.estimates.value(group, measure) for measure in (THROUGHPUT, TPOT_P50))
    return (throughput, 1 / tpot_s) if throughput and tpot_s else None


@dataclass(frozen=True)
class StepTotals:
    """Sums of the last samples of all repeats of a group.

    seconds: by phase. of_s: time that the samples cover, of all replicas together. wait_s: waiting for the device while
    drafting and verifying.
    """

    steps: int
    spec_steps: int
    preemptions: int
    swaps: int
    seconds: tuple[float, ...]
    wait_s: float
    of_s: float

    @classmethod
    def of(cls, group: PointGroup) -> StepTotals | None:
        """Add up the last samples of a group; None if a point has no samples, or no step was taken."""
        if not all(point.samples for point in group.points):
            return None
        last = [max(point.samples, key=lambda s: s.t_s) for point in group.points]
        if not any(sample.steps for sample in last):
            return None
        return cls(
            seconds=tuple(sum(getattr(s, phase) for s in last) for phase in PHASES),
            of_s=sum(s.t_s * point.row.replicas for s, point in zip(last, group.points, strict=True)),
            **{
                name: sum(getattr(s, name) for s in last)
                for name in ("steps", "spec_steps", "preemptions", "swaps", "wait_s")
            },
        )


def phases(view: View) -> Section:
    """Build the mean time of a step by phase, and the counts of steps."""
    known = {group: steps for group in view.measured.groups.values() if (steps := StepTotals.of(group)) is not None}
    if not known:
        return Section("phases", PHASES_TITLE, (Text(NO_SAMPLES),))
    panels = []
    for setting in spread(view.line, MOST_PANELS):
        groups = [group for group in view.measured.groups_at(setting) if group in known]
        if groups:
            series = tuple(
                Series(
                    phase.removesuffix("_s"),
                    tuple(group.policy for group in groups),
                    tuple(known[group].seconds[i] / known[group].steps * 1e3 for group in groups),
                    colour=i,
                )
                for i, phase in enumerate(PHASES)
            )
            panels.append(Panel(setting.describe(view.measured.varied), series, "ms per step"))
    items: list[Figure | Table | Text] = []
    if panels:
        text = "Mean milliseconds of a step by phase; drafting is spread over all steps, also those without a draft."
        items.append(Figure("phases", "Time per phase", text, "stack", "policy", tuple(panels)))
    items.append(_phases_table(view, known))
    absent = dict.fromkeys(group.policy for group in view.measured.groups.values() if group not in known)
    if absent:
        items.append(Text(f"Without samples, and so without phases, at some setting or all: {listed(list(absent))}."))
    return Section("phases", PHASES_TITLE, tuple(items))


def _phases_table(view: View, known: dict[PointGroup, StepTotals]) -> Table:
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
        "steps", "that drafted", "ms per step", "waiting for the device", "of the time in steps", "preemptions",
        "swaps of the draft",
    )  # fmt: skip
    return view.line_table("steps", "Steps", "From the last sample of each point, warm-up not counted.", columns, rows)


def violations(view: View) -> Section | None:
    """Build the violations by cause; None if no request has a target."""
    missed = [setting for setting in view.measured.settings if any(map(_missed, view.measured.groups_at(setting)))]
    settings = [setting for setting in view.line if setting in missed] or missed
    shown = spread(settings, MOST_PANELS)
    panels = []
    for setting in shown:
        groups = [group for group in view.measured.groups_at(setting) if targeted(group)]
        series = tuple(
            Series(
                cause.removeprefix("cause_").replace("_", " "),
                tuple(g.policy for g in groups),
                tuple(cause_share(g, cause) for g in groups),
                colour=colour,
            )
            for colour, cause in enumerate(CAUSE_COLUMNS)
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
        caption=(
            "Of the requests with a target those that missed one, by the first cause that applies (docs/metrics.md); a "
            "stack's height is 1 - attainment."
            + (f" {more} more settings with violations are not shown." if (more := len(missed) - len(shown)) else "")
        ),
        kind="stack",
        x_label="policy",
        panels=tuple(panels),
    )
    return Section("violations", "Violations", (figure,))


def targeted(group: PointGroup) -> int:
    """Return the number of requests with a target, of all repeats."""
    return sum(point.row.requests_with_slo for point in group.points)


def _missed(group: PointGroup) -> bool:
    return any(getattr(point.row, cause) for point in group.points for cause in CAUSE_COLUMNS)


def cause_share(group: PointGroup, cause: str) -> float:
    """Return the violations of one cause over the requests with a target."""
    return sum(getattr(point.row, cause) for point in group.points) / targeted(group)


def over_time(view: View, name: str | None) -> Section | None:
    """Build the course of one point: the scheduler's choices, its requests, memory and tokens, from samples.

    name: the point, which may be invalid, as the section then says; None for `View.timeline_point`, and no section
    without one.

    Raises:
        ConfigError: there is no such point.
    """
    point = view.timeline_point() if name is None else find_point(view.measured.points, name)
    if point is None:
        return None
    drawn = (
        _timeline(point) if point.samples else Text(f"{point.name} has no samples, and so no course over time.", True)
    )
    items = (drawn,) if point.row.valid else (Text(invalid_point(point), warns=True), drawn)
    return Section("timeline", "One run over time", items)


def _timeline(point: MeasuredPoint) -> Figure:
    samples = sorted(point.samples, key=lambda s: s.t_s)
    x = tuple(sample.t_s for sample in samples)
    panels = []
    for title, y_label, read in TIMELINE_PANELS:
        series = [
            Series(name, x, values, colour=colour)
            for colour, (name, of) in enumerate(read)
            if not name.startswith("extension") or any(sample.extension_total for sample in samples)
            for values in (tuple(float(of(sample)) for sample in samples),)
        ] or [Series("generated", *generation_rates(samples))]
        panels.append(Panel(title, tuple(series), y_label))
    return Figure(
        key="timeline",
        title=f"{point.name} over time",
        caption=f"Every value holds until the next sample. {condition_line([point])}",
        kind="step",
        x_label="seconds since the start of the point",
        panels=tuple(panels),
    )


def generation_rates(samples: Sequence[Sample]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Return times, and tokens per second from each time to the next; the last rate is unknown.

    Samples within TOKEN_RATE_S of the one before are skipped.
    """
    kept = list(samples[:1])
    for sample in samples[1:]:
        if sample.t_s >= kept[-1].t_s + TOKEN_RATE_S:
            kept.append(sample)
    rates = [(b.generation_tokens - a.generation_tokens) / (b.t_s - a.t_s) for a, b in pairwise(kept)]
    return tuple(sample.t_s for sample in kept), (*rates, None)
