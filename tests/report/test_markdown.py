"""The Markdown file: tables that stay tables, names that stay names, figures as numbers."""

from __future__ import annotations

import re

import pytest

from adaserve_jax.report.document import Document, Section, Table, Text
from adaserve_jax.report.markdown import render_markdown
from tests.report import made_document as made


def rendered(*items) -> str:
    return render_markdown(Document("Title", (("machine", "m|n"),), (Section("s", "Section", items),)))


def test_a_small_document_is_written_so():
    table = Table(
        "t",
        "Table",
        "A caption.",
        ("policy", "met"),
        (("ar", "10%"), ("adaserve", "90%")),
        frozenset({1}),
        frozenset({(1, 1)}),
    )
    assert (
        rendered(Text("Use `adaserve bench`."), Text("1 point is invalid", warns=True), table)
        == """# Title

## Section

Use `adaserve bench`.

> **Warning:** 1 point is invalid

### Table

| policy | met |
| --- | ---: |
| ar | 10% |
| adaserve | **90%** |

A caption.

## Conditions

|  |  |
| --- | --- |
| machine | m\\|n |
"""
    )


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("<script>alert(1)</script>", "\\<script\\>alert(1)\\</script\\>"),
        ("a|b", "a\\|b"),
        ("spec_tree_4 _x_ *y* [z](u)", "spec_tree_4 \\_x\\_ \\*y\\* \\[z\\](u)"),
        ("# not a heading", "\\# not a heading"),
        ("1. not a list", "1\\. not a list"),
        ("1.5 requests", "1.5 requests"),
        ("- not a list", "\\- not a list"),
        ("&lt; &amp &", "&amp;lt; &amp &"),
        ("two\nlines", "two lines"),
        ("one ` tick", "one \\` tick"),
        ("`a|b` <c>", "`a\\|b` \\<c\\>"),
    ],
)
def test_what_would_be_markup_is_escaped(text, written):
    assert rendered(Text(text)).split("\n")[4] == written


def test_every_table_row_has_as_many_cells_as_its_head():
    text = render_markdown(made.document())
    assert "<script" not in text.replace("\\<script", "")
    block: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.findall(r"(?<!\\)\|", line)))
        elif block:
            assert len(set(block)) == 1
            assert len(block) <= 2 + 24
            block = []


def test_figures_are_tables_of_their_numbers():
    text = render_markdown(made.document())
    assert "### Attainment against rate" in text and made.CAPTION in text
    assert f"| 8 | {made.attainment(0, 8.0):.1%} (" in text
    assert "24 of 6000 points, at even distances" in text
    assert text == render_markdown(made.document())
