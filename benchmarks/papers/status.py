"""Where every figure stands: what was run and found, what it says of the paper's statements, what is not there yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError
from benchmarks.papers.entry import Claim, Entry, Form, Found, NotYet
from benchmarks.papers.running import command

MEASURED, NOT_RUN, NOT_YET = "measured", "not run", "not there yet"


@dataclass(frozen=True)
class RunRow:
    """One figure that was run at one size. about: what it ran on, as its results say. data: the workload's origin.
    seconds: that its commands took. values: numbers that claims are decided by."""

    name: str
    size: str
    measured_at: str
    seconds: float
    data: str
    about: dict[str, str]
    values: Mapping[str, float | None]


def row_of(name: str, size: str, found: Found, seconds: float, data: str) -> RunRow:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunRow(name, size, now, round(seconds, 1), data, found.about, found.values)


def path_of(name: str, size: str, out: Path) -> Path:
    return out / f"{name}-{size}.json"


def write_row(row: RunRow, out: Path) -> Path:
    path = path_of(row.name, row.size, out)
    path.write_text(json.dumps(asdict(row), indent=1, allow_nan=False) + "\n")
    return path


def rows_in(folder: Path, entries: Iterable[Entry]) -> list[RunRow]:
    """Of the figures that were run there. Raises ConfigError naming a file that is not one of theirs."""
    found = []
    for entry in entries:
        for size in entry.forms:
            path = path_of(entry.name, size, folder)
            if path.exists():
                found.append(_row(_json(path), str(path)))
    return found


def rows_of(status: dict[str, Any], where: str) -> list[RunRow]:
    """The runs that a written status holds."""
    return [
        _row({"name": entry["name"], "size": size, **form["run"]}, where)
        for entry in status["entries"] for size, form in entry["forms"].items() if form.get("run")
    ]  # fmt: skip


def read_status(path: Path) -> dict[str, Any]:
    """A written status; one without entries where there is no such file."""
    status = _json(path) if path.exists() else {"entries": []}
    if not isinstance(status, dict) or not isinstance(status.get("entries"), list):
        raise ConfigError(f"{path}: expected a status that `reproduce.py status --out` wrote; give another file")
    return status


def status_of(entries: Iterable[Entry], rows: Iterable[RunRow]) -> dict[str, Any]:
    """Everything that documents say of the figures. rows: of one figure and size the last counts."""
    by_form = {(row.name, row.size): row for row in rows}
    return {
        "entries": [
            {
                **{name: getattr(entry, name) for name in ("name", "paper", "item", "shows", "here")},
                "forms": {size: _form(form, by_form.get((entry.name, size))) for size, form in entry.forms.items()},
            }
            for entry in entries
        ]
    }


def judged(claims: Iterable[Claim], values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return each claim beside what was found: the direction, and ours over the paper's own number."""
    found = []
    for claim in claims:
        ours = values.get(claim.value)
        found.append(asdict(claim) | {"ours": ours, "holds": claim.holds(ours), "ratio": claim.ratio(ours)})
    return found


def _form(form: Form | NotYet, row: RunRow | None) -> dict[str, Any]:
    if isinstance(form, NotYet):
        return {"state": NOT_YET, "needs": form.needs}
    about = {
        "state": NOT_RUN if row is None else MEASURED,
        "commands": [command(step) for step in form.steps],
        "minutes": form.minutes,
        **{name: getattr(form, name) for name in ("workload", "writes", "differs")},
    }
    if row is None:
        return about
    run = {name: value for name, value in asdict(row).items() if name not in ("name", "size")}
    return about | {"run": run, "claims": judged(form.claims, row.values)}


def _row(values: Any, where: str) -> RunRow:
    try:
        return RunRow(**values)
    except TypeError as error:
        raise ConfigError(
            f"{where}: expected what `reproduce.py run` wrote, got {error}; remove it, run again"
        ) from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; remove it and run the figure again") from error
