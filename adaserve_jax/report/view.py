"""What the sections of one report share: points, estimates, and which settings are shown where not all can be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean
from typing import TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Section, Series, Table, Text
from adaserve_jax.report.estimates import Estimate, Estimates, listed, size
from adaserve_jax.report.points import AXES, AXIS_LABELS, HASH_LETTERS, Group, Measured, Point, Setting
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

# What the results of a report hold for: facts, a line for captions, and what the reader must be warned of.

BASELINE = "time of one token alone, without speculation"
BASELINE_TOLERANCE = 0.05
"""Baselines within this share of each other are the same: they are measured anew by each run."""
SETTINGS = "hash of the engine's settings"
NOT_NOTED = "not noted"
NO_FILE = "none"
_TOLD: tuple[tuple[str, Callable[[ResultRow], str]], ...] = (
    ("workload", lambda r: f"{r.workload} (sha256 {r.workload_hash[:HASH_LETTERS]})"),
    ("machine", lambda r: r.machine),
    ("device", lambda r: r.device),
    ("target", lambda r: _model(r.target, r.target_params)),
    ("draft", lambda r: "none" if r.draft is None else _model(r.draft, r.draft_params)),
    ("jax", lambda r: r.jax_version),
    ("commit", lambda r: r.commit[:HASH_LETTERS] + "-dirty" * r.commit.endswith("-dirty")),
    ("date", lambda r: r.started_at[:10]),
    ("seed", lambda r: str(r.seed)),
)
"""What every figure says of itself."""
_BESIDE: tuple[tuple[str, Callable[[ResultRow], str]], ...] = (
    ("system", lambda r: r.system),
    ("version", lambda r: r.package_version),
    ("arrivals", lambda r: r.arrival_process),
    ("time in which requests arrive", lambda r: f"{r.duration_s:g} s"),
    (BASELINE, lambda r: f"{r.baseline_s * 1e3:.1f} ms"),
    ("requests at once, at most", lambda r: str(r.max_requests)),
    ("context, at most", lambda r: f"{r.max_context} tokens"),
    ("deterministic", lambda r: "yes" if r.deterministic else "no"),
    ("prompt tokens of a step, at most", lambda r: str(r.max_prefill_tokens or "as the policy finds room")),
    ("number of KV pages", lambda r: _noted(r.num_pages)),
    ("number of KV pages of the draft's memory", lambda r: _noted(r.extension_pages)),
    ("option elastic", lambda r: _noted(r.elastic)),
    (SETTINGS, lambda r: r.engine_hash[:HASH_LETTERS] or NOT_NOTED),
    ("policy's file", lambda r: _file(r.policy, r.policy_hash)),
)
MOST_VALUES = 4
INEXACT_TOKENS = {
    "usage_spread": "tokens were counted at the end of each answer and spread over its events, so that the times of "
    "single tokens are not exact",
    "events": "tokens were counted as events with text, of which there may be fewer than tokens",
}
"""What other counts of tokens than those of an engine, or of every event, mean for figures; by `token_source`."""


def condition_line(points: Sequence[Point]) -> str:
    """One sentence for captions: workload, machine, models and their size, jax, commit, date, seed."""
    line = "; ".join(f"{name} {_values(points, told)}" for name, told in _TOLD)
    return f"{line[0].upper()}{line[1:]}."


def point_facts(point: Point) -> tuple[tuple[str, str], ...]:
    """What one point holds for, and whether it does."""
    valid = "yes" if point.row.valid else f"no: {point.row.invalid_reason or 'not said why'}"
    told = [(name, held) for name, value in (*_TOLD, *_BESIDE) if (held := value(point.row)) != NO_FILE]
    return (*told, ("valid", valid))


def facts(measured: Measured) -> tuple[tuple[str, str], ...]:
    points = measured.points
    every = [(name, _values(points, value)) for name, value in (*_TOLD, *_BESIDE)]
    told = [(name, held) for name, held in every if held not in (NOT_NOTED, NO_FILE)]
    valid = measured.valid
    requests = sum(point.row.requests for point in valid)
    targeted = sum(point.row.requests_with_slo for point in valid)
    return (
        ("results", listed(measured.sources)),
        *told,
        ("points", f"{len(points):,}, of them {len(valid):,} valid"),
        (
            "requests of valid points",
            f"{requests:,}, of them {targeted:,} with a target and {requests - targeted:,} without",
        ),
        ("intervals", "95%, bootstrap over whole repeats where there are five or more, else over requests"),
    )  # fmt: skip


def warnings(measured: Measured) -> Section:
    """What makes results mean less than they seem to; without items where there is nothing to say."""
    return Section("warnings", "Before reading on", tuple(Text(text, warns=True) for text in _warnings(measured)))


def differing(points: Sequence[Point], others: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Name and values, here and there, of each condition that two sets of points do not share."""
    found = []
    for name, told in (*_TOLD, *_BESIDE):
        here, there = _values(points, told), _values(others, told)
        unknown = name == SETTINGS and NOT_NOTED in (here, there)
        if here != there and name not in ("date", BASELINE) and not unknown:
            found.append((name, here, there))
    here_s, there_s = (fmean(point.row.baseline_s for point in each) for each in (points, others))
    if abs(here_s - there_s) > BASELINE_TOLERANCE * max(here_s, there_s):
        found.append((BASELINE, *(_values(each, dict(_BESIDE)[BASELINE]) for each in (points, others))))
    return found


