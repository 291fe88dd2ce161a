"""Sections that compare: the headline, one policy against the others, and a run against an earlier one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import INTERVALS, Section, Table, Text
from adaserve_jax.report.estimates import (
    Estimate,
    Estimates,
    amounts,
    cell,
    difference_cell,
    heading,
    listed,
    titled,
)
from adaserve_jax.report.measures import (
    ATTAINMENT,
    ATTAINMENT_TPOT,
    GOODPUT,
    HEADLINE,
    MEAN_ACCEPTED,
    TPOT_P50,
    TTFT_P99,
    Measure,
)
from adaserve_jax.report.points import AXES, LoadSetting, Measured, PointGroup
from adaserve_jax.report.sections import overview
from adaserve_jax.report.view import BASELINE, View, condition_line, differing
from adaserve_jax.results.bootstrap import ENOUGH_REPEATS
from adaserve_jax.results.schema import ALL_CLASSES, SERVED

OURS = "adaserve"
"""Policy that is compared with the others; the first policy where it was not measured."""
COMPARED = (ATTAINMENT, ATTAINMENT_TPOT, GOODPUT, TPOT_P50, TTFT_P99)
"""Measures of tables that compare two groups."""
NOT_JUDGED = (MEAN_ACCEPTED,)
"""Measures without a best value: a wider tree has more accepted tokens and costs more."""
MOST_HEADLINE_ROWS = 48
MOST_VERSUS_ROWS = 60
MOST_LEFT_OUT = 6


@dataclass(frozen=True)
class GroupPair:
    """Two groups that are compared: differences are ours - theirs."""

    ours: PointGroup
    theirs: PointGroup

    @property
    def has_records(self) -> bool:
        return self.ours.has_records and self.theirs.has_records


@dataclass(frozen=True)
class Lead:
    """A policy that is ahead of every other at a setting, beyond chance.

    by: least of the differences, in the unit of the measure, without a sign.
    """

    policy: str
    setting: LoadSetting
    by: float


def headline(view: View) -> Section:
    """Build the first section: sentences on the leading policies, and a table of all policies side by side."""
    settings = view.measured.settings
    groups = sum(len(view.measured.groups_at(setting)) for setting in settings)
    shown = settings if groups <= MOST_HEADLINE_ROWS else view.line
    judged = (ATTAINMENT, GOODPUT) if len(view.measured.policies) > 1 else ()
    texts = [Text(verdict(view, measure, settings)) for measure in judged]
    texts += [Text(text, warns=True) for text in _how_paired(view.estimates, _pairs(view, settings))]
    texts += _left_out(view, settings)
    if any(point.row.arrival_process != SERVED for point in view.measured.valid):  # a server's time comes once
        texts += _repeats(view.measured.groups.values())
    return Section("headline", "Headline", (*texts, overview(view), _headline_table(view, shown)))


def verdict(view: View, measure: Measure, settings: Sequence[LoadSetting]) -> str:
    """Return sentences on the policies that lead in a measure: at which settings, and by how much.

    Only differences whose interval excludes 0 count.
    """
    compared = [s for s in settings if len(_known(view, measure, s)) > 1]
    name = titled(measure)
    if not compared:
        return f"{name}: nothing to compare: no setting has two policies with this figure."
    if not any(group.has_records for s in compared for group in view.measured.groups_at(s)):
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
    by_policy: dict[str, list[Lead]] = {}
    for lead in leads:
        by_policy.setdefault(lead.policy, []).append(lead)
    ordered = sorted(by_policy.values(), key=len, reverse=True)
    parts = [_lead_text(measure, each, len(compared), axes) for each in ordered]
    open_at = [s.describe(axes) for s in compared if s not in {lead.setting for lead in leads}]
    rest = f" At {listed(open_at)} no policy is ahead of every other beyond chance." if open_at else ""
    return f"{name}: {'; '.join(parts)}.{rest}"


def leader(view: View, measure: Measure, setting: LoadSetting) -> Lead | None:
    """Return the policy that is ahead of every other at a setting, if each difference's interval excludes 0."""
    values = _known(view, measure, setting)
    if len(values) < 2:
        return None
    best = (max if measure.more_is_better else min)(values, key=values.__getitem__)
    differences = [view.estimates.difference(best, other, measure) for other in values if other is not best]
    if not all(_wins(measure, each) for each in differences):
        return None
    return Lead(best.policy, setting, min(abs(each.value or 0.0) for each in differences))


def _lead_text(measure: Measure, leads: Sequence[Lead], compared: int, axes: Sequence[str]) -> str:
    over = amounts(measure, [lead.by for lead in leads])
    where = f" at {listed([lead.setting.describe(axes) for lead in leads])}" if axes else ""
    share = f" ({len(leads)} of {compared} settings)" if compared > 1 else ""
    return f"{leads[0].policy} is ahead of every other policy{where}{share}, of the next one by {over}"


