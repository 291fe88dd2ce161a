"""What figures over a load state, read from the rows of `adaserve bench`. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Table
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, largest, least, over, series, violation_times

OURS, AUTHORS = "adaserve", ("adaserve-paper", "adaserve-code")
ByValue = dict[float, dict[str, ResultRow]]
"""By what is varied: by policy, the row over all classes, of several repeats their mean (`_mean`)."""
LABELS = {
    "rate_rps": "requests per second", "urgent_share": "share of urgent requests", "slo_scale": "SLO scale"
}  # fmt: skip


def bench_claims(kind: str) -> tuple[Claim, ...]:
    """Of a figure about `kind`: attainment, goodput or accepted tokens."""
    return {
        "attainment": (
            Claim("smallest lead in attainment over the best baseline, all points", "least lead", "at least", 0.0),
            Claim("largest ratio of the best baseline's violations to ours", "violations times", "at least", 1.0),
        ),
        "goodput": (
            Claim("largest ratio of goodput to the best baseline's", "goodput times", "at least", 1.0),
            Claim("smallest ratio of goodput to the best baseline's", "least goodput times", "at least", 1.0),
        ),
        "accepted": (
            Claim("accepted tokens at the lowest rate over those at the highest", "accepted falls", "at least", 1.0),
        ),
    }[kind]


def bench_rows(step: str, by: str) -> Callable[[Folders], Found]:
    """Reads the rows of a run in which column `by` was varied. Raises ConfigError: none is valid, or it is several runs
    or of several commits."""

    def read(folders: Folders) -> Found:
        path = folders[step] / "results.jsonl"
        rows = [row for row in read_rows(path, ResultRow) if row.slo_class == ALL_CLASSES and row.valid]
        if not rows:
            raise ConfigError(f"{path} has no valid row; the client was the bottleneck: run it on a quieter machine")
        if len({(row.run_id, row.commit) for row in rows}) > 1:
            raise ConfigError(
                f"{path} holds rows of several runs or commits; remove its folder and run the figure again"
            )
        repeats: dict[float, dict[str, list[ResultRow]]] = {}
        for row in rows:
            repeats.setdefault(getattr(row, by), {}).setdefault(row.policy, []).append(row)
        found = {value: {name: _mean(each) for name, each in at.items()} for value, at in sorted(repeats.items())}
        return Found(judged(found), (_figure(found, by), _table(found, by)), _about(rows[-1]))

    return read


def judged(points: ByValue) -> dict[str, float | None]:
    pairs = [(at[OURS], _others(at)) for at in points.values() if OURS in at and _others(at)]
    best = [(ours, max(row.attainment or 0.0 for row in others)) for ours, others in pairs]
    richest = [over(ours.goodput_tps, max(row.goodput_tps for row in others)) for ours, others in pairs]
    accepted = [ours.mean_accepted for ours, _ in pairs if ours.mean_accepted is not None]
    return {
        "least lead": least((ours.attainment or 0.0) - theirs for ours, theirs in best),
        "violations times": largest(
            violation_times(theirs, ours.attainment or 0.0, ours.requests_with_slo) for ours, theirs in best
        ),
        "goodput times": largest(richest),
        "least goodput times": least(richest),
        "accepted falls": over(accepted[0], accepted[-1]) if len(accepted) > 1 else None,
    }


def _mean(repeats: Sequence[ResultRow]) -> ResultRow:
    """Their means in what is judged, and the sum of their requests; all else is the first one's."""
    attainments, accepted = ([getattr(row, name) for row in repeats if getattr(row, name) is not None]
                             for name in ("attainment", "mean_accepted"))  # fmt: skip
    return replace(
        repeats[0],
        attainment=fmean(attainments) if attainments else None,
        goodput_tps=fmean(row.goodput_tps for row in repeats),
        mean_accepted=fmean(accepted) if accepted else None,
        requests_with_slo=sum(row.requests_with_slo for row in repeats),
    )


def _others(at: dict[str, ResultRow]) -> list[ResultRow]:
    return [row for name, row in at.items() if name != OURS and name not in AUTHORS]


def _figure(points: ByValue, by: str):
    def curves(column: str):
        return series({
            name: {x: getattr(at[name], column) if name in at else None for x, at in points.items()}
            for name in _names(points)
        })  # fmt: skip

    panels = (
        ("requests met", "share of requests", curves("attainment")),
        ("goodput", "tokens/s", curves("goodput_tps")),
        ("accepted", "tokens per verification", curves("mean_accepted")),
    )
    return figure(by, f"By {LABELS[by]}", "Measured on the engine.", LABELS[by], panels, percent=("requests met",))


def _table(points: ByValue, by: str) -> Table:
    rows = tuple((name, *(_cell(at.get(name)) for at in points.values())) for name in _names(points))
    columns = ("policy", *(f"{value:g}" for value in points))
    return Table(f"{by}-table", f"By {LABELS[by]}", "Requests met, and goodput in tokens/s.", columns, rows)


def _names(points: ByValue) -> list[str]:
    """Ours first, so that it looks the same in every figure."""
    return sorted({name for at in points.values() for name in at}, key=lambda name: (name != OURS, name))


def _cell(row: ResultRow | None) -> str:
    return "-" if row is None or row.attainment is None else f"{row.attainment:.1%}, {row.goodput_tps:.0f}"


def _about(row: ResultRow) -> dict[str, str]:
    size = "unknown" if row.target_params is None else f"{row.target_params / 1e6:.1f}M parameters"
    return {"commit": row.commit, "machine": row.machine, "device": row.device, "target": size}
