"""The first table of a report, and what it comes to in words that are made of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from adaserve_jax.report.document import Section, Table, Text
from adaserve_jax.report.estimates import Pair, amount, cell, heading, how_paired, listed, number, titled
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT, HEADLINE, MEAN_ACCEPTED, Measure
from adaserve_jax.report.points import AXES, Group, Setting
from adaserve_jax.report.view import View
from adaserve_jax.results.bootstrap import ENOUGH_REPEATS

MOST_ROWS = 48
MOST_LOST = 6
NOT_JUDGED = (MEAN_ACCEPTED,)
"""More accepted tokens are no aim of their own: a wider tree has more of them and costs more."""


@dataclass(frozen=True)
class Lead:
    """A group that is ahead of every other at its setting, beyond chance. by: least of the differences, as the measure
    has them, without a sign."""

    who: str
    setting: Setting
    by: float


def headline(view: View) -> Section:
    settings = view.measured.settings
    groups = sum(len(view.measured.at(setting)) for setting in settings)
    shown = settings if groups <= MOST_ROWS else view.line
    texts = [Text(verdict(view, measure, settings)) for measure in (ATTAINMENT, GOODPUT)]
    texts += [Text(text, warns=True) for text in how_paired(view.estimates, _pairs(view, settings))]
    texts += [Text(left_out, warns=True)] if (left_out := _left_out(view, settings)) else []
    texts += [Text(repeats)] if (repeats := _repeats(view)) else []
    return Section("headline", "Headline", (*texts, _table(view, shown)))


def verdict(view: View, measure: Measure, settings: Sequence[Setting]) -> str:
    """Who is ahead in a measure, at how many settings and by how much, who else is ahead elsewhere, and where nobody
    is: only differences whose interval excludes 0 count."""
    compared = [s for s in settings if len(_known(view, measure, s)) > 1]
    name = titled(measure)
    if not compared:
        return f"{name}: nothing to compare, there is one policy at each setting."
    if not any(group.has_records for s in compared for group in view.measured.at(s)):
        return f"{name}: without request records nothing tells a difference from chance."
    leads = [lead for s in compared if (lead := leader(view, measure, s)) is not None]
    axes = view.measured.varied
    pairings = [view.estimates.pairing(pair.ours, pair.theirs) for pair in _pairs(view, compared)]
    differences = "paired differences" if all(each.paired for each in pairings) else "differences, not all paired"
    if not leads:
        return (
            f"{name}: at none of {len(compared)} settings is one policy ahead of every other beyond chance "
            f"(95% intervals of {differences})." if len(compared) > 1 else
            f"{name}: no policy is ahead of every other beyond chance (95% interval of {differences})."
        )  # fmt: skip
    by_who: dict[str, list[Lead]] = {}
    for lead in leads:
        by_who.setdefault(lead.who, []).append(lead)
    ordered = sorted(by_who.values(), key=len, reverse=True)
    parts = [_lead_text(measure, each, len(compared), axes) for each in ordered]
    open_at = [s.describe(axes) for s in compared if s not in {lead.setting for lead in leads}]
    rest = f" At {listed(open_at)} no policy is ahead of every other beyond chance." if open_at else ""
    return f"{name}: {'; '.join(parts)}.{rest}"


def leader(view: View, measure: Measure, setting: Setting) -> Lead | None:
    """Who is ahead of every other policy at a setting, if the interval of the difference to each excludes 0."""
    groups = _known(view, measure, setting)
    if len(groups) < 2:
        return None
    best = groups[0]
    for group in groups[1:]:
        if measure.better(_value(view, measure, group), _value(view, measure, best)):
            best = group
    differences = [view.estimates.difference(best, other, measure) for other in groups if other is not best]
    if not all(each.is_not_zero and measure.better(each.value or 0.0, 0.0) for each in differences):
        return None
    return Lead(best.who, setting, min(abs(each.value or 0.0) for each in differences))


def _lead_text(measure: Measure, leads: Sequence[Lead], compared: int, axes: Sequence[str]) -> str:
    by = sorted(lead.by for lead in leads)
    low, high = number(measure.unit, by[0]), amount(measure, by[-1])
    over = high if number(measure.unit, by[-1]) == low else f"{low} to {high}"
    where = f" at {listed([lead.setting.describe(axes) for lead in leads])}" if axes else ""
    share = f" ({len(leads)} of {compared} settings)" if compared > 1 else ""
    return f"{leads[0].who} is ahead of every other policy{where}{share}, of the next one by {over}"


def _pairs(view: View, settings: Sequence[Setting]) -> list[Pair]:
    """Every two policies of each setting."""
    return [Pair(*pair) for setting in settings for pair in combinations(view.measured.at(setting), 2)]


def _known(view: View, measure: Measure, setting: Setting) -> list[Group]:
    return [g for g in view.measured.at(setting) if view.estimates.value(g, measure) is not None]


def _value(view: View, measure: Measure, group: Group) -> float:
    value = view.estimates.value(group, measure)
    assert value is not None, "only groups that have a value are compared"
    return value


def _table(view: View, settings: Sequence[Setting]) -> Table:
    axes = view.measured.varied
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    first = len(axes) + 3
    for setting in settings:
        leads = {
            (lead.who, column)
            for column, measure in enumerate(HEADLINE, first)
            if measure not in NOT_JUDGED and (lead := leader(view, measure, setting)) is not None
        }
        for group in view.measured.at(setting):
            strong |= {(len(rows), column) for who, column in leads if who == group.who}
            rows.append((group.who, *(setting.cell(axis) for axis in axes), *_requests(group), *_figures(view, group)))
    columns = (
        "policy",
        *(AXES[axis][0] for axis in axes),
        "requests",
        "with a target",
        *(heading(m) for m in HEADLINE),
    )
    left_out = len(view.measured.settings) - len(settings)
    caption = (
        "95% intervals in parentheses. Strong: ahead of every other policy of the setting, the interval of each "
        "difference, paired where both had the same requests, excludes 0."
    ) + (f" {left_out} more settings are in the figures." if left_out else "")
    numeric = frozenset(range(first - 2, len(columns)))
    return Table(
        "headline", "Policies side by side", view.caption(caption), columns, tuple(rows), numeric, frozenset(strong)
    )


def _left_out(view: View, settings: Sequence[Setting]) -> str:
    """Who cannot have been ahead, having invalid points only; empty where that is nobody."""
    axes = view.measured.varied
    parts = [
        f"{listed(lost)} at {s.describe(axes) or s.describe(('rate_rps',))}"
        for s in settings
        if (lost := view.measured.lost(s))
    ]
    more = f"; and at {len(parts) - MOST_LOST} more settings" if len(parts) > MOST_LOST else ""
    return f"Not compared, as their points are invalid: {'; '.join(parts[:MOST_LOST])}{more}." if parts else ""


def _repeats(view: View) -> str:
    """What intervals of few repeats do not hold; empty where they hold it, or where there are none."""
    groups = [group for group in view.measured.groups.values() if group.has_records]
    fewest = min((len(group.points) for group in groups), default=ENOUGH_REPEATS)
    if fewest >= ENOUGH_REPEATS:
        return ""
    times = "once" if fewest == 1 else f"{fewest} times"
    return (
        f"Points were measured {times}: intervals hold which requests happened to come, and not what differs from "
        f"run to run, for which it takes {ENOUGH_REPEATS} repeats."
    )


def _requests(group: Group) -> tuple[str, str]:
    """All, and those that carry a target."""
    requests = sum(point.row.requests for point in group.points)
    targeted = sum(point.row.requests_with_slo for point in group.points)
    return f"{requests:,}", f"{targeted:,}"


def _figures(view: View, group: Group) -> tuple[str, ...]:
    return tuple(cell(measure, view.estimates.of(group, measure)) for measure in HEADLINE)