def _pairs(view: View, settings: Sequence[LoadSetting]) -> list[GroupPair]:
    """Return every two policies of each setting."""
    return [GroupPair(*pair) for setting in settings for pair in combinations(view.measured.groups_at(setting), 2)]


def _known(view: View, measure: Measure, setting: LoadSetting) -> dict[PointGroup, float]:
    """Return the groups at a setting that have a value of the measure, with their values."""
    values = {group: view.estimates.value(group, measure) for group in view.measured.groups_at(setting)}
    return {group: value for group, value in values.items() if value is not None}


def _headline_table(view: View, settings: Sequence[LoadSetting]) -> Table:
    axes = view.measured.varied
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    first = len(axes) + 2
    for setting in settings:
        leads = {
            (lead.policy, column)
            for column, measure in enumerate(HEADLINE, first)
            if measure not in NOT_JUDGED and (lead := leader(view, measure, setting)) is not None
        }
        for group in view.measured.groups_at(setting):
            strong |= {(len(rows), column) for policy, column in leads if policy == group.policy}
            requests = sum(point.row.requests for point in group.points)
            with_target = sum(point.row.requests_with_slo for point in group.points)
            figures = (cell(measure, view.estimates.of(group, measure)) for measure in HEADLINE)
            axis_cells = (setting.cell(axis) for axis in axes)
            cancelled = sum(point.row.cancelled for point in group.points)
            counts = ((requests - with_target - cancelled, "without target"), (cancelled, "cancelled"))
            apart = ", ".join(f"{count:,} {what}" for count, what in counts if count)
            without = f" ({apart})" if apart else ""
            rows.append((group.policy, *axis_cells, f"{requests:,}{without}", *figures))
    axis_titles = (AXES[axis][0] for axis in axes)
    titles = ("policy", *axis_titles, "requests", *(heading(measure) for measure in HEADLINE))
    left_out = len(view.measured.settings) - len(settings)
    compared = (
        "Bold: ahead of every other policy here, and not by chance: the 95% interval of each difference excludes 0. "
        "Requests are paired where both policies had the same ones."
    )
    several = len(view.measured.policies) > 1
    caption = f"{compared if several else ''}{INTERVALS}".strip()
    caption += f" {left_out} more settings are in the figures." if left_out else ""
    caption = f"{caption} {condition_line(view.measured.valid)}"
    numeric = frozenset(range(first - 1, len(titles)))
    title = "Policies side by side" if several else "What was measured"
    return Table("headline", title, caption, titles, tuple(rows), numeric, frozenset(strong))


def _left_out(view: View, settings: Sequence[LoadSetting]) -> Iterator[Text]:
    """Yield a sentence on policies with invalid points only, which cannot be ahead."""
    axes = view.measured.varied
    parts = [
        f"{listed(policies)} at {s.describe(axes) or s.describe(('rate_rps',))}"
        for s in settings
        if (policies := view.measured.invalid_at(s))
    ]
    more = f"; and at {len(parts) - MOST_LEFT_OUT} more settings" if len(parts) > MOST_LEFT_OUT else ""
    if parts:
        named = "; ".join(parts[:MOST_LEFT_OUT])
        yield Text(f"Not compared, as their points are invalid: {named}{more}.", warns=True)


def _repeats(groups: Iterable[PointGroup]) -> Iterator[Text]:
    """Yield a sentence on the limits of intervals of few repeats."""
    fewest = min((len(group.points) for group in groups if group.has_records), default=ENOUGH_REPEATS)
    if fewest < ENOUGH_REPEATS:
        times = "once" if fewest == 1 else f"{fewest} times"
        yield Text(
            f"Points were measured {times}: intervals hold which requests happened to come, and not what differs from "
            f"run to run, for which it takes {ENOUGH_REPEATS} repeats."
        )


def versus(view: View, subject: str | None = None) -> Section | None:
    """Compare one policy with each other policy, setting by setting; None if no setting has two policies.

    subject: that policy; None: OURS, or the first. Raises ConfigError: it was not measured.
    """
    groups, policies = view.measured.groups.values(), view.measured.policies
    if subject is not None and subject not in policies:
        raise ConfigError(f"--subject must be a policy that was measured ({', '.join(policies)}), got {subject!r}")
    ours = subject or next((g.policy for g in groups if g.points[0].served_by == OURS), policies[0])
    pairs = {other: pairs for other in policies if other != ours and (pairs := pairs_of(view, ours, other))}
    if not pairs:
        return None
    texts = [
        Text(f"{ours} against {other}. {' '.join(_tally(view.estimates, each, m) for m in (ATTAINMENT, GOODPUT))}")
        for other, each in pairs.items()
    ]
    every = [pair for each in pairs.values() for pair in each]
    texts += [Text(text) for text in _how_paired(view.estimates, every)]
    return Section("versus", f"{ours} against the others", (*texts, _versus_table(view, ours, pairs)))


