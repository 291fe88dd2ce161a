"""Measured points of all runs of a report, grouped by policy and load setting; repeats of two groups, paired."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.measures import MeasureColumns
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import RunResults, key_of, point_of
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ALL_CLASSES, OWN_SYSTEM, ResultRow

AXES = {
    "rate_rps": ("rate", "{:.4g}/s"),
    "urgent_share": ("urgent share", "{:.0%}"),
    "slo_scale": ("target scale", "{:g}"),
    "burstiness": ("burstiness", "{:g}"),
    "process": ("arrivals", "{}"),
    "workload": ("workload", "{}"),
}
"""Axes along which a run varies its load: name in the report and format of a value, by column."""
AXIS_LABELS = {
    "rate_rps": "requests per second", "urgent_share": "share of urgent requests",
    "slo_scale": "factor of all TPOT targets",
    "burstiness": "coefficient of variation of the gaps between arrivals",
}  # fmt: skip
"""Labels of the axes with numbers, along which curves are drawn."""
HASH_LETTERS = 12
RATE_TOLERANCE = 0.05
"""Relative distance from a given rate to the measured one: drawn arrivals come at a rate that is near the one asked
for."""
_RATE = re.compile(r"(.*@)(\d+(?:\.\d+)?)(/s.*)", re.DOTALL)
"""Name of a point, in parts: before, at and after its rate."""
SAME_RUN = (
    "commit", "machine", "device", "jax_version", "target", "draft", "target_params", "draft_params", "deterministic",
    "max_requests", "max_context", "max_prefill_tokens", "num_pages", "extension_pages", "elastic", "engine_hash",
    "synthetic_acceptance",
)  # fmt: skip
"""Columns of rows whose points may be pooled as repeats of one another."""
CHOSEN = ("max_requests", "max_prefill_tokens")
"""Columns that a run with a label chooses for each point: "tuned" is the best setting of each."""
ANY = "any"
_RunKey = tuple[str, tuple[object, ...]]
"""run_id and the values of `SAME_RUN`; a run that was resumed elsewhere has several keys."""


@dataclass(frozen=True)
class LoadSetting:
    """Load of a point; None for what its run did not vary.

    workload: empty unless several workloads were measured at the same setting.
    """

    process: str
    rate_rps: float
    urgent_share: float | None
    slo_scale: float | None
    burstiness: float | None
    workload: str = ""

    @classmethod
    def of(cls, row: ResultRow) -> LoadSetting:
        """Return the setting of a row. Old rows without a burstiness get the one of their process."""
        burstiness = 1.0 if row.burstiness is None and row.arrival_process == "poisson" else row.burstiness
        return cls(row.arrival_process, row.rate_rps, row.urgent_share, row.slo_scale, burstiness)

    @property
    def order(self) -> tuple[float | str, ...]:
        """Sort key: the rate comes first."""
        return (*(self.number(axis) for axis in AXIS_LABELS), self.process, self.workload)

    def value(self, axis: str) -> float | str | None:
        """Return the value on an axis, None where it was not varied."""
        return getattr(self, axis) or None if axis == "workload" else getattr(self, axis)

    def number(self, axis: str) -> float:
        """Return the value on an axis with numbers, -1 where it was not varied."""
        value = getattr(self, axis)
        return -1.0 if value is None else value

    def cell(self, axis: str) -> str:
        """Return the value as a table shows it: "2/s", "60%"."""
        value = self.value(axis)
        return "-" if value is None else AXES[axis][1].format(value)

    def describe(self, axes: Iterable[str]) -> str:
        """Return the known values on some axes, e.g. "2/s, urgent share 60%"."""
        known = (axis for axis in axes if self.value(axis) is not None)
        return ", ".join(self.cell(a) if a == "rate_rps" else f"{AXES[a][0]} {self.cell(a)}" for a in known)

    def without(self, axis: str) -> tuple[object, ...]:
        """Return the values on all axes but one. The arrival process varies with the burstiness, whose name it has."""
        left_out = ("burstiness", "process") if axis == "burstiness" else (axis,)
        return tuple(self.value(other) for other in AXES if other not in left_out)


@dataclass(frozen=True, eq=False)
class MeasuredPoint:
    """One measurement of one setting.

    source: name of the folder or run, for people. name: unique in the report. served_by: policy, with the system where
    it is another one. rows: by SLO class, "all" among them. records, samples: empty where the folder has none.
    """

    source: str
    name: str
    served_by: str
    setting: LoadSetting
    rows: dict[str, ResultRow]
    records: tuple[RequestRecord, ...]
    samples: tuple[Sample, ...]

    @property
    def row(self) -> ResultRow:
        return self.rows[ALL_CLASSES]

    @property
    def is_complete(self) -> bool:
        """True if every request of the row has its record."""
        return len(self.records) == self.row.requests

    @cached_property
    def columns(self) -> MeasureColumns:
        return MeasureColumns.of([(self.records, self.row.wall_s)])


@dataclass(frozen=True, eq=False)
class PointGroup:
    """Valid repeats of one setting under one policy, in the order of run and repeat.

    policy: `MeasuredPoint.served_by`, with the source where several sources have it.
    """

    policy: str
    setting: LoadSetting
    points: tuple[MeasuredPoint, ...]

    @cached_property
    def columns(self) -> MeasureColumns:
        return MeasureColumns.of([(point.records, point.row.wall_s) for point in self.points])

    @property
    def has_records(self) -> bool:
        return all(point.is_complete for point in self.points)


OWN_COLOURS = ("adaserve", "spec:4", "nightjar", "ar")
"""Policies that most reports compare, by index of colour."""


@dataclass(frozen=True, eq=False)
class Measured:
    """All points of a report.

    policies: in the order of the files. groups: by policy and setting. invalid: policy and
    setting of points that are not valid. notes: sentences of the folders' readers about what is missing.
    """

    points: tuple[MeasuredPoint, ...]
    groups: dict[tuple[str, LoadSetting], PointGroup]
    invalid: tuple[tuple[str, LoadSetting], ...]
    policies: tuple[str, ...]
    settings: tuple[LoadSetting, ...]
    classes: tuple[str, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def valid(self) -> list[MeasuredPoint]:
        return [point for point in self.points if point.row.valid]

    @property
    def varied(self) -> tuple[str, ...]:
        """Axes on which the valid points differ, without the arrival process where its burstiness is among them."""
        values = {axis: {setting.value(axis) for setting in self.settings} for axis in AXES}
        by_burstiness = len(values["burstiness"]) > 1 and None not in values["burstiness"]
        return tuple(
            axis for axis, each in values.items() if len(each) > 1 and not (by_burstiness and axis == "process")
        )

    @property
    def rates(self) -> list[float]:
        return sorted({setting.rate_rps for setting in self.settings})

    def groups_at(self, setting: LoadSetting) -> list[PointGroup]:
        """Return the groups of one setting, in the order of policies."""
        return [self.groups[policy, setting] for policy in self.policies if (policy, setting) in self.groups]

    def invalid_at(self, setting: LoadSetting) -> list[str]:
        """Return the policies whose points at the setting are all invalid."""
        return [policy for policy, at in self.invalid if at == setting and (policy, at) not in self.groups]

    def colour(self, policy: str) -> int:
        """Return the index of the policy's colour: the same in every report for those of OWN_COLOURS that run in it."""
        if policy in OWN_COLOURS:
            return OWN_COLOURS.index(policy)
        taken = [OWN_COLOURS.index(each) for each in OWN_COLOURS if each in self.policies]
        others = [each for each in self.policies if each not in OWN_COLOURS]
        free = [index for index in range(len(taken) + len(others)) if index not in taken]
        return free[others.index(policy)]


