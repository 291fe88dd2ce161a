"""Reads a folder that `adaserve bench` or `adaserve simulate` wrote: rows, requests and samples, by measured point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import read_good_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ResultRow

RESULTS, REQUESTS, SAMPLES = "results.jsonl", "requests.jsonl", "samples.jsonl"
PointKey = tuple[str, str]
"""run_id, point."""
Kind = TypeVar("Kind", RequestRecord, Sample)


@dataclass(frozen=True)
class RunFolder:
    """rows: in the order of the file. records, samples: by run and point, in the order of the file; points without any
    are absent. notes: what is not as it should be, for people: lines that were half written, files that are not there.
    """

    path: Path
    rows: tuple[ResultRow, ...]
    records: Mapping[PointKey, tuple[RequestRecord, ...]]
    samples: Mapping[PointKey, tuple[Sample, ...]]
    notes: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> RunFolder:
        """Read all files of a folder. Raises ConfigError: it has no results.jsonl, or a line of a file is wrong."""
        if not (path / RESULTS).is_file():
            raise ConfigError(
                f"expected a folder that `adaserve bench` or `adaserve simulate` wrote, found no {RESULTS} in {path}"
            )
        notes: list[str] = []
        rows, note = read_good_rows(path / RESULTS, ResultRow)
        notes += [note] if note else []
        known = {key_of(row) for row in rows}
        records = _by_point(path / REQUESTS, RequestRecord, known, notes)
        samples = _by_point(path / SAMPLES, Sample, known, notes)
        return cls(path, tuple(rows), records, samples, tuple(notes))


def point_of(measured: ResultRow | RequestRecord | Sample) -> str:
    """The point that a line belongs to; of files from before points had names, by policy and rate."""
    if measured.point or isinstance(measured, Sample):
        return measured.point
    return f"{measured.policy}@{measured.rate_rps:g}/s"


def key_of(measured: ResultRow | RequestRecord | Sample) -> PointKey:
    """What tells a point from all others, of other runs too."""
    return measured.run_id, point_of(measured)


def _by_point(path: Path, kind: type[Kind], known: set[PointKey], notes: list[str]) -> dict[PointKey, tuple[Kind, ...]]:
    """Lines of the points that have rows; adds to `notes` what is missing or left out."""
    if not path.exists():
        notes.append(f"{path.name} is not there")
        return {}
    read, note = read_good_rows(path, kind)
    notes += [note] if note else []
    found = _grouped(read)
    for run_id, point in sorted(found.keys() - known):
        notes.append(f"{path.name}: {point} of run {run_id} has no result rows, its lines are left out")
    return {key: tuple(lines) for key, lines in found.items() if key in known}


def _grouped(lines: Iterable[Kind]) -> dict[PointKey, list[Kind]]:
    groups: dict[PointKey, list[Kind]] = defaultdict(list)
    for line in lines:
        groups[key_of(line)].append(line)
    return groups
