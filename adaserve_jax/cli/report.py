"""`adaserve report`: writes a page about measured runs, or a table of what a server did in a time."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text as Styled

from adaserve_jax.cli.terminal import MOST_COLUMNS, say, table_console
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import INTERVALS, Document, Table, Text
from adaserve_jax.report.estimates import ms, percent
from adaserve_jax.results.aggregate import ClassReport, Percentiles, ServedReport, TargetSummary, report_of
from adaserve_jax.results.schema import CAUSE_COLUMNS
from adaserve_jax.results.whole_file import SHARED, write_whole

SUFFIXES = (".html", ".md")
_SQLITE = b"SQLite format 3\0"
"""Beginning of a database's file."""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
SINCE, UNTIL = "1h", "now"
Cell = Callable[[ClassReport], str]


class Format(StrEnum):
    table = "table"
    markdown = "markdown"
    json = "json"


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="folders that `adaserve bench` or `adaserve simulate` wrote; several make one report. The file that "
            "`adaserve serve --records` writes, or has written: a table of a time, or with -o a report of all of it. "
            "Files that `adaserve bench --suite` wrote: a page that compares them"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="file to write, ending in .html or .md; without: a summary in the terminal"),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="folder of another run: the differences from it, with their intervals")
    ] = None,
    title: Annotated[str | None, typer.Option(help="title of the report; without: made from the folders")] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="point to show over time and to write with --perfetto, such as adaserve@2/s; without: chosen"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="requests per second of the figures that show one rate; without: the middle one"),
    ] = None,
    subject: Annotated[
        str | None,
        typer.Option(help="policy that is compared with each other one; without: adaserve, or the policy named first"),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="file for that point's requests as trace events, which ui.perfetto.dev shows")
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            help="of records: choices that ended since then: 30m, 1h, 7d before now, or such as 2026-01-31T08:00"
        ),
    ] = SINCE,
    until: Annotated[str, typer.Option(help="and before then, written likewise; now: all there are")] = UNTIL,
    slo_class: Annotated[str | None, typer.Option("--class", help="of records: this SLO class only")] = None,
    key: Annotated[
        str | None, typer.Option(help="of records: requests that came with the API key of this name only")
    ] = None,
    format: Annotated[Format, typer.Option(help="of records: how to write the table")] = Format.table,
) -> None:
    """Show what a run measured, as one file to read and to send; or what a server did.

    Definitions: docs/metrics.md; how to read a report: docs/reports.md. A time without a zone is the local one.
    """
    paths = folders or []
    of_reports = {"-o": out, "--against": against, "--title": title, "--timeline": timeline, "--rate": rate}
    of_reports |= {"--perfetto": perfetto, "--subject": subject}
    of_records = {"--since": since != SINCE, "--until": until != UNTIL, "--class": slo_class, "--key": key}
    of_records |= {"--format": format is not Format.table}
    if any(path.suffix == ".json" and not _holds_records(path) for path in paths):
        del of_reports["-o"], of_reports["--title"]
        _refuse(of_reports | of_records, "folders or records, not to the files of a suite")
        write_suite_page(paths, out, title)
    elif len(paths) == 1 and paths[0].is_file() and not any(_is_given(value) for value in of_reports.values()):
        _report_records(paths[0], since, until, slo_class, key, format)
    else:
        if paths and all(path.exists() for path in paths):
            _refuse(of_records, "the table of one server's records, not to a report")
        write_report(paths, out, against, title=title, timeline=timeline, rate=rate, subject=subject, perfetto=perfetto)