def measured(folders: Sequence[RunResults], beside: Sequence[RunResults] = ()) -> Measured:
    """Return the points of all folders, grouped.

    beside: other folders, from whose names theirs must differ.

    Raises:
        ConfigError: no folder has a row.
    """
    known = (*folders, *beside)
    points = [point for folder in folders for point in _points(folder, _label(folder, known))]
    points = _named(_loads_apart(_files_apart(points)))
    if not points:
        named = ", ".join(str(folder.path) for folder in folders)
        raise ConfigError(f"expected folders with results to report on, found no row in {named}; run a bench first")
    sources: dict[str, set[str]] = defaultdict(set)
    for point in points:
        sources[point.served_by].add(point.source)
    grouped: dict[tuple[str, LoadSetting], list[MeasuredPoint]] = defaultdict(list)
    invalid: dict[tuple[str, LoadSetting], None] = {}
    policies: dict[str, None] = {}
    for point in points:
        policy = f"{point.source}: {point.served_by}" if len(sources[point.served_by]) > 1 else point.served_by
        if point.row.valid:
            policies[policy] = None
            grouped[policy, point.setting].append(point)
        else:
            invalid[policy, point.setting] = None
    valid = [point for point in points if point.row.valid]
    return Measured(
        points=tuple(points),
        groups={
            key: PointGroup(*key, tuple(sorted(each, key=lambda point: (point.row.run_id, point.row.repeat))))
            for key, each in grouped.items()
        },
        invalid=tuple(invalid),
        policies=tuple(policies),
        settings=tuple(sorted({point.setting for point in valid}, key=lambda s: s.order)),
        classes=tuple(sorted({name for point in valid for name in point.rows} - {ALL_CLASSES})),
        sources=tuple(dict.fromkeys(point.source for point in points)),
        notes=tuple(f"{folder.path.name}: {note}" for folder in folders for note in folder.notes),
    )


