"""The folder of a bench run: what was to be measured, and going on with it where it ended.

plan.json says what the run measures and its id. A resumed run has the same plan and goes on under the same id: what is
done and valid stays, all other lines of the run are removed before its points are measured again. The rows that stay
say what they were measured with, and what goes on must be the same.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import end_last_line, make_folder, read_good_rows
from adaserve_jax.results.provenance import new_run_id, settings_hash
from adaserve_jax.results.run_folder import REQUESTS, RESULTS, SAMPLES
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.results.whole_file import SHARED, write_whole

PLAN, ACCEPTANCE = "plan.json", "acceptance.jsonl"
FolderUse = Literal["new", "append", "resume"]
"""new: refuse a folder that holds rows. append: add a run to what is there, which must be done. resume: go on with the
run that is there, or begin one where there is none."""
SHOWN_DIFFERENCES = 3
BASELINE_TOLERANCE = 0.25
"""Share by which the baseline latency, measured again, may be off the run's own: it varies a little on any machine."""


@dataclass(frozen=True)
class Begun:
    """A run whose folder is ready. rows: of the points that are done and valid, and so are not measured again. resumed:
    whether lines of other points of it may be there."""

    run_id: str
    plan_hash: str
    rows: tuple[ResultRow, ...] = ()
    resumed: bool = False

    @property
    def started_at(self) -> str | None:
        """Start of the run by its rows; None without rows."""
        return self.rows[0].started_at if self.rows else None

    @property
    def baseline_s(self) -> float | None:
        """Baseline latency that the relative targets of its rows are multiples of; None without rows."""
        return self.rows[0].baseline_s if self.rows else None

    @property
    def done(self) -> frozenset[str]:
        """Return the names of the points that are done and valid."""
        return frozenset(row.point for row in self.rows)


def begin_folder(out: Path, settings: Mapping[str, Any], use: FolderUse) -> Begun:
    """Make the folder ready for the run of `settings`, which JSON can hold. Removes nothing: see `drop_unfinished`.

    Raises ConfigError: as `check_folder`, or it holds a run of other settings.
    """
    check_folder(out, use)
    make_folder(out)
    plain = json.loads(json.dumps(settings))
    plan_hash = settings_hash(plain)
    if use == "resume" and (out / PLAN).exists():
        return _resumed(out, plain, plan_hash)
    begun = Begun(new_run_id(), plan_hash)
    values = {"run_id": begun.run_id, "plan_hash": plan_hash, "plan": plain}
    write_whole(out / PLAN, json.dumps(values, indent=1) + "\n", mode=SHARED)
    return begun


def check_folder(out: Path, use: FolderUse) -> None:
    """Raise ConfigError when a folder cannot be used so: it holds rows and is not to be added to, or a run that is not
    done and could not be gone on with afterwards, or rows and no plan that could be gone on with."""
    if use == "append" and (missing := _missing(out)):
        more = f" and {len(missing) - SHOWN_DIFFERENCES} more" if len(missing) > SHOWN_DIFFERENCES else ""
        raise ConfigError(
            f"{out} holds a run that is not done: {', '.join(missing[:SHOWN_DIFFERENCES])}{more} are missing or not "
            "valid; end it first with its own options and --resume, or give another --out"
        )
    if not ((out / RESULTS).exists() and (out / RESULTS).stat().st_size):
        return
    if use == "new":
        raise ConfigError(
            f"{out} holds the rows of another run; give another --out, or --append to add this one, or, to go on with "
            "a run of `adaserve bench`, its own options and --resume"
        )
    if use == "resume" and not (out / PLAN).exists():
        raise ConfigError(f"cannot resume {out}: it has rows but no {PLAN}; run without --resume into another folder")