def pairs_of(view: View, ours: str, theirs: str) -> list[GroupPair]:
    """Return the pairs of two policies at the settings that both have."""
    groups = view.measured.groups
    return [
        GroupPair(groups[ours, setting], groups[theirs, setting])
        for setting in view.measured.settings
        if (ours, setting) in groups and (theirs, setting) in groups
    ]


def _versus_table(view: View, ours: str, pairs: dict[str, list[GroupPair]]) -> Table:
    shown = view.measured.settings if sum(map(len, pairs.values())) <= MOST_VERSUS_ROWS else view.line
    caption = (
        f"{ours} minus the other, in parentheses the 95% intervals of differences, paired where both had the same "
        "requests; better and worse are said where the interval excludes 0. Above 1 the ratio says that the other "
        "violates more."
    )
    titles = ("against", *(AXES[axis][0] for axis in view.measured.varied))
    rows = [
        ((other, *_axis_cells(view, pair)), pair, ALL_CLASSES)
        for other, each in pairs.items()
        for pair in each
        if pair.ours.setting in shown
    ]
    return _difference_table("versus", view, caption, titles, f"theirs / of {ours}", rows)


def comparison(view: View, against: Measured) -> Section:
    """Compare this run with an earlier one; every difference is this run minus the earlier one."""
    pairs = match(view.measured, against)
    then = listed(against.sources)
    items: list[Text | Table] = [Text(text, warns=True) for text in _other_differences(view, pairs, then)]
    if pairs:
        items += [Text(_tally(view.estimates, pairs, measure)) for measure in (ATTAINMENT, GOODPUT)]
        items += _repeats(group for pair in pairs for group in (pair.ours, pair.theirs))
        items.append(_comparison_table(view, pairs, then))
    items += [Text(text) for text in _unmatched(view.measured, against, "this run")]
    items += [Text(text) for text in _unmatched(against, view.measured, then)]
    return Section("comparison", f"Compared with {then}", tuple(items))


def match(now: Measured, then: Measured) -> list[GroupPair]:
    """Pair the groups that both runs have once, by policy and setting."""
    ours, theirs = _by_key(now), _by_key(then)
    return [
        GroupPair(groups[0], theirs[key][0])
        for key, groups in ours.items()
        if len(groups) == 1 and len(theirs.get(key, ())) == 1
    ]


def _by_key(measured: Measured) -> dict[tuple[str, LoadSetting], list[PointGroup]]:
    """Return groups by policy without the source before it, which several sources may have, and setting."""
    keyed: dict[tuple[str, LoadSetting], list[PointGroup]] = defaultdict(list)
    for group in measured.groups.values():
        keyed[group.points[0].served_by, group.setting].append(group)
    return keyed


def _unmatched(measured: Measured, other: Measured, where: str) -> Iterator[str]:
    """Yield sentences on groups that are not compared, and why."""
    own, others = _by_key(measured), _by_key(other)
    axes = dict.fromkeys(("rate_rps", *measured.varied))
    invalid = {(point.served_by, point.setting) for point in other.points if not point.row.valid}
    alone = [group for key, groups in own.items() if key not in others and key not in invalid for group in groups]
    several = [group for key, groups in own.items() if key in others and len(groups) > 1 for group in groups]
    for groups, why in ((alone, f"only in {where}"), (several, f"in {where} more than once")):
        if groups:
            named = [f"{group.policy} {group.setting.describe(axes)}" for group in groups]
            yield f"Not compared, being {why}: {listed(named)}."


def _other_differences(view: View, pairs: Sequence[GroupPair], then: str) -> Iterator[str]:
    """Yield sentences on differences between the runs other than their code."""
    if not pairs:
        yield f"No point of this run has one of the same policy and setting in {then}."
        return
    now_points = [point for pair in pairs for point in pair.ours.points]
    then_points = [point for pair in pairs for point in pair.theirs.points]
    for name, here, there in differing(now_points, then_points):
        if name != BASELINE:
            yield f"The {name} differs: {here} now, {there} in {then}."
    now_ms, then_ms = (1e3 * fmean(point.row.baseline_s for point in each) for each in (now_points, then_points))
    if f"{now_ms:.2g}" != f"{then_ms:.2g}":
        yield (
            f"One token alone took {now_ms:.3g} ms now and {then_ms:.3g} ms in {then}: targets that are multiples of "
            "it differ as much."
        )
    yield from _how_paired(view.estimates, pairs)