def find_rate(rates: Collection[float], asked: float) -> float | None:
    """Return the one rate that is nearest to the one asked for; None beyond RATE_TOLERANCE, or if two are as near."""
    near = sorted((abs(rate - asked), rate) for rate in rates if math.isclose(rate, asked, rel_tol=RATE_TOLERANCE))
    tied = len(near) > 1 and math.isclose(near[0][0], near[1][0])
    return near[0][1] if near and not tied else None


def find_point(points: Sequence[MeasuredPoint], name: str) -> MeasuredPoint:
    """Return the point of this name, else the one whose name differs in the rate alone, as `find_rate` finds it.

    Raises ConfigError listing all points if there is none.
    """
    named = {point.name: point for point in points}
    if name in named:
        return named[name]
    if asked := _RATE.fullmatch(name):
        alike = {float(at[2]): point for each, point in named.items()
                 if (at := _RATE.fullmatch(each)) and (at[1], at[3]) == (asked[1], asked[3])}  # fmt: skip
        rate = find_rate(alike, float(asked[2]))
        if rate is not None:
            return alike[rate]
    known = ", ".join(repr(point.name) for point in points)
    raise ConfigError(f"expected one of the points {known}, got {name!r}")


def _points(folder: RunResults, label: str) -> list[MeasuredPoint]:
    """Return the points of one folder. Points of old files that share a name get no requests."""
    by_key: dict[tuple[str, str], list[dict[str, ResultRow]]] = defaultdict(list)
    for row in folder.rows:
        found = by_key[key_of(row)]
        if not found or row.slo_class in found[-1]:
            found.append({})
        found[-1][row.slo_class] = row
    whole = {key: [rows for rows in found if ALL_CLASSES in rows] for key, found in by_key.items()}
    sources = _sources([rows[ALL_CLASSES] for found in whole.values() for rows in found], label)
    return [
        MeasuredPoint(
            source=sources[_run_key(rows[ALL_CLASSES])],
            name=point_of(rows[ALL_CLASSES]),
            served_by=_served_by(rows[ALL_CLASSES]),
            setting=LoadSetting.of(rows[ALL_CLASSES]),
            rows=rows,
            records=folder.records.get(key, ()) if len(found) == 1 else (),
            samples=folder.samples.get(key, ()) if len(found) == 1 else (),
        )
        for key, found in whole.items()
        for rows in found
    ]


def _run_key(row: ResultRow) -> _RunKey:
    """Return the key of the run of a row, with ANY for what was chosen for its point."""
    chosen = CHOSEN if row.label is not None else ()
    return row.run_id, tuple(ANY if name in chosen else getattr(row, name) for name in SAME_RUN)


def _agree(one: _RunKey, other: _RunKey) -> bool:
    return all(a == b or ANY in (a, b) for a, b in zip(one[1], other[1], strict=True))