def _holds_records(path: Path) -> bool:
    """Return whether a file is a server's database, whatever it is called."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _refuse(options: dict[str, object], belongs: str) -> None:
    """Raise ConfigError for the first given option that has no effect here."""
    for name, value in options.items():
        if _is_given(value):
            raise ConfigError(f"{name} belongs to {belongs}; leave it out")


def _report_records(
    records: Path, since: str, until: str, slo_class: str | None, key: str | None, format: Format
) -> None:
    now = time.time()
    until_unix_s = float("inf") if until == UNTIL else parse_time(until, now, "--until")
    since_unix_s = parse_time(since, now, "--since")
    if since_unix_s >= until_unix_s:
        raise ConfigError(f"--since must be before --until, got {since} and {until}")
    found = report_of(records, since_unix_s=since_unix_s, until_unix_s=until_unix_s, slo_class=slo_class, key=key)
    if format is Format.json:
        typer.echo(as_json(found))
    elif not found.classes:
        typer.echo(nothing_found(records, found, slo_class=slo_class, key=key))
    elif format is Format.markdown:
        typer.echo(as_markdown(found))
    else:
        print_table(found)


def parse_time(text: str, now_unix_s: float, option: str) -> float:
    """Return the Unix time of "1h" (before now) or of an ISO 8601 time. Raises ConfigError naming the option."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if ago is not None:
        return max(0.0, now_unix_s - float(ago[1]) * UNITS_S[ago[2]])
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            f"{option} must be a time before now such as 30m, 1h or 7d, or an ISO time such as 2026-01-31T08:00, "
            f"got {text!r}"
        ) from error


def write_report(
    folders: Sequence[Path], out: Path | None, against: Path | None, *, title: str | None, timeline: str | None,
    rate: float | None, subject: str | None, perfetto: Path | None,
) -> None:  # fmt: skip
    """Write the files that are asked for; without a file to write, print the headline. Raises ConfigError."""
    render = None if out is None else renderer(out)
    from adaserve_jax.report.build import build, load_folders
    from adaserve_jax.report.points import measured

    loaded, other = load_folders(tuple(folders), against)
    found = measured(loaded, beside=() if other is None else (other,))
    compared = None if other is None else measured((other,), beside=loaded)
    document = build(found, against=compared, title=title, timeline=timeline, rate=rate, subject=subject)
    if out is not None and render is not None:
        _write(out, render(document))
        say(f"report in {out}", style="dim")
    else:
        print_summary(document)
    if perfetto is not None:
        from adaserve_jax.report.perfetto import traced_point, write_trace
        from adaserve_jax.report.view import invalid_point

        point = traced_point(found, timeline, rate)
        write_trace(point, perfetto)
        say(f"{point.name} as trace events in {perfetto}; open it at https://ui.perfetto.dev", style="dim")
        if not point.row.valid:
            say(f"warning: {invalid_point(point)}", style="dim")
    if out is None:
        say(f"the whole report: adaserve report {shlex.join(map(str, folders))} -o report.html", style="dim")


def write_suite_page(files: Sequence[Path], out: Path | None, title: str | None) -> None:
    """Compare submissions to the multi-SLO benchmark: write the page, or print its headline. Raises ConfigError."""
    render = None if out is None else renderer(out)
    from adaserve_jax.report.multi_slo import multi_slo_page
    from adaserve_jax.results.submission import read_submission

    document = multi_slo_page([read_submission(path) for path in files], title)
    if out is None or render is None:
        print_summary(document)
        say(f"the whole page: adaserve report {shlex.join(map(str, files))} -o page.html", style="dim")
    else:
        _write(out, render(document))
        say(f"page in {out}", style="dim")


def renderer(out: Path) -> Callable[[Document], str]:
    """Return the renderer for a file of this name. Raises ConfigError for another ending or without matplotlib."""
    suffix = out.suffix.lower()
    if suffix == ".md":
        from adaserve_jax.report.markdown import render_markdown

        return render_markdown
    if suffix == ".html":
        from adaserve_jax.report.figures import need_matplotlib
        from adaserve_jax.report.html import render_html

        need_matplotlib()
        return render_html
    raise ConfigError(f"-o must end in {' or '.join(SUFFIXES)}, got {out}")