def _comparison_table(view: View, pairs: Sequence[GroupPair], then: str) -> Table:
    caption = (
        f"This run minus {then}, 95% intervals in parentheses; better and worse are said where the interval "
        "excludes 0. The ratio is that of violations then to violations now: above 1 there are fewer now."
    )
    titles = ("policy", *(AXES[axis][0] for axis in view.measured.varied), "requests")
    rows = [
        ((pair.ours.policy, *_axis_cells(view, pair), name), pair, name)
        for pair in sorted(pairs, key=lambda pair: pair.ours.setting.order)
        for name in view.classes
        if all(any(name in point.rows for point in group.points) for group in (pair.ours, pair.theirs))
    ]
    return _difference_table("differences", view, caption, titles, "then / now", rows)


def _how_paired(estimates: Estimates, pairs: Sequence[GroupPair]) -> list[str]:
    """Return sentences on comparisons that are not, or not fully, paired; empty if all are."""
    known = [estimates.pairing(pair.ours, pair.theirs) for pair in pairs if pair.has_records]
    independent = sum(not each.paired for each in known)
    partly = sum(each.left_out > 0 for each in known)
    texts = []
    if independent:
        texts.append(
            f"{independent} of {len(pairs)} comparisons are not of the same requests at the same times: their "
            "differences are those of independent samples, with wider intervals."
        )
    if partly:
        texts.append(
            f"{partly} of {len(pairs)} comparisons are of some repeats only, those that both sides have: their "
            "differences are not those of the figures of all repeats."
        )
    return texts


def _axis_cells(view: View, pair: GroupPair) -> list[str]:
    return [pair.ours.setting.cell(axis) for axis in view.measured.varied]


def _difference_table(
    key: str, view: View, caption: str, titles: tuple[str, ...], ratio: str,
    rows: Sequence[tuple[tuple[str, ...], GroupPair, str]],
) -> Table:  # fmt: skip
    """Build a table of ours - theirs in each measure, and of the ratio of their violations to ours.

    The ratio has no upper bound where ours may be 0. Cells are strong where ours is better beyond chance. ratio: its
    title. rows: first cells, whose titles are given, pair of groups and class of requests.
    """
    cells: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    for first, pair, slo_class in rows:
        found = [view.estimates.difference(pair.ours, pair.theirs, measure, slo_class) for measure in COMPARED]
        wins = (_wins(measure, each) for measure, each in zip(COMPARED, found, strict=True))
        strong |= {(len(cells), column) for column, better in enumerate(wins, len(titles)) if better}
        texts = (difference_cell(measure, each) for measure, each in zip(COMPARED, found, strict=True))
        violations = view.estimates.violation_ratio(pair.theirs, pair.ours, slo_class)
        cells.append((*first, *texts, _ratio_cell(violations)))
    measures = (heading(measure) + (", points" if measure.unit == "share" else "") for measure in COMPARED)
    columns = (*titles, *measures, f"violations, {ratio}")
    numeric = frozenset(range(len(titles), len(columns)))
    return Table(key, "Differences", caption, columns, tuple(cells), numeric, frozenset(strong))


def _tally(estimates: Estimates, pairs: Sequence[GroupPair], measure: Measure) -> str:
    """Return a sentence on the number of pairs in which ours is better, worse, and neither beyond chance."""
    if not any(pair.has_records for pair in pairs):
        return f"{titled(measure)}: without request records nothing tells a difference from chance."
    found = [estimates.difference(pair.ours, pair.theirs, measure) for pair in pairs]
    sure = [each.value for each in found if each.excludes_zero and each.value is not None]
    better = [value for value in sure if measure.better(value, 0.0)]
    worse = [value for value in sure if not measure.better(value, 0.0)]
    return (
        f"{titled(measure)}: better at {len(better)} of {len(pairs)} points{_by(measure, better)}, worse at "
        f"{len(worse)}{_by(measure, worse)}, and at {len(pairs) - len(sure)} not told apart."
    )


def _by(measure: Measure, values: Sequence[float]) -> str:
    return f" (by {amounts(measure, values)})" if values else ""


def _wins(measure: Measure, difference: Estimate) -> bool:
    return difference.excludes_zero and measure.better(difference.value or 0.0, 0.0)


def _ratio_cell(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    at_most = math.inf if estimate.high is None else estimate.high
    if estimate.low is not None and math.isinf(at_most):
        at_least = f"more than {estimate.low:.2f}"
        return at_least if math.isinf(estimate.value) else f"{estimate.value:.2f} ({at_least})"
    text = "only theirs" if math.isinf(estimate.value) else f"{estimate.value:.2f}"
    return text if estimate.low is None else f"{text} ({estimate.low:.2f} to {at_most:.2f})"
