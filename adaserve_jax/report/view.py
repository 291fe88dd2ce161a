"""Settings that a report shows, its conditions, and warnings about its results; shared by all sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean
from typing import TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Section, Series, Table, Text
from adaserve_jax.report.estimates import Estimate, Estimates, listed, size
from adaserve_jax.report.points import (
    AXES,
    AXIS_LABELS,
    HASH_LETTERS,
    LoadSetting,
    Measured,
    MeasuredPoint,
    PointGroup,
    find_rate,
)
from adaserve_jax.results.schema import ALL_CLASSES, SERVED, ResultRow

MOST_PANELS = 6
MOST_SLICES = 3
BASELINE = "time of one token alone, without speculation"
BASELINE_TOLERANCE = 0.05
"""Baselines within this share of each other count as the same: each run measures its own."""
SETTINGS = "hash of the engine's settings"
NOT_NOTED = "not noted"
NO_FILE = "none"
ACCEPTANCE = "acceptance"
COMPARED = "by comparison with the target"
AS_FOUND = "as the policy finds room"
CAPTION_FACTS: tuple[tuple[str, Callable[[ResultRow], str]], ...] = (
    ("workload", lambda r: _hashed(r.workload, r.workload_hash)),
    ("machine", lambda r: r.machine),
    ("device", lambda r: r.device),
    ("target", lambda r: _model(r.target, r.target_params)),
    ("draft", lambda r: "none" if r.draft is None else _model(r.draft, r.draft_params)),
    ("jax", lambda r: r.jax_version),
    ("commit", lambda r: r.commit[:HASH_LETTERS] + "-dirty" * r.commit.endswith("-dirty")),
    ("date", lambda r: r.started_at[:10]),
    ("seed", lambda r: "none" if r.arrival_process == SERVED else str(r.seed)),
    (ACCEPTANCE, lambda r: COMPARED if r.synthetic_acceptance is None else f"synthetic ({r.synthetic_acceptance})"),
)
"""Names and values of the conditions that every caption states; it leaves out an acceptance that is real."""
OTHER_FACTS: tuple[tuple[str, Callable[[ResultRow], str]], ...] = (
    ("system", lambda r: r.system),
    ("version", lambda r: r.package_version),
    ("arrivals", lambda r: r.arrival_process),
    ("time in which requests arrive", lambda r: f"{r.duration_s:g} s"),
    (BASELINE, lambda r: f"{r.baseline_s * 1e3:.1f} ms"),
    ("requests at once, at most", lambda r: _limit(r.max_requests, str(r.max_requests))),
    ("context, at most", lambda r: _limit(r.max_context, f"{r.max_context} tokens")),
    ("deterministic", lambda r: _limit(r.max_requests, "yes" if r.deterministic else "no")),
    ("prompt tokens of a step, at most", lambda r: _limit(r.max_requests, str(r.max_prefill_tokens or AS_FOUND))),
    ("number of KV pages", lambda r: _noted(r.num_pages)),
    ("number of KV pages of the draft's memory", lambda r: _noted(r.extension_pages)),
    ("option elastic", lambda r: _noted(r.elastic)),
    (SETTINGS, lambda r: r.engine_hash[:HASH_LETTERS] or NOT_NOTED),
    ("policy's file", lambda r: _hashed(r.policy, r.policy_hash) if r.policy_hash else NO_FILE),
)
MOST_VALUES = 4
INEXACT_TOKENS = {
    "usage_spread": "tokens were counted at the end of each answer and spread over its events, so that the times of "
    "single tokens are not exact",
    "events": "tokens were counted as events with text, of which there may be fewer than tokens",
}
"""Consequences of inexact token counts, by `token_source`."""
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class View:
    """The points of a report, with the settings that its sections show.

    focus: the setting of figures that show only one.
    """

    measured: Measured
    estimates: Estimates
    focus: LoadSetting

    @classmethod
    def of(cls, measured: Measured, rate: float | None = None) -> View:
        """Choose the focus at a rate, or at the middle rate for None. Raises ConfigError: no valid point has this
        rate."""
        rates = measured.rates
        found = middle(rates) if rate is None else find_rate(rates, rate)
        if found is None:
            known = ", ".join(f"{each:.4g}" for each in rates)
            raise ConfigError(f"expected a rate that was measured ({known} requests per second), got {rate:g}")
        settings = [s for s in measured.settings if s.rate_rps == found]
        most = max(len(measured.groups_at(s)) for s in settings)
        focus = middle([s for s in settings if len(measured.groups_at(s)) == most])
        return cls(measured, Estimates(), focus)

    @property
    def at_focus(self) -> str:
        """The setting of figures that show only one, e.g. "At 2/s."; empty where only one was measured."""
        return f"At {self.focus.describe(self.measured.varied)}." if self.measured.varied else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """All requests, and each class where there are several, up to MOST_PANELS."""
        classes = self.measured.classes if len(self.measured.classes) > 1 else ()
        return (ALL_CLASSES, *classes)[:MOST_PANELS]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes with numbers that vary."""
        return tuple(axis for axis in self.measured.varied if axis in AXIS_LABELS)

    @property
    def line(self) -> tuple[LoadSetting, ...]:
        """Settings through the focus along the first axis that varies, in the order of that axis."""
        varied = self.measured.varied
        return self.slice_through(varied[0]) if varied else (self.focus,)

    @property
    def line_titles(self) -> tuple[str, ...]:
        """Titles of the cells that `along_line` gives."""
        return ("policy", *(AXES[axis][0] for axis in self.measured.varied[:1]))

    def along_line(self) -> Iterator[tuple[PointGroup, tuple[str, ...]]]:
        """Yield the groups of the line, each with the first cells of its row in a table."""
        for setting in self.line:
            for group in self.measured.groups_at(setting):
                yield group, (group.policy, *(setting.cell(axis) for axis in self.measured.varied[:1]))

    def line_table(
        self,
        key: str,
        title: str,
        text: str,
        columns: Sequence[str],
        rows: Iterable[tuple[str, ...]],
        *,
        texts: int = 0,
    ) -> Table:
        """Return a table of the line. columns: after `line_titles`; the first `texts` of them hold no numbers."""
        titles = (*self.line_titles, *columns)
        numeric = frozenset(range(len(self.line_titles) + texts, len(titles)))
        return Table(key, title, text, titles, tuple(rows), numeric)

    def slice_through(self, axis: str) -> tuple[LoadSetting, ...]:
        """Return the settings through the focus along an axis."""
        return tuple(s for s in self.measured.settings if s.without(axis) == self.focus.without(axis))

    def slices(self, axis: str) -> list[tuple[str, tuple[LoadSetting, ...]]]:
        """Return lines along an axis, each with a text of its other values; at most MOST_SLICES."""
        lines: dict[tuple[object, ...], list[LoadSetting]] = defaultdict(list)
        for setting in self.measured.settings:
            if setting.value(axis) is not None:
                lines[setting.without(axis)].append(setting)
        others = [other for other in self.measured.varied if other != axis]
        along = [sorted(each, key=lambda s: s.number(axis)) for each in lines.values() if len(each) > 1]
        return [(each[0].describe(others), tuple(each)) for each in spread(along, MOST_SLICES)]

    def timeline_point(self) -> MeasuredPoint | None:
        """Return the point that is shown over time: at the focus, of the first policy that drafted, else of the first
        one with samples; None if there are no samples."""
        sampled = [point for group in self.measured.groups_at(self.focus) for point in group.points if point.samples]
        drafted = [point for point in sampled if any(sample.spec_steps for sample in point.samples)]
        return next(iter(drafted or sampled), None)


