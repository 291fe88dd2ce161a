"""A report of records as a table for the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from adaserve_jax.report.estimates import ms, percent
from adaserve_jax.results.aggregate import ClassReport, Percentiles, ServedReport, TargetSummary
from adaserve_jax.results.schema import Summary

MOST_COLUMNS = 1000
Cell = Callable[[ClassReport], str]


def _count(name: str) -> Cell:
    return lambda each: f"{getattr(each.summary, name):,}"


def _share(name: str) -> Cell:
    return lambda each: percent(getattr(each.summary, name))


def _rate(name: str) -> Cell:
    return lambda each: f"{getattr(each.summary, name):,.1f}"


def _times(*names: str) -> Cell:
    return lambda each: " / ".join(ms(getattr(each.summary, name)) for name in names)


def _target(kind: str) -> Cell:
    return lambda each: _range(getattr(each, kind))


def _over(kind: str) -> Cell:
    return lambda each: _ratios(getattr(each, kind).over)


ROWS: tuple[tuple[str, Cell], ...] = (
    ("choices", _count("requests")),
    ("finished", _count("finished")),
    ("rejected", _count("rejected")),
    ("failed (of them aborted)", lambda each: f"{each.summary.failed:,} ({each.aborted:,})"),
    ("with a target", _count("requests_with_slo")),
    ("all targets met", _share("attainment")),
    ("TPOT target met", _share("attainment_tpot")),
    ("TTFT target met", _share("attainment_ttft")),
    ("goodput, tokens/s", _rate("goodput_tps")),
    ("throughput, tokens/s", _rate("throughput_tps")),
    ("throughput while busy, tokens/s", lambda each: _number(each.summary.busy_throughput_tps, ",.1f")),
    ("TTFT target, ms", _target("ttft")),
    ("TTFT p50 / p90 / p99, ms", _times("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
    ("TTFT / target, p50 / p90 / p99", _over("ttft")),
    ("TPOT target, ms", _target("tpot")),
    ("TPOT p50 / p90 / p99, ms", _times("tpot_p50_s", "tpot_p90_s", "tpot_p99_s")),
    ("TPOT / target, p50 / p90 / p99", _over("tpot")),
    ("queue time p50 / p99, ms", _times("queue_p50_s", "queue_p99_s")),
    ("end to end, mean, ms", _times("e2e_mean_s")),
    ("prompt tokens (of them cached)", lambda each: f"{each.summary.prompt_tokens:,} ({each.cached_tokens:,})"),
    ("output tokens", _count("output_tokens")),
    ("draft tokens verified", _count("drafted_tokens")),
    ("accepted of them", lambda each: f"{each.summary.accepted_tokens:,} ({percent(each.summary.acceptance_rate)})"),
    ("accepted per verification", lambda each: _number(each.summary.mean_accepted, ".2f")),
    ("preemptions", _count("preemptions")),
)
"""Labels and values, from top to bottom; each class has a column."""
CAUSES = tuple(field.name for field in fields(Summary) if field.name.startswith("cause_"))


def rows(report: ServedReport) -> Iterator[list[str]]:
    """Labels and a value per class; of causes of violations and of errors those that there were."""
    for label, cell in ROWS:
        yield [label, *(cell(each) for each in report.classes)]
    every = report.classes[0]
    for name in CAUSES:
        if getattr(every.summary, name):
            cause = name.removeprefix("cause_").replace("_", " ")
            yield [f"violations: {cause}", *(_count(name)(each) for each in report.classes)]
    for code, _ in every.errors:
        yield [f"error {code}", *(f"{dict(each.errors).get(code, 0):,}" for each in report.classes)]


def print_table(report: ServedReport) -> None:
    """To stdout; a pipe or a file gets the table's full width whatever the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for each in report.classes:
        table.add_column(each.summary.slo_class, justify="right")
    for row in rows(report):
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(max_width=MOST_COLUMNS)).maximum
        console = Console(width=max(console.width, needed), highlight=False)
    console.print(*head(report), sep="\n", markup=False, soft_wrap=True)
    console.print(table)


def as_markdown(report: ServedReport) -> str:
    names = [each.summary.slo_class for each in report.classes]
    lines = [*(f"{line}  " for line in head(report)), "", _row(["", *names]), _row(["---", *("---:" for _ in names)])]
    return "\n".join([*lines, *map(_row, rows(report))])


def as_json(report: ServedReport) -> str:
    """One object; times in ISO 8601, UTC, and otherwise the columns of docs/metrics.md, in seconds."""
    times = ("since_unix_s", "until_unix_s", "first_unix_s", "last_unix_s")
    body: dict[str, Any] = {name.removesuffix("_unix_s"): _iso(getattr(report, name)) for name in times}
    body |= {"wall_s": report.wall_s, "records_in_file": report.held.choices}
    body["runs"] = [asdict(run) for run in report.runs]
    body["classes"] = [_plain(each) for each in report.classes]
    return json.dumps(body, indent=2, allow_nan=False)


def _plain(each: ClassReport) -> dict[str, Any]:
    values = asdict(each)
    return values.pop("summary") | values | {"errors": dict(each.errors)}


def head(report: ServedReport) -> list[str]:
    """What is reported on: the time, and the engines."""
    first, last = _local(report.first_unix_s), _local(report.last_unix_s)
    lines = [f"first arrival {first}, last end {last}, {report.wall_s:,.0f} s between them"]
    return lines + [
        f"{run.model}: policy {run.policy}, target {run.target}, draft {run.draft or 'none'}, on {run.device}, "
        f"version {run.package_version}"
        for run in dict.fromkeys(report.runs)
    ]


def nothing_found(path: Path, report: ServedReport, *, slo_class: str | None, key: str | None) -> str:
    """Why a report is empty, and where there is something."""
    held = report.held
    if not held.choices:
        return f"{path} has no records yet: no choice has ended since the server began to write it"
    until = "now" if report.until_unix_s == float("inf") else _local(report.until_unix_s)
    asked = [f"of class {slo_class!r}"] * (slo_class is not None) + [f"with key {key!r}"] * (key is not None)
    which = "".join(f" {part}" for part in asked)
    return (
        f"no records{which} from {_local(report.since_unix_s)} until {until}; {path} has {held.choices:,}, whose "
        f"choices ended from {_local(held.first_unix_s)} to {_local(held.last_unix_s)}"
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _local(unix_s: float | None) -> str:
    return "-" if unix_s is None else datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")


def _iso(unix_s: float | None) -> str | None:
    if unix_s is None or unix_s == float("inf"):
        return None
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _range(targets: TargetSummary) -> str:
    if targets.least_s is None or targets.most_s is None:
        return "-"
    least, most = (f"{value * 1e3:g}" for value in (targets.least_s, targets.most_s))
    return least if least == most else f"{least} to {most}"


def _ratios(values: Percentiles) -> str:
    return " / ".join(_number(value, ".2f") for value in values)