def print_summary(document: Document) -> None:
    """Print title, warnings and the headline's texts and tables to stdout; a pipe or file gets whole tables."""
    headline = document.headline
    shown = headline.items if headline else ()
    console = table_console(*(_grid(item, folded=False) for item in shown if isinstance(item, Table)))
    console.print(document.title, style="bold", markup=False, soft_wrap=True)
    for section in document.sections:
        for item in section.items:
            if isinstance(item, Text) and item.warns:
                console.print(Styled(f"warning: {item.text}", style="yellow"), soft_wrap=True)
    for item in shown:
        if isinstance(item, Text) and not item.warns:
            console.print(item.text, markup=False, soft_wrap=True)
        elif isinstance(item, Table):
            console.print()
            console.print(item.title, style="bold", markup=False, soft_wrap=True)
            if left_out := _print_table(console, item):
                said = f"Left out here: {'; '.join(left_out)}. A wider terminal and -o report.html have them."
                console.print(said, markup=False, soft_wrap=True)
            if item.caption:
                caption = item.caption.replace(INTERVALS, "") if left_out else item.caption
                console.print(caption, style="dim", markup=False, soft_wrap=True)


def _print_table(console: Console, table: Table) -> list[str]:
    """Print a table; into a terminal that is too narrow without its intervals, then without its last columns too.

    Returns what was left out.
    """
    grid = _grid(table, folded=console.is_terminal)
    if not console.is_terminal or _width(console, grid) <= console.width:
        console.print(grid)
        return []
    rows = tuple(
        tuple(cell.partition(" (")[0] if at in table.numeric else cell for at, cell in enumerate(row))
        for row in table.rows
    )
    bare = replace(table, columns=tuple(name.replace(" ", "\n") for name in table.columns), rows=rows)
    widths = range(len(bare.columns), 0, -1)
    fits = (most for most in widths if _width(console, _grid(bare, folded=True, most=most)) <= console.width)
    shown = next(fits, 1)
    console.print(_grid(bare, folded=True, most=shown))
    return [*(["intervals"] if rows != table.rows else []), *table.columns[shown:]]


def _width(console: Console, grid: Grid) -> int:
    """Return the columns of a terminal that show every cell unbroken."""
    return console.measure(grid, options=console.options.update(max_width=MOST_COLUMNS)).maximum