def invalid_point(point: Point) -> str:
    """What to say wherever an invalid point is shown."""
    return f"{point.name} is invalid: {point.row.invalid_reason or 'not said why'}. No other figure uses it."


def invalid_points(measured: Measured) -> tuple[Text | Table, ...]:
    """Points that no figure uses, each with its reason; empty where all are valid."""
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
    compiled = [point for point in measured.valid if point.row.compiles_after_ready]
    if compiled:
        named = listed([point.name for point in compiled])
        yield f"Programs were compiled while serving at {named}: their times hold compilation."
    for source, means in INEXACT_TOKENS.items():
        if named := list(
            dict.fromkeys(point.row.system for point in measured.valid if point.row.token_source == source)
        ):
            yield f"{listed(named)}: {means}."
    if bare := [point.name for point in measured.valid if not point.is_complete]:
        yield f"Not all requests of {listed(bare)} have records: figures are their rows' means, without intervals."
    for run, low_s, high_s in _baselines(points):
        yield (
            f"Run {run} was resumed on a machine of another speed: relative targets are multiples of {low_s * 1e3:.1f} "
            f"ms at some of its points, and of {high_s * 1e3:.1f} ms at others."
        )
    first, *others = (
        [point for point in points if point.source == source] for source in measured.sources
    )  # fmt: skip
    for other in others:
        unlike = [f"{name} ({here} against {there})" for name, here, there in differing(first, other)]
        if unlike:
            yield f"{first[0].source} and {other[0].source} were not measured alike: {'; '.join(unlike)}."


def _baselines(points: Sequence[Point]) -> list[tuple[str, float, float]]:
    """Runs whose points do not have the same baseline, with the least and the largest."""
    by_run: dict[str, list[float]] = defaultdict(list)
    for point in points:
        by_run[point.row.run_id].append(point.row.baseline_s)
    return [(r, min(s), max(s)) for r, s in by_run.items() if max(s) - min(s) > BASELINE_TOLERANCE * max(s)]


def _noted(value: object) -> str:
    return NOT_NOTED if value is None else str(value)


def _values(points: Sequence[Point], told: Callable[[ResultRow], str]) -> str:
    """All different values, the first few of them written out."""
    values = list(dict.fromkeys(told(point.row) for point in points))
    more = len(values) - MOST_VALUES
    return " / ".join(values[:MOST_VALUES]) + (f" and {more} more" if more > 0 else "")


def _file(policy: str, policy_hash: str) -> str:
    return f"{policy} (sha256 {policy_hash[:HASH_LETTERS]})" if policy_hash else NO_FILE


def _model(name: str, parameters: int | None) -> str:
    """Name and size; of a whole path only its end."""
    path = PurePath(name)
    told = "size unknown" if parameters is None else f"{size(parameters)} parameters"
    return f"{path.name if path.is_absolute() else name} ({told})"


