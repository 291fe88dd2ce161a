"""Result rows as a table for the terminal: those that may be compared, and which may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from adaserve_jax.results.run_folder import point_of
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow

COLUMNS: dict[str, Callable[[ResultRow], str]] = {
    "policy": lambda r: r.policy if r.label is None else f"{r.policy} ({r.label})",
    "rate\n1/s": lambda r: (
        f"{r.rate_rps:g}" if r.arrival_process == "poisson" else f"{r.arrival_process} {r.rate_rps:.3g}"
    ),
    "class": lambda r: r.slo_class,
    "requests": lambda r: str(r.requests),
    "joint\nmet": lambda r: _percent(r.attainment),
    "TPOT\nmet": lambda r: _percent(r.attainment_tpot),
    "goodput\ntokens/s": lambda r: f"{r.goodput_tps:.1f}",
    "all\ntokens/s": lambda r: f"{r.throughput_tps:.1f}",
    "TTFT p50/p99\nms": lambda r: f"{_ms(r.ttft_p50_s)} / {_ms(r.ttft_p99_s)}",
    "TPOT p50/p99\nms": lambda r: f"{_ms(r.tpot_p50_s)} / {_ms(r.tpot_p99_s)}",
    "accepted\n/verify": lambda r: "-" if r.mean_accepted is None else f"{r.mean_accepted:.2f}",
}
"""Headers and cells of the columns that are always shown."""
VARIED = {"system": "system", "workload": "workload", "replicas": "replicas", "urgent_share": "urgent\nshare",
          "slo_scale": "SLO\nscale", "burstiness": "CV", "repeat": "repeat"}  # fmt: skip
"""Columns that are shown where they differ between rows, and their headers."""
TEXT_COLUMNS = ("system", "workload", "policy", "class")


def result_table(rows: Sequence[ResultRow]) -> Table:
    """Return a table with a line per valid row; the lines of single classes are dimmed below the one over all. About
    110 columns wide, and more where rows differ in what VARIED names."""
    shown = [row for row in rows if row.valid]
    table = Table(title=_title(rows), header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    varied = [name for name in VARIED if len({getattr(row, name) for row in shown}) > 1]
    changes = {(row.urgent_share, row.slo_scale) for row in shown}
    if "workload" in varied and len(changes) == len({row.workload for row in shown}):
        varied.remove("workload")  # it says no more than these do
    for name in (*(VARIED[each] for each in varied), *COLUMNS):
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
    for row in shown:
        overall = row.slo_class == ALL_CLASSES
        cells = (*(_plain(getattr(row, name)) for name in varied), *(cell(row) for cell in COLUMNS.values()))
        table.add_row(*cells, style=None if overall else "dim")
    return table


def refused(rows: Sequence[ResultRow]) -> list[str]:
    """Return the points that are not reported, each with the reason."""
    invalid = [row for row in rows if not row.valid and row.slo_class == ALL_CLASSES]
    return [f"{point_of(row)}: {row.invalid_reason}" for row in invalid]


def _title(rows: Sequence[ResultRow]) -> str | None:
    if not rows:
        return None
    size = f"{rows[0].target_params / 1e6:.1f}M" if rows[0].target_params else "size unknown"
    workloads = list(dict.fromkeys(row.workload for row in rows))
    named = workloads[0] if len(workloads) == 1 else f"{len(workloads)} of them"
    return f"{rows[0].target} ({size}) on {rows[0].device}, workload {named}, seed {rows[0].seed}"


def _plain(value: object) -> str:
    if value is None:
        return "as is"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