def _grid(table: Table, *, folded: bool, most: int | None = None) -> Grid:
    """Return a table for the terminal. folded: an interval stands below its value. most: columns; None: all."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(table.columns[:most]):
        numeric = index in table.numeric
        grid.add_column(Styled(column), justify="right" if numeric else "left", no_wrap=index == 0)
    for i, row in enumerate(table.rows):
        cells = (
            cell.replace(" (", "\n(") if folded and j in table.numeric else cell for j, cell in enumerate(row[:most])
        )
        grid.add_row(*(Styled(cell, style="bold" if (i, j) in table.strong else "") for j, cell in enumerate(cells)))
    return grid


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, mode=SHARED)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another -o") from error


def _count(name: str) -> Cell:
    return lambda each: f"{getattr(each.summary, name):,}"


def _share(name: str) -> Cell:
    return lambda each: percent(getattr(each.summary, name))


def _rate(name: str) -> Cell:
    return lambda each: f"{getattr(each.summary, name):,.1f}"


def _times(*names: str) -> Cell:
    return lambda each: " / ".join(ms(getattr(each.summary, name)) for name in names)


ROWS: tuple[tuple[str, Cell], ...] = (
    ("choices", _count("requests")),
    ("finished", _count("finished")),
    ("rejected", _count("rejected")),
    ("cancelled by the client", _count("cancelled")),
    ("failed (of them aborted)", lambda each: f"{each.summary.failed:,} ({each.aborted:,})"),
    ("with a target", _count("requests_with_slo")),
    ("all targets met", _share("attainment")),
    ("TPOT target met", _share("attainment_tpot")),
    ("TTFT target met", _share("attainment_ttft")),
    ("deadline met", _share("attainment_e2e")),
    ("goodput, tokens/s", _rate("goodput_tps")),
    ("throughput, tokens/s", _rate("throughput_tps")),
    ("throughput while busy, tokens/s", lambda each: _number(each.summary.busy_throughput_tps, ",.1f")),
    ("TTFT target, ms", lambda each: _range(each.ttft)),
    ("TTFT p50 / p90 / p99, ms", _times("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")),
    ("TTFT / target, p50 / p90 / p99", lambda each: _ratios(each.ttft.over)),
    ("TPOT target, ms", lambda each: _range(each.tpot)),
    ("TPOT p50 / p90 / p99, ms", _times("tpot_p50_s", "tpot_p90_s", "tpot_p99_s")),
    ("TPOT / target, p50 / p90 / p99", lambda each: _ratios(each.tpot.over)),
    ("queue time p50 / p99, ms", _times("queue_p50_s", "queue_p99_s")),
    ("end to end, mean, ms", _times("e2e_mean_s")),
    ("deadline, ms", lambda each: _range(each.e2e)),
    ("end to end / deadline, p50 to p99", lambda each: _ratios(each.e2e.over)),
    ("prompt tokens (of them cached)", lambda each: f"{each.summary.prompt_tokens:,} ({each.cached_tokens:,})"),
    ("output tokens", _count("output_tokens")),
    ("draft tokens verified", _count("drafted_tokens")),
    ("accepted of them", lambda each: f"{each.summary.accepted_tokens:,} ({percent(each.summary.acceptance_rate)})"),
    ("accepted per verification", lambda each: _number(each.summary.mean_accepted, ".2f")),
    ("preemptions", _count("preemptions")),
)
"""Labels and cells of the table, from top to bottom; each class has a column."""


def rows(report: ServedReport) -> Iterator[list[str]]:
    """Yield a label and a value per class; causes of violations and errors only where there were any."""
    for label, cell in ROWS:
        yield [label, *(cell(each) for each in report.classes)]
    every = report.classes[0]
    for name in CAUSE_COLUMNS:
        if getattr(every.summary, name):
            cause = name.removeprefix("cause_").replace("_", " ")
            yield [f"violations: {cause}", *(_count(name)(each) for each in report.classes)]
    for code, _ in every.errors:
        yield [f"error {code}", *(f"{dict(each.errors).get(code, 0):,}" for each in report.classes)]


def print_table(report: ServedReport) -> None:
    """Print the table to stdout: a narrow terminal gets the classes in several, a pipe or a file one of full width."""
    names, cells = [each.summary.slo_class for each in report.classes], list(rows(report))

    def grid(begin: int, end: int) -> Grid:
        table = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("", no_wrap=True)
        for name in names[begin:end]:
            table.add_column(Styled(name), justify="right", no_wrap=True)
        for label, *row in cells:
            table.add_row(label, *row[begin:end])
        return table

    console = table_console(grid(0, len(names)))
    console.print(*head(report), sep="\n", markup=False, soft_wrap=True)
    begin = 0
    while begin < len(names):
        fits = (end for end in range(len(names), begin, -1) if _width(console, grid(begin, end)) <= console.width)
        end = next(fits, begin + 1)
        console.print(grid(begin, end))
        begin = end


def as_markdown(report: ServedReport) -> str:
    names = [each.summary.slo_class for each in report.classes]
    lines = [*(f"{line}  " for line in head(report)), "", _row(["", *names]), _row(["---", *("---:" for _ in names)])]
    return "\n".join([*lines, *map(_row, rows(report))])


def as_json(report: ServedReport) -> str:
    """Return one object: times in ISO 8601, UTC, and the columns of docs/metrics.md, in seconds."""
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
    """Return the lines above the table: the time, and the engines."""
    first, last = _local(report.first_unix_s), _local(report.last_unix_s)
    lines = [f"first arrival {first}, last end {last}, {report.wall_s:,.0f} s between them"]
    return lines + [
        f"{run.model}: policy {run.policy}, target {run.target}, draft {run.draft or 'none'}, on {run.device}, "
        f"version {run.package_version}"
        for run in dict.fromkeys(report.runs)
    ]


def nothing_found(path: Path, report: ServedReport, *, slo_class: str | None, key: str | None) -> str:
    """Return a sentence that says why a report is empty, and when there are records."""
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