MOST_PANELS = 6
MOST_SLICES = 3
WRITTEN = 5e-4
"""How far a rate may be from the one that was measured: tables write four digits of it."""
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class View:
    """focus: the one setting of figures that show one. conditions: what every caption ends with."""

    measured: Measured
    estimates: Estimates
    focus: Setting
    conditions: str

    @classmethod
    def of(cls, measured: Measured, rate: float | None = None) -> View:
        """rate: of the focus, as it is written or nearly; None: the middle one. Raises ConfigError: no valid point has
        it."""
        rates = measured.rates
        if rate is None:
            rate = middle(rates)
        else:
            asked, rate = rate, min(rates, key=lambda each, wanted=rate: abs(each - wanted))
            if not math.isclose(asked, rate, rel_tol=WRITTEN):
                known = ", ".join(f"{each:g}" for each in rates)
                raise ConfigError(f"expected a rate that was measured ({known} requests per second), got {asked:g}")
        settings = [s for s in measured.settings if s.rate_rps == rate]
        most = max(len(measured.at(s)) for s in settings)
        focus = middle([s for s in settings if len(measured.at(s)) == most])
        return cls(measured, Estimates(), focus, condition_line(measured.valid))

    def caption(self, text: str) -> str:
        return f"{text} {self.conditions}"

    @property
    def at_focus(self) -> str:
        """Where figures of one setting stand, e.g. "At 2/s."; nothing where only one was measured."""
        return f"At {self.focus.describe(self.measured.varied)}." if self.measured.varied else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """All requests, and each class where there are several; the first ones where there are many."""
        classes = self.measured.classes if len(self.measured.classes) > 1 else ()
        return (ALL_CLASSES, *classes)[:MOST_PANELS]

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that vary and are numbers."""
        return tuple(axis for axis in self.measured.varied if axis in AXIS_LABELS)

    @property
    def line(self) -> tuple[Setting, ...]:
        """The settings through the focus along the first axis that varies, in the order of that axis."""
        varied = self.measured.varied
        return self.slice_through(varied[0]) if varied else (self.focus,)

    @property
    def line_titles(self) -> tuple[str, ...]:
        """Of the first cells that `along_line` gives."""
        return ("policy", *(AXES[axis][0] for axis in self.measured.varied[:1]))

    def along_line(self) -> Iterator[tuple[Group, tuple[str, ...]]]:
        """The groups of the line, each with the cells that a table's row of it begins with."""
        for setting in self.line:
            for group in self.measured.at(setting):
                yield group, (group.who, *(setting.cell(axis) for axis in self.measured.varied[:1]))

    def slice_through(self, axis: str) -> tuple[Setting, ...]:
        return tuple(s for s in self.measured.settings if s.but(axis) == self.focus.but(axis))

    def slices(self, axis: str) -> list[tuple[str, tuple[Setting, ...]]]:
        """Lines along an axis, each with what is held still on it; a few of them where there are many."""
        lines: dict[tuple[object, ...], list[Setting]] = defaultdict(list)
        for setting in self.measured.settings:
            if setting.value(axis) is not None:
                lines[setting.but(axis)].append(setting)
        others = [other for other in self.measured.varied if other != axis]
        along = [sorted(each, key=lambda s: s.number(axis)) for each in lines.values() if len(each) > 1]
        return [(each[0].describe(others), tuple(each)) for each in spread(along, MOST_SLICES)]

    def focus_groups(self) -> list[Group]:
        return self.measured.at(self.focus)

    def colour(self, who: str) -> int:
        return self.measured.colour(who)


def series_of(
    name: str, x: Sequence[float | str], estimates: Sequence[Estimate], colour: int, labels: tuple[str, ...] = ()
) -> Series:
    """A series with the intervals of its estimates."""
    return Series(
        name=name,
        x=tuple(x),
        y=tuple(each.value for each in estimates),
        low=tuple(each.low for each in estimates),
        high=tuple(each.high for each in estimates),
        labels=labels,
        colour=colour,
    )


def middle(values: Sequence[Item]) -> Item:
    """Of two in the middle the later one."""
    return values[len(values) // 2]


def spread(values: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly chosen, first and last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
