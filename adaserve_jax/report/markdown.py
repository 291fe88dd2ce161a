"""Documents as GitHub's Markdown: figures become tables of their numbers, and names from the data are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from adaserve_jax.report.document import Document, Figure, Section, Table, Text, printable, tables_of

MOST_ROWS = 24
_MARKUP = re.compile(r"([\\`*\[\]<>|~])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])|&(?=#?\w+;)")
_LINE_START = re.compile(r"^([#+-]+|\d+[.)])(?=\s|$)")


def render_markdown(document: Document) -> str:
    """Return the file's content, ending in a line break."""
    text = "\n".join([f"# {_inline(document.title)}", "", *_body(document)])
    return printable(text.rstrip() + "\n")


def _body(document: Document) -> Iterator[str]:
    for section in document.sections:
        yield from _section(section)
    if document.facts:
        yield from ("## Conditions", "")
        yield from _rows(Table("conditions", "Conditions", "", ("", ""), document.facts))
        yield ""


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {_inline(section.title)}", "")
    for item in section.items:
        if isinstance(item, Text):
            yield from ((f"> **Warning:** {_prose(item.text)}" if item.warns else _paragraph(item.text)), "")
        elif isinstance(item, Table):
            yield from _table(item)
        else:
            yield from _figure(item)


def _table(table: Table) -> Iterator[str]:
    yield from (f"### {_inline(table.title)}", "")
    yield from _rows(table)
    yield ""
    if table.caption:
        yield from (_paragraph(table.caption), "")


def _figure(figure: Figure) -> Iterator[str]:
    tables = tables_of(figure, most_rows=MOST_ROWS)
    yield from (f"### {_inline(figure.title)}", "")
    if figure.caption:
        yield from (_paragraph(figure.caption), "")
    if not tables:
        yield from ("No values.", "")
    for table in tables:
        if len(figure.panels) > 1:
            yield from (f"#### {_inline(table.title)}", "")
        yield from (_paragraph(table.caption), "")
        yield from _rows(table)
        yield ""


def _rows(table: Table) -> Iterator[str]:
    yield _row([_inline(column) for column in table.columns])
    yield _row(["---:" if index in table.numeric else "---" for index in range(len(table.columns))])
    for i, row in enumerate(table.rows):
        strong = [(i, j) in table.strong and bool(c.strip()) for j, c in enumerate(row)]
        yield _row([f"**{_prose(c)}**" if each else _prose(c) for c, each in zip(row, strong, strict=True)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _paragraph(text: str) -> str:
    """Escape prose so that it begins no list and no heading."""
    return _LINE_START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", _prose(text))


def _prose(text: str) -> str:
    """Escape text except `code`, where backticks come in pairs."""
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:
        return _inline(text)
    return "".join(
        f"`{part.replace('|', chr(92) + '|')}`" if i % 2 else _inline(part, keep=True) for i, part in enumerate(parts)
    )


def _inline(text: str, *, keep: bool = False) -> str:
    """Put text on one line and escape markup. keep: keep white space at its ends."""
    flat = re.sub(r"\s+", " ", text) if keep else " ".join(text.split())
    return _MARKUP.sub(lambda found: f"\\{found[0]}" if found[0] != "&" else "&amp;", flat)
