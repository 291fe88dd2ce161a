"""`adaserve report`: what a run measured, as a page to send to others, and what a server did in a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text as Styled

from adaserve_jax.cli.report_text import as_json, as_markdown, nothing_found, print_table
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Document, Table, Text
from adaserve_jax.results.aggregate import report_of

# Reports of result folders: a file in HTML or Markdown, exports, or a summary in the terminal.

SUFFIXES = (".html", ".md")
MOST_COLUMNS = 1000


@dataclass(frozen=True)
class FolderReport:
    """What is asked of `adaserve report DIR`."""

    folders: tuple[Path, ...]
    out: Path | None
    against: Path | None
    title: str | None
    timeline: str | None
    rate: float | None
    perfetto: Path | None


def write_report(asked: FolderReport) -> None:
    """Write all that is asked for; without a file to write, print the headline. Raises ConfigError: what is wrong."""
    render = None if asked.out is None else renderer(asked.out)
    from adaserve_jax.report.build import build, load_folders
    from adaserve_jax.report.points import measured

    loaded, other = load_folders(asked.folders, asked.against)
    found = measured(loaded, beside=() if other is None else (other,))
    against = None if other is None else measured((other,), beside=loaded)
    document = build(found, against=against, title=asked.title, timeline=asked.timeline, rate=asked.rate)
    if asked.out is not None and render is not None:
        _write(asked.out, render(document))
        _note(f"report in {asked.out}")
    else:
        print_summary(document)
    if asked.perfetto is not None:
        from adaserve_jax.report.perfetto import traced_point, write_trace
        from adaserve_jax.report.view import invalid_point

        point = traced_point(found, asked.timeline, asked.rate)
        write_trace(point, asked.perfetto)
        _note(f"{point.name} as trace events in {asked.perfetto}; open it at https://ui.perfetto.dev")
        if not point.row.valid:
            _note(f"warning: {invalid_point(point)}")
    if asked.out is None:
        _note(f"the whole report: adaserve report {' '.join(map(str, asked.folders))} -o report.html")


def renderer(out: Path) -> Callable[[Document], str]:
    """What writes a file of this name. Raises ConfigError: another ending, no matplotlib."""
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
    """Title, every warning, and texts and tables of the headline, to stdout; a pipe or file gets whole tables."""
    console = Console(highlight=False)
    headline = document.headline
    shown = headline.items if headline else ()
    tables = [item for item in shown if isinstance(item, Table)]
    if not console.is_terminal:
        wide = console.options.update(max_width=MOST_COLUMNS)
        needed = max((console.measure(_grid(table, folded=False), options=wide).maximum for table in tables), default=0)
        console = Console(width=max(console.width, needed), highlight=False)
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
            console.print(_grid(item, folded=console.is_terminal))
            if item.caption:
                console.print(item.caption, style="dim", markup=False, soft_wrap=True)


def _grid(table: Table, *, folded: bool) -> Grid:
    """folded: an interval stands below its value."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, column in enumerate(table.columns):
        numeric = index in table.numeric
        grid.add_column(Styled(column), justify="right" if numeric else "left", no_wrap=index == 0)
    for i, row in enumerate(table.rows):
        cells = (cell.replace(" (", "\n(") if folded and j in table.numeric else cell for j, cell in enumerate(row))
        grid.add_row(*(Styled(cell, style="bold" if (i, j) in table.strong else "") for j, cell in enumerate(cells)))
    return grid


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another -o") from error


def _note(text: str) -> None:
    notes().print(text, style="dim", highlight=False, soft_wrap=True, markup=False)


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
SINCE, UNTIL = "1h", "now"


class Format(StrEnum):
    table = "table"
    markdown = "markdown"
    json = "json"


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="folders that `adaserve bench` or `adaserve simulate` wrote; several make one report"),
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
    perfetto: Annotated[
        Path | None, typer.Option(help="file for that point's requests as trace events, which ui.perfetto.dev shows")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--from", help="instead of folders: file that `adaserve serve --records` writes, or has written"),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            help="with --from: choices that ended since then: 30m, 1h, 7d before now, or such as 2026-01-31T08:00"
        ),
    ] = SINCE,
    until: Annotated[str, typer.Option(help="and before then, written likewise; now: all there are")] = UNTIL,
    slo_class: Annotated[str | None, typer.Option("--class", help="with --from: this SLO class only")] = None,
    key: Annotated[
        str | None, typer.Option(help="with --from: requests that came with the API key of this name only")
    ] = None,
    format: Annotated[Format, typer.Option(help="with --from: how to write the report")] = Format.table,
) -> None:
    """Show what a run measured, as one file to read and to send; or, with --from, what a server did.

    Definitions: docs/metrics.md; how to read a report: docs/reports.md. A time without a zone is the local one.
    """
    of_folders = {"-o": out, "--against": against, "--title": title, "--timeline": timeline, "--rate": rate}
    of_folders |= {"--perfetto": perfetto}
    of_records = {"--since": since != SINCE, "--until": until != UNTIL, "--class": slo_class, "--key": key}
    of_records |= {"--format": format is not Format.table}
    if records is not None and not folders:
        _refuse(of_folders, "a folder that `adaserve bench` or `adaserve simulate` wrote, not to --from")
        _report_records(records, since, until, slo_class, key, format)
    elif folders and records is None:
        _refuse(of_records, "--from with a server's records, not to folders")
        write_report(FolderReport(tuple(folders), out, against, title, timeline, rate, perfetto))
    else:
        raise ConfigError(
            "expected folders that `adaserve bench` or `adaserve simulate` wrote, or --from with the file of "
            f"`adaserve serve --records`, got {'both' if folders else 'neither'}; give one of them"
        )


def _refuse(options: dict[str, object], belongs: str) -> None:
    """Raise ConfigError for the first option that is given and means nothing here."""
    for name, value in options.items():
        if value not in (None, False):
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
    """Unix time of "1h" (before now) or of an ISO 8601 date or time. Raises ConfigError naming the option."""
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