def _sources(rows: Sequence[ResultRow], label: str) -> dict[_RunKey, str]:
    """Return the source of each run: the folder's label, with the first run that was measured alike where the runs of
    the folder were not all measured alike."""
    loads: dict[_RunKey, dict[LoadSetting, set[tuple[str, float]]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        loads[_run_key(row)][LoadSetting.of(row)].add((row.workload_hash, row.duration_s))
    firsts: dict[_RunKey, _RunKey] = {}
    for key, own in loads.items():
        alike = (
            first for first in firsts.values()
            if _agree(first, key) and all(loads[first].get(s, load) == load for s, load in own.items())
        )  # fmt: skip
        firsts[key] = next(alike, key)
    apart = list(dict.fromkeys(firsts.values()))
    if len(apart) == 1:
        return dict.fromkeys(firsts, label)
    by_run: dict[str, list[_RunKey]] = defaultdict(list)
    for key in apart:
        by_run[key[0]].append(key)
    parts = {key: f" part {i}" if i > 1 else "" for each in by_run.values() for i, key in enumerate(each, 1)}
    return {key: f"{label} {first[0]}{parts[first]}" for key, first in firsts.items()}


def _served_by(row: ResultRow) -> str:
    """Return the policy, after the system where that is another one, and before label and replicas."""
    name = row.policy
    if row.system != OWN_SYSTEM:
        name = row.system if row.policy in ("", row.system) else f"{row.system} {row.policy}"
    if row.label is not None:
        name += f" ({row.label})"
    return name if row.replicas == 1 else f"{name}, {row.replicas} replicas by {row.router}"


def _label(folder: RunResults, folders: Sequence[RunResults]) -> str:
    """Return the folder's name, with as many parents as it takes to tell folders apart."""
    parts = folder.path.resolve().parts
    others = [other.path.resolve().parts for other in folders if other is not folder]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in others):
            return "/".join(parts[-length:])
    return str(folder.path)


def _files_apart(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Add the hash of the policy's file where several versions of one were measured."""
    files: dict[str, set[str]] = defaultdict(set)
    for point in points:
        files[point.served_by].add(point.row.policy_hash)
    return [
        replace(point, served_by=f"{point.served_by}@{point.row.policy_hash[:HASH_LETTERS] or 'not noted'}")
        if len(files[point.served_by]) > 1
        else point
        for point in points
    ]


def _loads_apart(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Add the workload to settings at which several were measured: they are not repeats of each other."""
    loads: dict[LoadSetting, dict[str, str]] = defaultdict(dict)
    for point in points:
        loads[point.setting][point.row.workload_hash] = point.row.workload
    apart = []
    for point in points:
        workloads = loads[point.setting]
        if len(workloads) > 1:
            name = workloads[point.row.workload_hash]
            if list(workloads.values()).count(name) > 1:
                name += f" {point.row.workload_hash[:HASH_LETTERS]}"
            point = replace(point, setting=replace(point.setting, workload=name))
        apart.append(point)
    return apart


def _named(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Make names unique: by source, then by run, then by number."""
    for prefix in (lambda p, n: f"{p.source}: {p.name}", lambda p, n: f"{p.row.run_id}: {p.name}",
                   lambda p, n: f"{p.name} ({n})"):  # fmt: skip
        count = Counter(point.name for point in points)
        points = [
            point if count[point.name] == 1 else replace(point, name=prefix(point, number))
            for number, point in enumerate(points, 1)
        ]
    return list(points)


@dataclass(frozen=True)
class Pairing:
    """Two groups as they are compared.

    paired: repeat by repeat with the same requests; otherwise the groups are whole and independent of each other.
    left_out: number of repeats without a match, of both groups together.
    """

    one: PointGroup
    other: PointGroup
    paired: bool
    left_out: int = 0


def pair_up(one: PointGroup, other: PointGroup) -> Pairing:
    """Restrict two groups to the repeats that both have, in the same order; leave them whole where there is none.

    Among repeats with the same requests, those of one run and number are paired first, then those of one number.
    """
    candidates = [
        (a.row.run_id != b.row.run_id, a.row.repeat != b.row.repeat, i, j)
        for i, a in enumerate(one.points)
        for j, b in enumerate(other.points)
        if _same_load(a, b)
    ]
    found: dict[int, int] = {}
    for *_, i, j in sorted(candidates):
        if i not in found and j not in found.values():
            found[i] = j
    if not found:
        return Pairing(one, other, paired=False)
    kept = sorted(found)
    left_out = len(one.points) + len(other.points) - 2 * len(kept)
    one, other = _restricted(one, kept), _restricted(other, [found[i] for i in kept])
    return Pairing(one, other, one.has_records and other.has_records, left_out)


def _same_load(one: MeasuredPoint, other: MeasuredPoint) -> bool:
    """Compare two points by their requests; without records by the seed and workload that made them."""
    if one.is_complete and other.is_complete:
        return one.columns.same_requests(other.columns)
    return _load(one) == _load(other)


def _load(point: MeasuredPoint) -> tuple[object, ...]:
    row = point.row
    return row.repeat, row.seed, row.workload_hash, row.duration_s, row.requests


def _restricted(group: PointGroup, kept: Sequence[int]) -> PointGroup:
    """Return the group itself where it is whole and in order, so that its resamples are used again."""
    if list(kept) == list(range(len(group.points))):
        return group
    return replace(group, points=tuple(group.points[i] for i in kept))
