"""Reader of measured runs: a folder of `adaserve bench` or `adaserve simulate`, or a server's file of records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.jsonl import read_good_rows
from adaserve_jax.results.provenance import UNKNOWN
from adaserve_jax.results.record_store import read_records
from adaserve_jax.results.records import RequestRecord, ServedRecord, ServerRun
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ALL_CLASSES, SERVED, Conditions, Provenance, ResultRow

RESULTS, REQUESTS, SAMPLES = "results.jsonl", "requests.jsonl", "samples.jsonl"
PointKey = tuple[str, str]
"""run_id and name of a point."""
Line = TypeVar("Line", RequestRecord, Sample)


@dataclass(frozen=True)
class RunResults:
    """Rows, records and samples of all measured points of one folder or file.

    rows: in the order of the file. records, samples: by run and point, in the order of the file; points without any are
    absent. notes: sentences for people about half-written lines and missing files.
    """

    path: Path
    rows: tuple[ResultRow, ...]
    records: Mapping[PointKey, tuple[RequestRecord, ...]]
    samples: Mapping[PointKey, tuple[Sample, ...]]
    notes: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> RunResults:
        """Read a folder, or the file of `adaserve serve --records`, in which each start of an engine is a point. Raises
        ConfigError: the folder has no results.jsonl, the file is not a server's, or a line is wrong."""
        if path.is_file():
            return _load_server_file(path)
        if not (path / RESULTS).is_file():
            raise ConfigError(
                "expected a folder that `adaserve bench` or `adaserve simulate` wrote, or the file of `adaserve serve "
                f"--records`, found no {RESULTS} in {path}"
            )
        notes: list[str] = []
        rows, note = read_good_rows(path / RESULTS, ResultRow)
        notes += [note] if note else []
        known = {key_of(row) for row in rows}
        records = _by_point(path / REQUESTS, RequestRecord, known, notes)
        samples = _by_point(path / SAMPLES, Sample, known, notes)
        return cls(path, tuple(rows), records, samples, tuple(notes))


def point_of(measured: ResultRow | RequestRecord | Sample) -> str:
    """Return the name of the point that a line belongs to; old files without names get one of policy and rate."""
    if measured.point or isinstance(measured, Sample):
        return measured.point
    return f"{measured.policy}@{measured.rate_rps:g}/s"


def key_of(measured: ResultRow | RequestRecord | Sample) -> PointKey:
    """Return the key of a line's point, which is unique among all runs."""
    return measured.run_id, point_of(measured)


def _by_point(path: Path, kind: type[Line], known: set[PointKey], notes: list[str]) -> dict[PointKey, tuple[Line, ...]]:
    """Read the lines of points that have rows; append to `notes` what is missing or left out."""
    if not path.exists():
        notes.append(f"{path.name} is not there")
        return {}
    read, note = read_good_rows(path, kind)
    notes += [note] if note else []
    found: dict[PointKey, list[Line]] = defaultdict(list)
    for line in read:
        found[key_of(line)].append(line)
    for run_id, point in sorted(found.keys() - known):
        notes.append(f"{path.name}: {point} of run {run_id} has no result rows, its lines are left out")
    return {key: tuple(lines) for key, lines in found.items() if key in known}


def _load_server_file(path: Path) -> RunResults:
    found, _ = read_records(path)
    by_run: dict[ServerRun, list[ServedRecord]] = defaultdict(list)
    for record in found:
        by_run[record.run].append(record)
    rows: list[ResultRow] = []
    records: dict[PointKey, tuple[RequestRecord, ...]] = {}
    for run, own in by_run.items():
        made = _rows_of_server(run, own)
        rows += made
        records[key_of(made[0])] = tuple(own)
    return RunResults(path, tuple(rows), records, {}, ())


def _rows_of_server(run: ServerRun, records: list[ServedRecord]) -> list[ResultRow]:
    """Return the rows of one start of an engine, over all classes first. The rate is the mean rate of arrivals; what
    the file does not hold, such as the engine's limits, is left unknown."""
    first_s = min(record.arrival_unix_s for record in records)
    wall_s = max(record.ended_unix_s for record in records) - first_s
    rate_rps = len(records) / wall_s if wall_s else 0.0
    provenance = Provenance(
        run_id=run.run_id,
        started_at=datetime.fromtimestamp(run.started_unix_s, UTC).isoformat(timespec="seconds"),
        commit=UNKNOWN,
        package_version=run.package_version,
        machine=UNKNOWN,
        device=run.device,
        jax_version=run.jax_version,
        target=run.target,
        draft=run.draft,
        baseline_s=run.baseline_s,
        workload="requests of clients",
        workload_hash="",
        seed=0,
    )
    conditions = Conditions(
        policy=run.policy,
        arrival_process=SERVED,
        rate_rps=rate_rps,
        duration_s=max(record.arrival_unix_s for record in records) - first_s,
        wall_s=wall_s,
        valid=True,
        point=f"{run.policy}@{rate_rps:.3g}/s {run.run_id[:8]}",
    )
    summaries = summarize(records, wall_s=wall_s)
    assert summaries[0].slo_class == ALL_CLASSES
    return [ResultRow.join(provenance, conditions, summary) for summary in summaries]
