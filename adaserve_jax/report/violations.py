"""Why requests missed their targets: the causes that results name, stacked to all violations."""

from __future__ import annotations

from dataclasses import fields

from adaserve_jax.report.document import Figure, Panel, Section, Series, Text
from adaserve_jax.report.points import Group
from adaserve_jax.report.view import MOST_PANELS, View, spread
from adaserve_jax.results.schema import Summary

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
