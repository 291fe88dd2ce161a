"""The measured points of run folders, told apart by who served and under what setting. Pools and draws nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.measures import Columns
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import RunFolder, key_of, point_of
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ALL_CLASSES, OWN_SYSTEM, ResultRow

# What load a point had: the axes along which a run varies it, and how their values are written.

AXES = {
    "rate_rps": ("rate", "{:.4g}/s"),
    "urgent_share": ("urgent share", "{:.0%}"),
    "slo_scale": ("target scale", "{:g}"),
    "burstiness": ("burstiness", "{:g}"),
    "process": ("arrivals", "{}"),
    "workload": ("workload", "{}"),
}
"""By column: what people call it, and how a value is written."""
AXIS_LABELS = {
    "rate_rps": "requests per second", "urgent_share": "share of urgent requests",
    "slo_scale": "factor of all TPOT targets",
    "burstiness": "coefficient of variation of the gaps between arrivals",
}  # fmt: skip
"""Of those that are numbers, along which curves are drawn."""


@dataclass(frozen=True)
class Setting:
    """None: not varied in its run. workload: empty unless another one was measured at the same setting."""

    process: str
    rate_rps: float
    urgent_share: float | None
    slo_scale: float | None
    burstiness: float | None
    workload: str = ""

    @classmethod
    def of(cls, row: ResultRow) -> Setting:
        """Rows from before burstiness was noted have that of their process."""
        burstiness = 1.0 if row.burstiness is None and row.arrival_process == "poisson" else row.burstiness
        return cls(row.arrival_process, row.rate_rps, row.urgent_share, row.slo_scale, burstiness)

    @property
    def order(self) -> tuple[float | str, ...]:
        """Settings sort by it: rate first."""
        return (*(self.number(axis) for axis in AXIS_LABELS), self.process, self.workload)

    def value(self, axis: str) -> float | str | None:
        """None where it was not varied."""
        return getattr(self, axis) or None if axis == "workload" else getattr(self, axis)

    def number(self, axis: str) -> float:
        """The value of one of `AXIS_LABELS`, -1 where it was not varied."""
        value = getattr(self, axis)
        return -1.0 if value is None else value

    def cell(self, axis: str) -> str:
        """The value as a table shows it: "2/s", "60%"."""
        value = self.value(axis)
        return "-" if value is None else AXES[axis][1].format(value)

    def describe(self, axes: Iterable[str]) -> str:
        """E.g. "2/s, urgent share 60%"; of the axes that are given and known."""
        known = (axis for axis in axes if self.value(axis) is not None)
        return ", ".join(self.cell(a) if a == "rate_rps" else f"{AXES[a][0]} {self.cell(a)}" for a in known)

    def but(self, axis: str) -> tuple[object, ...]:
        """All of it but one axis. Arrivals of one burstiness have a process of that name, which varies with it."""
        left_out = ("burstiness", "process") if axis == "burstiness" else (axis,)
        return tuple(self.value(other) for other in AXES if other not in left_out)


HASH_LETTERS = 12
SAME_RUN = (
    "commit", "machine", "device", "jax_version", "target", "draft", "target_params", "draft_params", "deterministic",
    "max_requests", "max_context", "max_prefill_tokens", "num_pages", "extension_pages", "elastic", "engine_hash",
)  # fmt: skip
"""Points that agree in these may be pooled as repeats of one another."""
CHOSEN = ("max_requests", "max_prefill_tokens")
"""Of them, those that are chosen for each point of a label: "tuned" is the best setting of each."""


@dataclass(frozen=True, eq=False)
class Point:
    """One measurement of one setting. source: of which folder or run, for people. name: unique in the report.

    rows: by SLO class, "all" among them. records, samples: empty where the folder has none.
    """

    source: str
    name: str
    served_by: str
    setting: Setting
    rows: dict[str, ResultRow]
    records: tuple[RequestRecord, ...]
    samples: tuple[Sample, ...]

    @property
    def row(self) -> ResultRow:
        return self.rows[ALL_CLASSES]

    @property
    def is_complete(self) -> bool:
        """Whether every request of the row has its record, so that figures can be made of them."""
        return len(self.records) == self.row.requests

    @cached_property
    def columns(self) -> Columns:
        return Columns.of([(self.records, self.row.wall_s)])


@dataclass(frozen=True, eq=False)
class Group:
    """Repeats of one setting by one system under one policy, valid ones only; by run and number of the repeat, however
    late in the file one that was measured again is."""

    who: str
    setting: Setting
    points: tuple[Point, ...]

    @cached_property
    def columns(self) -> Columns:
        return Columns.of([(point.records, point.row.wall_s) for point in self.points])

    @property
    def has_records(self) -> bool:
        return all(point.is_complete for point in self.points)


@dataclass(frozen=True, eq=False)
class Measured:
    """All points of a report. whos: who served, in the order of the files; the index is the colour. groups: by who and
    setting. invalid: who and setting of points that are not valid. notes: what the folders said of themselves."""

    points: tuple[Point, ...]
    groups: dict[tuple[str, Setting], Group]
    invalid: tuple[tuple[str, Setting], ...]
    whos: tuple[str, ...]
    settings: tuple[Setting, ...]
    classes: tuple[str, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def valid(self) -> list[Point]:
        return [point for point in self.points if point.row.valid]

    @property
    def varied(self) -> tuple[str, ...]:
        """Axes on which the valid points differ; not the process of arrivals where its burstiness says which."""
        values = {axis: {setting.value(axis) for setting in self.settings} for axis in AXES}
        told = len(values["burstiness"]) > 1 and None not in values["burstiness"]
        return tuple(axis for axis, held in values.items() if len(held) > 1 and not (told and axis == "process"))

    @property
    def rates(self) -> list[float]:
        return sorted({setting.rate_rps for setting in self.settings})

    def at(self, setting: Setting) -> list[Group]:
        """Groups of one setting, in the order of whos."""
        return [self.groups[who, setting] for who in self.whos if (who, setting) in self.groups]

    def lost(self, setting: Setting) -> list[str]:
        """Who was measured at the setting to no avail: all points there are invalid."""
        return [who for who, at in self.invalid if at == setting and (who, at) not in self.groups]

    def colour(self, who: str) -> int:
        return self.whos.index(who)


def measured(folders: Sequence[RunFolder], beside: Sequence[RunFolder] = ()) -> Measured:
    """The points of all folders. beside: other folders, whose names theirs must differ from. Raises ConfigError: none
    has a row."""
    known = (*folders, *beside)
    points = [point for folder in folders for point in _points(folder, _label(folder, known))]
    points = _named(_loads_apart(_files_apart(points)))
    if not points:
        named = ", ".join(str(folder.path) for folder in folders)
        raise ConfigError(f"expected folders with results to report on, found no row in {named}; run a bench first")
    held = defaultdict(set)
    for point in points:
        held[point.served_by].add(point.source)
    grouped: dict[tuple[str, Setting], list[Point]] = defaultdict(list)
    invalid: dict[tuple[str, Setting], None] = {}
    whos: dict[str, None] = {}
    for point in points:
        who = f"{point.source}: {point.served_by}" if len(held[point.served_by]) > 1 else point.served_by
        if point.row.valid:
            whos[who] = None
            grouped[who, point.setting].append(point)
        else:
            invalid[who, point.setting] = None
    valid = [point for point in points if point.row.valid]
    return Measured(
        points=tuple(points),
        groups={key: Group(*key, tuple(sorted(each, key=_repeat))) for key, each in grouped.items()},
        invalid=tuple(invalid),
        whos=tuple(whos),
        settings=tuple(sorted({point.setting for point in valid}, key=lambda s: s.order)),
        classes=tuple(sorted({name for point in valid for name in point.rows} - {ALL_CLASSES})),
        sources=tuple(dict.fromkeys(point.source for point in points)),
        notes=tuple(f"{folder.path.name}: {note}" for folder in folders for note in folder.notes),
    )


def _repeat(point: Point) -> tuple[str, int]:
    return point.row.run_id, point.row.repeat


def find_point(points: Sequence[Point], name: str) -> Point:
    """Raises ConfigError listing the points that there are."""
    for point in points:
        if point.name == name:
            return point
    known = ", ".join(repr(point.name) for point in points)
    raise ConfigError(f"expected one of the points {known}, got {name!r}")


def _points(folder: RunFolder, label: str) -> list[Point]:
    """Points of one folder. Rows of old files whose points cannot be told apart by name keep no requests."""
    by_key: dict[tuple[str, str], list[dict[str, ResultRow]]] = defaultdict(list)
    for row in folder.rows:
        found = by_key[key_of(row)]
        if not found or row.slo_class in found[-1]:
            found.append({})
        found[-1][row.slo_class] = row
    whole = {key: [rows for rows in found if ALL_CLASSES in rows] for key, found in by_key.items()}
    sources = _sources([rows[ALL_CLASSES] for found in whole.values() for rows in found], label)
    return [
        Point(
            source=sources[_made(rows[ALL_CLASSES])],
            name=point_of(rows[ALL_CLASSES]),
            served_by=_served_by(rows[ALL_CLASSES]),
            setting=Setting.of(rows[ALL_CLASSES]),
            rows=rows,
            records=folder.records.get(key, ()) if len(found) == 1 else (),
            samples=folder.samples.get(key, ()) if len(found) == 1 else (),
        )
        for key, found in whole.items()
        for rows in found
    ]


ANY = "any"
_Made = tuple[str, tuple[object, ...]]
"""Of a run, as the values of `SAME_RUN` tell it: one that was resumed elsewhere has several."""


def _made(row: ResultRow) -> _Made:
    """With "any" for what was chosen for this point."""
    chosen = CHOSEN if row.label is not None else ()
    return row.run_id, tuple(ANY if name in chosen else getattr(row, name) for name in SAME_RUN)


def _agree(one: _Made, other: _Made) -> bool:
    return all(a == b or ANY in (a, b) for a, b in zip(one[1], other[1], strict=True))


def _sources(rows: Sequence[ResultRow], label: str) -> dict[_Made, str]:
    """The folder's label, and the first run's that was made alike where those of one folder were not."""
    loads: dict[_Made, dict[Setting, set[tuple[str, float]]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        loads[_made(row)][Setting.of(row)].add((row.workload_hash, row.duration_s))
    firsts: dict[_Made, _Made] = {}
    for made, own in loads.items():
        alike = (
            first for first in firsts.values()
            if _agree(first, made) and all(loads[first].get(s, load) == load for s, load in own.items())
        )  # fmt: skip
        firsts[made] = next(alike, made)
    apart = list(dict.fromkeys(firsts.values()))
    if len(apart) == 1:
        return dict.fromkeys(firsts, label)
    of_run: dict[str, list[_Made]] = defaultdict(list)
    for made in apart:
        of_run[made[0]].append(made)
    parts = {made: f" part {i}" if i > 1 else "" for each in of_run.values() for i, made in enumerate(each, 1)}
    return {made: f"{label} {first[0]}{parts[first]}" for made, first in firsts.items()}


def _served_by(row: ResultRow) -> str:
    """Policy, before it the system where that is another one, and after it what else tells settings apart."""
    name = row.policy
    if row.system != OWN_SYSTEM:
        name = row.system if row.policy in ("", row.system) else f"{row.system} {row.policy}"
    if row.label is not None:
        name += f" ({row.label})"
    return name if row.replicas == 1 else f"{name}, {row.replicas} replicas by {row.router}"


def _label(folder: RunFolder, folders: Sequence[RunFolder]) -> str:
    """The folder's name, with those above it as far as it takes to tell folders apart."""
    parts = folder.path.resolve().parts
    others = [other.path.resolve().parts for other in folders if other is not folder]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in others):
            return "/".join(parts[-length:])
    return str(folder.path)


