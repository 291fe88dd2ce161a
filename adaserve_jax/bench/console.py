"""Result rows as a table for the terminal: those that may be compared, and which may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import point_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow, Summary

Columns = dict[str, Callable[[Summary, ResultRow], str]]
LOAD: Columns = {
    "policy": lambda _, row: row.policy if row.label is None else f"{row.policy} ({row.label})",
    "rate\n1/s": lambda _, row: (
        f"{row.rate_rps:.4g}" if row.arrival_process in UNNAMED else f"{row.arrival_process} {row.rate_rps:.3g}"
    ),
}
COLUMNS: Columns = {
    "reqs": lambda figures, _: str(figures.requests),
    "joint\nmet": lambda figures, _: _percent(figures.attainment),
    "TPOT\nmet": lambda figures, _: _percent(figures.attainment_tpot),
    "goodput\ntok/s": lambda figures, _: "-" if figures.attainment is None else f"{figures.goodput_tps:.1f}",
    "TTFT, ms\np50 / p99": lambda figures, _: f"{_ms(figures.ttft_p50_s)} / {_ms(figures.ttft_p99_s)}",
    "TPOT, ms\np50 / p99": lambda figures, _: f"{_ms(figures.tpot_p50_s)} / {_ms(figures.tpot_p99_s)}",
}
"""Headers and cells of the columns that are always shown. The row: for what holds for all repeats."""
CLASS: Columns = {"class": lambda figures, _: figures.slo_class}
MORE: Columns = {
    "all\ntok/s": lambda figures, _: f"{figures.throughput_tps:.1f}",
    "accepted\n/verify": lambda f, _: "-" if f.mean_accepted is None else f"{f.mean_accepted:.2f}",
}
"""Further columns of the table by class."""
UNNAMED = ("poisson", "trace")
"""Arrival processes that are not named beside a rate."""
VARIED = {"system": "system", "replicas": "replicas", "urgent_share": "urgent\nshare", "slo_scale": "SLO\nscale",
          "burstiness": "CV"}  # fmt: skip
"""Columns that are shown where they differ between rows, and their headers."""
TEXT_COLUMNS = ("system", "policy", "class")
_SUMS = ("requests", "requests_with_slo")


def result_table(
    rows: Sequence[ResultRow], *, by_class: bool = False, records: Sequence[RequestRecord] = ()
) -> Table:  # fmt: skip
    """Return a table with a line per policy and load, over the valid repeats of each.

    It is at most 80 columns wide unless rows differ in what VARIED names. Shares are of the requests of all repeats,
    other figures are means over repeats. by_class: also a line for each SLO class, dimmed, and the columns of MORE.
    records: of these rows' points, which say how many requests have a TPOT target; without, the share that met theirs
    is left open where the rows do not say it.
    """
    with_tpot = _with_tpot(records)
    shown = [row for row in rows if row.valid and (by_class or row.slo_class == ALL_CLASSES)]
    table = Table(title=_title(rows), header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    varied = [name for name in VARIED if len({getattr(row, name) for row in shown}) > 1]
    columns = {**LOAD, **CLASS, **COLUMNS, **MORE} if by_class else {**LOAD, **COLUMNS}
    for name in (*(VARIED[each] for each in varied), *columns):
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
    lines: dict[tuple[object, ...], list[ResultRow]] = {}
    for row in shown:
        load = (row.arrival_process, row.rate_rps, *(getattr(row, name) for name in VARIED), row.workload)
        lines.setdefault((load, row.policy, row.label, row.slo_class), []).append(row)
    loads = list(dict.fromkeys(key[0] for key in lines))
    policies = list(dict.fromkeys(key[1:3] for key in lines))
    for key in sorted(lines, key=lambda key: (loads.index(key[0]), policies.index(key[1:3]))):
        repeats = lines[key]
        first, figures = repeats[0], _pooled(repeats, with_tpot)
        cells = [_plain(getattr(first, name)) for name in varied]
        cells += [cell(figures, first) for cell in columns.values()]
        dim = first.slo_class != ALL_CLASSES
        table.add_row(*map(escape, cells), style="dim" if dim else None)
    return table


def _with_tpot(records: Sequence[RequestRecord]) -> Counter[tuple[str, str, str]]:
    """Return how many requests count for a TPOT target, by run, point and class."""
    counted = (record for record in records if record.tpot_met is not None)
    return Counter(
        (record.run_id, record.point, name) for record in counted for name in (record.slo_class, ALL_CLASSES)
    )


def _tpot_met(repeats: Sequence[ResultRow], with_tpot: Counter[tuple[str, str, str]]) -> float | None:
    """Return the share of requests with a TPOT target that met it, over all repeats; None where that is not known."""
    known = [(row.attainment_tpot, row) for row in repeats if row.attainment_tpot is not None]
    if len({share for share, _ in known}) < 2:
        return known[0][0] if known else None
    counts = [with_tpot[row.run_id, row.point, row.slo_class] for _, row in known]
    if not all(counts):
        if any(row.attainment_ttft is not None or row.attainment_e2e is not None for _, row in known):
            return None
        counts = [row.requests_with_slo for _, row in known]
    return sum(count * share for count, (share, _) in zip(counts, known, strict=True)) / sum(counts)


def _pooled(repeats: Sequence[ResultRow], with_tpot: Counter[tuple[str, str, str]]) -> Summary:
    """Return one summary of the repeats of a point, for the columns above."""
    first = repeats[0]
    if len(repeats) == 1:
        return first
    values: dict[str, Any] = {name: sum(getattr(row, name) for row in repeats) for name in _SUMS}
    for column in fields(Summary):
        known = [(getattr(row, column.name), row) for row in repeats]
        known = [(value, row) for value, row in known if isinstance(value, int | float)]
        if column.name in (*_SUMS, "attainment_tpot") or not known:
            continue
        weights = [row.requests_with_slo if column.name == "attainment" else 1 for _, row in known]
        total = sum(weights)
        values[column.name] = sum(w * v for w, (v, _) in zip(weights, known, strict=True)) / total if total else None
    return replace(first, **values, attainment_tpot=_tpot_met(repeats, with_tpot))


def refused(rows: Sequence[ResultRow]) -> list[str]:
    """Return the points that are not reported, each with the reason."""
    invalid = [row for row in rows if not row.valid and row.slo_class == ALL_CLASSES]
    return [f"{point_of(row)}: {row.invalid_reason}" for row in invalid]


def _title(rows: Sequence[ResultRow]) -> str | None:
    if not rows:
        return None
    size = f" ({rows[0].target_params / 1e6:.1f}M)" if rows[0].target_params else ""
    where = ", simulated" if rows[0].device.startswith("simulated") else f" on {rows[0].device}"
    workloads = list(dict.fromkeys(row.workload for row in rows))
    named = f"workload {workloads[0]}" if len(workloads) == 1 else f"{len(workloads)} workloads"
    synthetic = ", synthetic acceptance" if any(row.synthetic_acceptance is not None for row in rows) else ""
    return escape(f"{rows[0].target}{size}{where}, {named}, seed {rows[0].seed}{synthetic}")


def _plain(value: object) -> str:
    if value is None:
        return "as is"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"