def series_of(name: str, x: Sequence[float | str], estimates: Sequence[Estimate], colour: int) -> Series:
    """Return a series with the intervals of its estimates."""
    return Series(
        name=name,
        x=tuple(x),
        y=tuple(each.value for each in estimates),
        low=tuple(each.low for each in estimates),
        high=tuple(each.high for each in estimates),
        colour=colour,
    )


def middle(values: Sequence[Item]) -> Item:
    """Return the middle value, the later one of two."""
    return values[len(values) // 2]


def spread(values: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` values, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def condition_line(points: Sequence[MeasuredPoint]) -> str:
    """Return the sentence of conditions: workload, machine, models and their size, jax, commit, date, seed."""
    facts = [(name, _values(points, value)) for name, value in CAPTION_FACTS]
    line = "; ".join(f"{name} {text}" for name, text in facts if text != COMPARED)
    return f"{line[0].upper()}{line[1:]}."


def point_facts(point: MeasuredPoint) -> tuple[tuple[str, str], ...]:
    """Return the conditions of one point, and whether it is valid."""
    valid = "yes" if point.row.valid else f"no: {point.row.invalid_reason or 'not said why'}"
    known = [(name, text) for name, value in (*CAPTION_FACTS, *OTHER_FACTS) if (text := value(point.row)) != NO_FILE]
    return (*known, ("valid", valid))


def facts(measured: Measured) -> tuple[tuple[str, str], ...]:
    """Return names and values of the conditions of all points."""
    points = measured.points
    every = [(name, _values(points, value)) for name, value in (*CAPTION_FACTS, *OTHER_FACTS)]
    known = [(name, text) for name, text in every if text not in (NOT_NOTED, NO_FILE)]
    valid = measured.valid
    requests = sum(point.row.requests for point in valid)
    targeted = sum(point.row.requests_with_slo for point in valid)
    cancelled = sum(point.row.cancelled for point in valid)
    return (
        ("results", listed(measured.sources)),
        *known,
        ("points", f"{len(points):,}, of them {len(valid):,} valid"),
        (
            "requests of valid points",
            f"{requests:,}, of them {targeted:,} with a target and {requests - targeted - cancelled:,} without"
            + (f"; {cancelled:,} were cancelled" if cancelled else ""),
        ),
        ("intervals", "95%, bootstrap over whole repeats where there are five or more, else over requests"),
    )  # fmt: skip


def warnings(measured: Measured) -> Section:
    """Build the section of warnings about the results; it has no items if there are none."""
    return Section("warnings", "Before reading on", tuple(Text(text, warns=True) for text in _warnings(measured)))


def differing(points: Sequence[MeasuredPoint], others: Sequence[MeasuredPoint]) -> list[tuple[str, str, str]]:
    """Return name and values, here and there, of each condition that two sets of points do not share."""
    found = []
    for name, value in (*CAPTION_FACTS, *OTHER_FACTS):
        here, there = _values(points, value), _values(others, value)
        unknown = name == SETTINGS and NOT_NOTED in (here, there)
        if here != there and name not in ("date", BASELINE) and not unknown:
            found.append((name, here, there))
    here_s, there_s = (fmean(point.row.baseline_s for point in each) for each in (points, others))
    if abs(here_s - there_s) > BASELINE_TOLERANCE * max(here_s, there_s):
        found.append((BASELINE, *(_values(each, dict(OTHER_FACTS)[BASELINE]) for each in (points, others))))
    return found


def invalid_point(point: MeasuredPoint) -> str:
    """Return the sentence for every place where an invalid point is shown."""
    return f"{point.name} is invalid: {point.row.invalid_reason or 'not said why'}. No other figure uses it."


def invalid_points(measured: Measured) -> tuple[Text | Table, ...]:
    """Return a text and a table of points that no figure uses, with reasons; empty if all are valid."""
    invalid = [point for point in measured.points if not point.row.valid]
    if not invalid:
        return ()
    text = Text(
        f"{len(invalid)} of {len(measured.points)} points are invalid and left out of everything below.", warns=True
    )
    rows = tuple((point.name, point.row.invalid_reason or "not said") for point in invalid)
    return text, Table(
        "invalid-points", "Invalid points", "Points that are not used, and why.", ("point", "reason"), rows
    )


def _warnings(measured: Measured) -> Iterable[str]:
    points = measured.points
    yield from measured.notes
    if any(point.row.commit.endswith("-dirty") for point in points):
        yield "Tracked files differed from the commit: this code cannot be looked up by its commit alone."
    devices = dict.fromkeys(point.row.device for point in points if point.row.device.startswith("simulated"))
    if devices:
        named = listed([each.split(": ")[-1] for each in devices])
        yield f"No model ran: times are those of a simulated machine ({named})."
    if rates := list(dict.fromkeys(each for point in points if (each := point.row.synthetic_acceptance) is not None)):
        yield (
            f"Acceptance is synthetic: drafted tokens were accepted by drawn coins, with chances by depth of "
            f"{listed([f'({each})' for each in rates])}. Texts are not the target's."
        )
    compiled = [point for point in measured.valid if point.row.compiles_after_ready]
    if compiled:
        named = listed([point.name for point in compiled])
        yield f"Programs were compiled while serving at {named}: their times hold compilation."
    for source, meaning in INEXACT_TOKENS.items():
        systems = dict.fromkeys(point.row.system for point in measured.valid if point.row.token_source == source)
        if systems:
            yield f"{listed(list(systems))}: {meaning}."
    if bare := [point.name for point in measured.valid if not point.is_complete]:
        yield f"Not all requests of {listed(bare)} have records: figures are their rows' means, without intervals."
    for run, low_s, high_s in _baselines(points):
        yield (
            f"Run {run} was resumed on a machine of another speed: relative targets are multiples of {low_s * 1e3:.1f} "
            f"ms at some of its points, and of {high_s * 1e3:.1f} ms at others."
        )
    first, *others = ([point for point in points if point.source == source] for source in measured.sources)
    for other in others:
        unlike = [f"{name} ({here} against {there})" for name, here, there in differing(first, other)]
        if unlike:
            yield f"{first[0].source} and {other[0].source} were not measured alike: {'; '.join(unlike)}."


def _baselines(points: Sequence[MeasuredPoint]) -> list[tuple[str, float, float]]:
    """Return runs whose points do not share a baseline, with the least and the largest baseline."""
    by_run: dict[str, list[float]] = defaultdict(list)
    for point in points:
        by_run[point.row.run_id].append(point.row.baseline_s)
    return [(r, min(s), max(s)) for r, s in by_run.items() if max(s) - min(s) > BASELINE_TOLERANCE * max(s)]


def _noted(value: object) -> str:
    return NOT_NOTED if value is None else str(value)


def _values(points: Sequence[MeasuredPoint], value: Callable[[ResultRow], str]) -> str:
    """Return all different values, of which the first few are written out."""
    values = list(dict.fromkeys(value(point.row) for point in points))
    more = len(values) - MOST_VALUES
    return " / ".join(values[:MOST_VALUES]) + (f" and {more} more" if more > 0 else "")


def _limit(known: int | None, text: str) -> str:
    """Return a limit of the engine, which servers by a URL, and their files of records, may not tell."""
    return text if known else NOT_NOTED


def _hashed(name: str, sha256: str) -> str:
    return f"{name} (sha256 {sha256[:HASH_LETTERS]})" if sha256 else name


def _model(name: str, parameters: int | None) -> str:
    """Return name and size of a model; only the last part of a path."""
    path = PurePath(name)
    known = "size unknown" if parameters is None else f"{size(parameters)} parameters"
    return f"{path.name if path.is_absolute() else name} ({known})"
