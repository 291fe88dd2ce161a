"""One command per figure and table of the papers, at the size of a CPU, of the real engine on one, or of a GPU.

    python -m benchmarks.papers.reproduce list [NAME ...]
    python -m benchmarks.papers.reproduce run adaserve-8 --out reproduced [--size cpu|engine|gpu] [--data FOLDER]
    python -m benchmarks.papers.reproduce status --runs reproduced --out benchmarks/results/reproduce.json

A name is a figure's, or a paper's for all of its figures. A figure is one or several commands, each with a folder below
--out that figures share; one that has ended is not run again, one that was interrupted goes on where its command can.
Then the paper's statements are judged by what was found: NAME-SIZE.json holds the numbers, .html and .md show them.

Exit codes: 0 all was run; 1 an error; 3 something named is not there yet; 130 interrupted, what is done is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from adaserve_jax.cli.terminal import notes, table_console
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import make_folder
from benchmarks import program
from benchmarks.papers import pages, registry
from benchmarks.papers.entry import SIZES, Entry, Form, NotYet
from benchmarks.papers.running import INTERRUPTED, command, data_of, folder_of, run_form
from benchmarks.papers.status import read_status, row_of, rows_in, rows_of, status_of, write_row

NOT_THERE_YET = 3
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


def note(text: str) -> None:
    notes().print(text, highlight=False, soft_wrap=True, markup=False)


def not_yet(entry: Entry, size: str, form: NotYet) -> str:
    return f"{entry.name} ({entry.title}), size {size}: not there yet: needs {form.needs}"


@app.command("list")
def list_entries(
    names: Annotated[list[str] | None, typer.Argument(help="figures or papers; none: all")] = None,
    commands: Annotated[bool, typer.Option(help="also print the commands of each")] = False,
) -> None:
    """What there is: names, what each shows, and minutes by size."""
    table = Table("name", "the paper shows", *(f"{size}, min" for size in SIZES), title_justify="left")
    for entry in registry.find(names) if names else registry.ENTRIES.values():
        forms = [entry.forms.get(size) for size in SIZES]
        minutes = [
            f"{form.minutes:g}" if isinstance(form, Form) else "not yet" if form else "-" for form in forms
        ]  # fmt: skip
        table.add_row(entry.name, entry.shows, *minutes)
        if commands:
            for size in SIZES:
                _show(entry, size, entry.forms.get(size))
    table_console(table).print(table)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="figures, or papers for all of theirs")],
    out: Annotated[Path | None, typer.Option(help="folder for results; the same again goes on")] = None,
    size: Annotated[str, typer.Option(help=f"one of {', '.join(SIZES)}")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(help="folder of AdaServe's and Azure's traces and GSM8K; none: made workloads")
    ] = None,
    show: Annotated[bool, typer.Option(help="print the commands and run nothing")] = False,
) -> None:
    """Measure figures and judge the papers' statements by what is found."""
    forms = [(entry, registry.form_of(entry, size)) for entry in registry.find(names)]
    missing = [not_yet(entry, size, form) for entry, form in forms if isinstance(form, NotYet)]
    if show:
        for entry, form in forms:
            _show(entry, size, form)
    elif out is None:
        raise ConfigError("--out: give a folder for the results, or --show to see the commands")
    else:
        make_folder(out)
        try:
            for entry, form in forms:
                if isinstance(form, Form):
                    _run(entry, form, size, out.resolve(), None if data is None else data.resolve())
        except KeyboardInterrupt:
            note("interrupted: what is done is kept; run the same command again to go on")
            raise typer.Exit(INTERRUPTED) from None
    if missing:
        note("\n".join(missing))
        raise typer.Exit(NOT_THERE_YET)


@app.command()
def status(
    runs: Annotated[Path | None, typer.Option(help="folder that figures were run into")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; runs that it holds and --runs lacks are kept")
    ] = None,
) -> None:
    """Where every figure stands."""
    if runs is not None and not runs.is_dir():
        raise ConfigError(f"--runs: there is no folder {runs}; give the --out of `run`")
    kept = [] if out is None else rows_of(read_status(out), str(out))
    known = [row for row in kept if row.name in registry.ENTRIES]
    entries = list(registry.ENTRIES.values())
    found = status_of(entries, [*known, *(rows_in(runs, entries) if runs else [])])
    if out is not None:
        out.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    table = Table("name", "size", "state", "statements that hold", title_justify="left")
    for entry in found["entries"]:
        for size, form in entry["forms"].items():
            claims = form.get("claims", [])
            held = f"{sum(claim['holds'] is True for claim in claims)} of {len(claims)}" if claims else "-"
            table.add_row(entry["name"], size, form["state"], held)
    table_console(table).print(table)


def _run(entry: Entry, form: Form, size: str, out: Path, data: Path | None) -> None:
    note(f"{entry.name}: {entry.title}, size {size}, about {form.minutes:g} min")
    seconds = run_form(form, out, data, note=note)
    found = form.read({step.name: folder_of(step, out) for step in form.steps})
    row = row_of(entry.name, size, found, seconds, data_of(form, data))
    path = write_row(row, out)
    document = pages.document_of(entry, form, row, found)
    written = [path, *pages.write_pages(document, path.with_suffix(""), note)]
    _print_claims(document.title, form, row.values)
    note("in " + ", ".join(str(each) for each in written))


def _print_claims(title: str, form: Form, values: Mapping[str, float | None]) -> None:
    found = pages.claims_table(pages.judged(form.claims, values))
    table = Table(*found.columns, title=title, title_justify="left")
    for row in found.rows:
        table.add_row(*row)
    table_console(table).print(table)


def _show(entry: Entry, size: str, form: Form | NotYet | None) -> None:
    if isinstance(form, Form):
        typer.echo(f"# {entry.name}, {size}: about {form.minutes:g} min; {form.workload}; writes {form.writes}")
        for step in form.steps:
            typer.echo(command(step))
    elif form is not None:
        typer.echo(f"# {not_yet(entry, size, form)}")


if __name__ == "__main__":
    program.run(app)