def read_settings(out: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder, or None if there is no plan. Raises ConfigError for another file."""
    return _read_plan(out / PLAN)["plan"] if (out / PLAN).exists() else None


def check_alike(out: Path, begun: Begun, measured_with: Mapping[str, Any]) -> None:
    """Raise ConfigError where the rows of a resumed run were measured with something else. measured_with: by column."""
    for row in begun.rows:
        differ = _differences({name: getattr(row, name) for name in measured_with}, dict(measured_with))
        if differ:
            raise ConfigError(f"cannot resume {out}: {differ}; its points could not be compared with those to come; "
                              "measure all of them anew in another --out")  # fmt: skip


def check_baseline(out: Path, begun: Begun, baseline_s: float) -> None:
    """Raise ConfigError where the machine is not as fast as it was when the rows of a resumed run were measured."""
    held_s = begun.baseline_s
    if held_s is not None and abs(baseline_s - held_s) > BASELINE_TOLERANCE * held_s:
        raise ConfigError(
            f"cannot resume {out}: one token alone took {held_s * 1e3:.3g} ms when it was begun, and takes "
            f"{baseline_s * 1e3:.3g} ms now, more than {BASELINE_TOLERANCE:.0%} off; wait until the machine is as it "
            "was, or measure all anew in another --out"
        )


def drop_unfinished(out: Path, begun: Begun) -> None:
    """Remove the lines of a resumed run that are of points to measure again, half lines and blank ones.

    When the process dies meanwhile, each file is as it was or as it shall be.
    """
    for name in (RESULTS, REQUESTS, SAMPLES, ACCEPTANCE) if begun.resumed else ():
        path = out / name
        if not path.exists():
            continue
        end_last_line(path)
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [
            line for number, line in enumerate(lines, 1) if line.strip() and _stays(line, f"{path}:{number}", begun)
        ]
        if len(kept) < len(lines):
            write_whole(path, b"".join(kept), mode=SHARED)


def _missing(out: Path) -> list[str]:
    """Return the points of the run in a folder that are not done; none where there is no plan of a bench run."""
    if not (out / PLAN).exists():
        return []
    held = _read_plan(out / PLAN)
    done = {row.point for row in _done_rows(out / RESULTS, held["run_id"])}
    try:
        points = BenchPlan.of(held["plan"]).points
    except (TypeError, ConfigError) as error:
        raise _no_plan(out / PLAN) from error
    return [point.name for point in points if point.name not in done]


def _resumed(out: Path, settings: dict[str, Any], plan_hash: str) -> Begun:
    held = _read_plan(out / PLAN)
    if held["plan_hash"] != plan_hash:
        raise ConfigError(f"cannot resume {out}: {_differences(held['plan'], settings)}; give the options of that run, "
                          "or another --out")  # fmt: skip
    run_id = held["run_id"]
    return Begun(run_id, plan_hash, tuple(_done_rows(out / RESULTS, run_id)), resumed=True)


def _done_rows(path: Path, run_id: str) -> list[ResultRow]:
    """Return the rows of the points that are valid and whole: those of all classes count as many requests as the one
    over all."""
    by_point: dict[str, list[ResultRow]] = defaultdict(list)
    for row in read_good_rows(path, ResultRow)[0] if path.exists() else ():
        if row.run_id == run_id:
            by_point[row.point].append(row)
    return [row for rows in by_point.values() if _is_done(rows) for row in rows]


def _is_done(rows: list[ResultRow]) -> bool:
    overall = [row for row in rows if row.slo_class == ALL_CLASSES]
    by_class = sum(row.requests for row in rows if row.slo_class != ALL_CLASSES)
    return len(overall) == 1 and overall[0].valid and overall[0].requests == by_class


def _stays(line: bytes, where: str, begun: Begun) -> bool:
    """Return whether a line of any of the files stays; those of acceptance.jsonl name the point in the request's id."""
    try:
        values = json.loads(line)
        run_id = values["run_id"]
        point = values["point"] if "point" in values else values["request_id"].rpartition("-")[0]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: expected a JSON object with run_id and point, got {line[:60]!r}; remove the line, or give "
            "another --out"
        ) from error
    return run_id != begun.run_id or point in begun.done


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
    raise _no_plan(path)


def _no_plan(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not the plan of a bench run; remove it, or give another --out")
