"""Reports of result folders: a file in HTML or Markdown, exports, or a summary in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text as Styled

from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.report.document import Document, Table, Text

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
        from adaserve_jax.report.conditions import invalid_point
        from adaserve_jax.report.perfetto import traced_point, write_trace

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
        from adaserve_jax.report.html import render_html
        from adaserve_jax.report.svg import need_matplotlib

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
