"""Reads tables of the documents, so that tests can say that nothing is missing in them, and nothing left over."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.conftest import ROOT


@dataclass(frozen=True)
class Row:
    """One row of a table. names: what its first cell has between backticks."""

    names: tuple[str, ...]
    cells: tuple[str, ...]


def section(document: str, heading: str) -> str:
    """The text of a document under a heading, up to the next one of its level or above."""
    text = (ROOT / "docs" / document).read_text()
    level = len(heading) - len(heading.lstrip("#"))
    begin = re.search(rf"^{re.escape(heading)}$", text, re.MULTILINE)
    assert begin is not None, f"docs/{document} has no heading {heading!r}"
    end = re.search(rf"^#{{1,{level}}} ", text[begin.end() :], re.MULTILINE)
    return text[begin.end() :] if end is None else text[begin.end() : begin.end() + end.start()]


def rows(text: str) -> list[Row]:
    """Rows of the tables in a text that name something."""
    found: list[Row] = []
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            found.append(Row(tuple(re.findall(r"`([^`]+)`", cells[0])), cells))
    return found


def names(text: str) -> list[str]:
    """All that the tables in a text name, in order."""
    return [name for row in rows(text) for name in row.names]