def _files_apart(points: Sequence[Point]) -> list[Point]:
    """With the hash of the policy's file where several versions of one were measured."""
    files: dict[str, set[str]] = defaultdict(set)
    for point in points:
        files[point.served_by].add(point.row.policy_hash)
    return [
        replace(point, served_by=f"{point.served_by}@{point.row.policy_hash[:HASH_LETTERS] or 'not noted'}")
        if len(files[point.served_by]) > 1
        else point
        for point in points
    ]


def _loads_apart(points: Sequence[Point]) -> list[Point]:
    """With the workload in those settings at which several were measured, which are no repeats of each other."""
    loads: dict[Setting, dict[str, str]] = defaultdict(dict)
    for point in points:
        loads[point.setting][point.row.workload_hash] = point.row.workload
    apart = []
    for point in points:
        held = loads[point.setting]
        if len(held) > 1:
            name = held[point.row.workload_hash]
            if list(held.values()).count(name) > 1:
                name += f" {point.row.workload_hash[:HASH_LETTERS]}"
            point = replace(point, setting=replace(point.setting, workload=name))
        apart.append(point)
    return apart


def _named(points: Sequence[Point]) -> list[Point]:
    """With names that are unique: by source, then by run, then by number where they are not."""
    for prefix in (lambda p, n: f"{p.source}: {p.name}", lambda p, n: f"{p.row.run_id}: {p.name}",
                   lambda p, n: f"{p.name} ({n})"):  # fmt: skip
        count = Counter(point.name for point in points)
        points = [
            point if count[point.name] == 1 else replace(point, name=prefix(point, number))
            for number, point in enumerate(points, 1)
        ]
    return list(points)


# Which repeats of two groups were given the same requests, so that one can be set against the other in pairs.


@dataclass(frozen=True)
class Pairing:
    """Two groups as they are compared. paired: repeat by repeat with the same requests; else they are whole, and
    independent of each other. left_out: repeats that have no match, of both groups together."""

    one: Group
    other: Group
    paired: bool
    left_out: int = 0


def pair_up(one: Group, other: Group) -> Pairing:
    """Restrict both to the repeats that both have, in the same order; where there is none, leave them as they are.

    Of repeats with the same requests, those of one run and one number belong together first, then those of one number.
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


def _same_load(one: Point, other: Point) -> bool:
    """By their requests; without records by what they were made from."""
    if one.is_complete and other.is_complete:
        return one.columns.same_requests(other.columns)
    return _load(one) == _load(other)


def _load(point: Point) -> tuple[object, ...]:
    row = point.row
    return row.repeat, row.seed, row.workload_hash, row.duration_s, row.requests


def _restricted(group: Group, kept: Sequence[int]) -> Group:
    """The group itself where it is whole and in order, so that what was drawn for it serves again."""
    if list(kept) == list(range(len(group.points))):
        return group
    return replace(group, points=tuple(group.points[i] for i in kept))
