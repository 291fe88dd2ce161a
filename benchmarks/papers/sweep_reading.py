"""What AdaServe's figures state, read from the points of benchmarks/adaserve/sweeps.py. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from adaserve_jax.report.document import Figure, Table
from adaserve_jax.results.jsonl import read_rows
from benchmarks.adaserve.sweeps_points import OURS, SWEEPS
from benchmarks.adaserve.sweeps_tables import Line, best_baseline, grouped
from benchmarks.papers.entry import Folders, Found
from benchmarks.papers.reading import figure, largest, least, over, series, violation_times

Points = dict[float, dict[str, Line]]
"""By value of the sweep: by contender."""
CONTINUOUS = ("ar", "sarathi")
"""Continuous batching without speculation."""
CHAINS = ("spec:4", "spec:6")
STRICT = 1.0
"""SLO scale below which the paper says that continuous batching fails."""


def sweeps(step: str, sweep: str) -> Callable[[Folders], Found]:
    """Reads every machine's points of one sweep."""

    def read(folders: Folders) -> Found:
        lines = of_last_commit(read_rows(folders[step] / "sweeps.jsonl", Line))
        values: dict[str, float | None] = {}
        shown: list[Figure | Table] = []
        for (machine, _, name), points in grouped(lines).items():
            if name == sweep:
                values |= {f"{machine}: {key}": value for key, value in judged(points).items()}
                shown += [_figure(machine, sweep, points), _table(machine, sweep, points)]
        return Found(values, tuple(shown), _about(lines))

    return read


def of_last_commit(lines: list[Line]) -> list[Line]:
    """A file that was gone on with has lines of several commits."""
    return [line for line in lines if line.overall["commit"] == lines[-1].overall["commit"]]


def judged(points: Points) -> dict[str, float | None]:
    """Every number that a claim about one sweep of one machine may be decided by."""
    held = [_Point(at) for at in points.values() if OURS in at]
    last = held[-1] if held else None
    return {
        "attainment times": largest(point.attainment_times for point in held),
        "violations times": largest(point.violation_times for point in held),
        "violations times at the last": None if last is None else last.violation_times,
        "goodput times": largest(point.goodput_times for point in held),
        "least lead": least(point.lead for point in held),
        "least goodput times": least(point.goodput_times for point in held),
        "continuous batching where strict": largest(
            at[name].attainment for value, at in points.items() for name in CONTINUOUS if value < STRICT and name in at
        ),
        "accepted falls": _accepted_falls(points),
        "accepted of chains varies": largest(_varies(points, name) for name in CHAINS),
    }


class _Point:
    """One point: ours, and the baselines that have the most of each."""

    def __init__(self, at: dict[str, Line]):
        self._ours = at[OURS]
        self._best = best_baseline(at, lambda line: line.attainment)
        self._richest = best_baseline(at, lambda line: line.goodput)

    @property
    def attainment_times(self) -> float | None:
        return over(self._ours.attainment, self._best.attainment if self._best else None)

    @property
    def lead(self) -> float | None:
        return None if self._best is None else self._ours.attainment - self._best.attainment

    @property
    def goodput_times(self) -> float | None:
        return over(self._ours.goodput, self._richest.goodput if self._richest else None)

    @property
    def violation_times(self) -> float | None:
        """Of the best baseline, over ours."""
        if self._best is None:
            return None
        return violation_times(self._best.attainment, self._ours.attainment, self._ours.overall["requests_with_slo"])


def _accepted(points: Points, name: str) -> list[float]:
    return [at[name].overall["mean_accepted"] for at in points.values() if name in at and _speculated(at[name])]


def _speculated(line: Line) -> bool:
    return line.overall["mean_accepted"] is not None


def _accepted_falls(points: Points) -> float | None:
    """Accepted tokens per verification at the first value over those at the last."""
    accepted = _accepted(points, OURS)
    return over(accepted[0], accepted[-1]) if len(accepted) > 1 else None


def _varies(points: Points, name: str) -> float | None:
    """The most over the least of all values, less 1."""
    accepted = _accepted(points, name)
    return max(accepted) / min(accepted) - 1 if len(accepted) > 1 and min(accepted) > 0 else None


def _names(points: Points) -> list[str]:
    """Ours first, so that it looks the same in every figure."""
    return sorted({name for at in points.values() for name in at}, key=lambda name: (name != OURS, name))


def _figure(machine: str, sweep: str, points: Points) -> Figure:
    def curves(of: Callable[[Line], float | None]) -> Iterator[tuple[str, dict[float | str, float | None]]]:
        for name in _names(points):
            yield name, {value: of(at[name]) if name in at else None for value, at in points.items()}

    panels = (
        ("requests met", "share of requests", series(dict(curves(lambda line: line.attainment)))),
        ("goodput", "tokens/s", series(dict(curves(lambda line: line.goodput)))),
        (
            "accepted",
            "tokens per verification",
            series(dict(curves(lambda line: line.overall["mean_accepted"] or None))),
        ),
    )
    caption = f"{machine}, simulated; baselines at the paper's setting; TPOT targets only."
    return figure(
        f"{machine}-{sweep}", f"{machine} by {SWEEPS[sweep]}", caption, SWEEPS[sweep], panels, percent=("requests met",)
    )


def _table(machine: str, sweep: str, points: Points) -> Table:
    """Attainment, goodput, and the 99th percentile of TTFT, which no target holds down."""
    rows = tuple((name, *(_cell(at[name]) if name in at else "-" for at in points.values())) for name in _names(points))
    columns = ("policy", *(f"{value:g}" for value in points))
    caption = "Requests met, goodput in tokens/s, and the 99th percentile of TTFT, for which no request has a target."
    return Table(f"{machine}-{sweep}-table", f"{machine} by {SWEEPS[sweep]}, in numbers", caption, columns, rows)


def _cell(line: Line) -> str:
    ttft = line.overall["ttft_p99_s"]
    return f"{line.attainment:.1%}, {line.goodput:.0f}" + ("" if ttft is None else f", {ttft:.1f} s")


def _about(lines: list[Line]) -> dict[str, str]:
    def all_of(column: str) -> str:
        return "; ".join(sorted({str(row[column]) for line in lines for row in line.rows}))

    return {"commit": all_of("commit"), "machine": all_of("machine"), "device": all_of("device")}
