"""The folder of a bench run: what was to be measured, and going on with it where it ended.

plan.json says what the run measures and its id. A resumed run has the same plan and goes on under the same id: what is
done and valid stays, all other lines of the run are removed before its points are measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import end_last_line, make_folder, read_good_rows
from adaserve_jax.results.provenance import new_run_id
from adaserve_jax.results.run_folder import REQUESTS, RESULTS, SAMPLES
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

PLAN, ACCEPTANCE = "plan.json", "acceptance.jsonl"
FolderUse = Literal["new", "append", "resume"]
"""new: refuse a folder that holds rows. append: add a run to what is there. resume: go on with the run that is there,
or begin one where there is none."""
SHOWN_DIFFERENCES = 3


@dataclass(frozen=True)
class Begun:
    """A run whose folder is ready. rows: of the points that are done and valid, and so are not measured again."""

    run_id: str
    plan_hash: str
    rows: tuple[ResultRow, ...] = ()

    @property
    def done(self) -> frozenset[str]:
        """Names of those points."""
        return frozenset(row.point for row in self.rows)


def begin_folder(out: Path, settings: Mapping[str, Any], use: FolderUse) -> Begun:
    """Make the folder ready for the run of `settings`, which JSON can hold.

    Raises ConfigError: as `check_folder`, or it holds a run of other settings.
    """
    check_folder(out, use)
    make_folder(out)
    plain = json.loads(json.dumps(settings))
    plan_hash = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    if use == "resume" and (out / PLAN).exists():
        return _resumed(out, plain, plan_hash)
    begun = Begun(new_run_id(), plan_hash)
    _write_plan(out / PLAN, {"run_id": begun.run_id, "plan_hash": plan_hash, "plan": plain})
    return begun


def check_folder(out: Path, use: FolderUse) -> None:
    """Raise ConfigError when a folder cannot be used so: it holds rows and is not to be added to, or rows and no plan
    that could be gone on with."""
    if not ((out / RESULTS).exists() and (out / RESULTS).stat().st_size):
        return
    if use == "new":
        raise ConfigError(
            f"{out} holds the rows of another run; give another --out, or --resume to go on with that run, or --append "
            "to add this one"
        )
    if use == "resume" and not (out / PLAN).exists():
        raise ConfigError(f"cannot resume {out}: it has rows but no {PLAN}; run without --resume into another folder")


def planned(out: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; None where there is no plan. Raises ConfigError: the file is not one."""
    return _read_plan(out / PLAN)["plan"] if (out / PLAN).exists() else None


def _resumed(out: Path, settings: dict[str, Any], plan_hash: str) -> Begun:
    held = _read_plan(out / PLAN)
    if held["plan_hash"] != plan_hash:
        raise ConfigError(f"cannot resume {out}: {_differences(held['plan'], settings)}; give the options of that run, "
                          "or another --out")  # fmt: skip
    run_id = held["run_id"]
    rows = _done_rows(out / RESULTS, run_id)
    done = {row.point for row in rows}
    for name in (RESULTS, REQUESTS, SAMPLES, ACCEPTANCE):
        if (out / name).exists():
            _keep(out / name, lambda line: line["run_id"] != run_id or _point(line) in done)
    return Begun(run_id, plan_hash, tuple(rows))


def _done_rows(path: Path, run_id: str) -> list[ResultRow]:
    """Rows of the points that are valid and whole: those of all classes count as many requests as the one over all."""
    by_point: dict[str, list[ResultRow]] = defaultdict(list)
    for row in read_good_rows(path, ResultRow)[0] if path.exists() else ():
        if row.run_id == run_id:
            by_point[row.point].append(row)
    return [row for rows in by_point.values() if _is_done(rows) for row in rows]


def _is_done(rows: list[ResultRow]) -> bool:
    overall = [row for row in rows if row.slo_class == ALL_CLASSES]
    by_class = sum(row.requests for row in rows if row.slo_class != ALL_CLASSES)
    return len(overall) == 1 and overall[0].valid and overall[0].requests == by_class


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Leave the lines that are wanted; when the process dies meanwhile, the file is as it was. Half a line goes."""
    end_last_line(path)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if wanted(json.loads(line))]
    if len(kept) < len(lines):
        _replace(path, b"".join(kept))


def _point(line: dict[str, Any]) -> str:
    """Of a line of any of the files; those of acceptance.jsonl name the point in the request's id."""
    return line["point"] if "point" in line else line["request_id"].rpartition("-")[0]


def _differences(held: dict[str, Any], asked: dict[str, Any]) -> str:
    differ = [name for name in sorted(held.keys() | asked.keys()) if held.get(name) != asked.get(name)]
    shown = [f"{name} was {held.get(name)!r}, is {asked.get(name)!r}" for name in differ[:SHOWN_DIFFERENCES]]
    more = len(differ) - len(shown)
    return "; ".join(shown) + (f"; {more} more differ" if more else "")


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
        if {"run_id", "plan_hash", "plan"} <= values.keys():
            return values
    except (OSError, ValueError, AttributeError):
        pass
    raise ConfigError(f"{path} is not the plan of a bench run; remove it, or give another --out")


def _write_plan(path: Path, values: dict[str, Any]) -> None:
    _replace(path, json.dumps(values, indent=1).encode() + b"\n")


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
