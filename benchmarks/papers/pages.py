"""A figure's page: what the paper shows, what was run, its statements beside what was found, and the figures."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from adaserve_jax.errors import AdaServeError
from adaserve_jax.report.document import Document, Section, Table, Text
from benchmarks.papers.entry import Entry, Form, Found
from benchmarks.papers.running import command
from benchmarks.papers.status import RunRow, judged

RENDERERS = {
    ".html": ("adaserve_jax.report.html", "render_html"),
    ".md": ("adaserve_jax.report.markdown", "render_markdown"),
}
COLUMNS = ("statement", "true when", "the paper", "here", "true here", "here / the paper")


def document_of(entry: Entry, form: Form, row: RunRow, found: Found) -> Document:
    """The page as tables and figures, apart from how it is written."""
    facts = (*row.about.items(), ("data", row.data or form.workload), ("measured", row.measured_at),
             ("seconds", f"{row.seconds:g}"))  # fmt: skip
    intro = (
        Text(f"The paper: {entry.shows}"),
        Text(f"Here: {entry.here} {form.differs}"),
        *(Text(f"Measured with `{command(step)}`.") for step in form.steps),
        claims_table(judged(form.claims, row.values)),
    )
    sections = (Section("statements", "Statements", intro), Section("found", "What was found", found.shown))
    return Document(f"{entry.title} ({row.size})", facts, sections if found.shown else sections[:1])


def claims_table(claims: list[dict[str, Any]]) -> Table:
    rows = tuple(claim_cells(claim) for claim in claims)
    caption = "The paper's numbers come from its own machines and models. You can compare directions and ratios."
    return Table("claims", "Statements", caption, COLUMNS, rows, frozenset({2, 3, 5}))


def claim_cells(claim: dict[str, Any]) -> tuple[str, ...]:
    """Of COLUMNS. claim: of `status.judged`."""
    line, paper, ours = (number(claim[name], claim["unit"]) for name in ("line", "paper", "ours"))
    return claim["text"], f"{claim['side']} {line}", paper, ours, word(claim["holds"]), number(claim["ratio"], "")


def number(value: float | None, unit: str) -> str:
    """With four digits and its unit; shares in percent."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{100 * value:.4g} %"
    return f"{value:.4g}" + (f" {unit}" if unit not in ("", "times") else "")


def word(holds: bool | None) -> str:
    return "not known" if holds is None else "yes" if holds else "no"


def write_pages(document: Document, stem: Path, note: Callable[[str], None]) -> list[Path]:
    """As HTML and Markdown, by the report package; what of it cannot be had is said, and left out."""
    written = []
    for suffix, (module, name) in RENDERERS.items():
        try:
            text = getattr(import_module(module), name)(document)
        except (ModuleNotFoundError, AdaServeError) as error:
            note(f"no {suffix.removeprefix('.')} page: {error}")
            continue
        written.append(stem.with_name(f"{stem.name}{suffix}"))
        written[-1].write_text(text)
    return written
