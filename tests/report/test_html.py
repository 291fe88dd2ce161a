"""The HTML file: one file, nothing but text from the data, links that lead somewhere, figures with their numbers."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report import figures as svg
from adaserve_jax.report.document import Document, Section, Table, Text
from adaserve_jax.report.html import Anchors, cell, prose, render_html
from tests.report import made_document as made

pytest.importorskip("matplotlib")
VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Tags with their attributes; checks that every tag is closed where it was opened."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return render_html(made.document())


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_names_from_the_data_stay_names(text, page):
    assert not page.all("script") and "alert(" in "".join(page.text)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert made.HOSTILE in "".join(page.text)
    assert text.count("<script") == 0


def test_it_refers_to_nothing_outside(text, page):
    for tag, attributes in page.tags:
        for name in ("href", "src", "xlink:href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/svg+xml")), (tag, name, value)
    assert not re.findall(r"@import|url\((?!#)", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not a place


def test_the_policy_allows_this_style_sheet_and_nothing_else(text, page):
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    (css,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = b64encode(sha256(css.encode()).digest()).decode()
    assert (
        policy == f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not [attributes for _, attributes in page.tags if "style" in attributes]


def test_identifiers_are_unique_and_links_lead_somewhere(page):
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = {value[1:] for _, a in page.tags for n in ("href",) if (value := a.get(n) or "").startswith("#")}
    assert links <= set(identifiers)
    named = {part for _, a in page.tags for part in (a.get("aria-labelledby") or "").split()}
    assert named <= set(identifiers)
    assert {"headline", "curves", "headline-table", "headline-table-2", "conditions"} <= links


def test_the_headline_comes_first_and_warnings_are_named_at_the_top(text):
    order = [
        text.index(part)
        for part in ('class="warned"', 'id="headline"', 'id="notices"', 'id="curves"', 'id="conditions"')
    ]
    assert order == sorted(order)
    assert re.search(r"1 warning in <a href=\"#notices\">Notices</a>\.", text)
    assert text.count('class="warning"') == 1
    assert "Read first" not in render_html(Document("t", (), (Section("a", "A", (Text("fine"),)),)))


def test_tables_mark_numbers_and_winners(text):
    assert "<strong>88.9% <small>(80.1 to 99.0)</small></strong>" in text
    assert '<td class="num">41.0</td>' in text and '<th scope="row">adaserve</th>' in text


def test_figures_have_their_numbers_below_them(page, text):
    figures = sum(isinstance(item, made.Figure) for s in made.document().sections for item in s.items)
    assert len(page.all("figure")) == len(page.all("details")) == figures == 8
    assert f"{made.attainment(3, 8.0):.1%}".replace("%", "") in text


def test_the_same_document_gives_the_same_text():
    head, *_ = made.document().sections
    small = Document("t", (), (head, Section("s", "S", (made.bars(),))))
    assert render_html(small) == render_html(small)


def test_a_document_without_figures_needs_no_matplotlib(monkeypatch):
    monkeypatch.setattr(svg, "find_spec", lambda name: None)
    table = Table("t", "T", "", ("a",), ((made.HOSTILE,),))
    Page(render_html(Document("t", (), (Section("a", "A", (table,)),))))
    Page(render_html(Document("nothing", (("a", "b"),), ())))
    with pytest.raises(ConfigError, match="install it with"):
        render_html(made.document())


def test_anchors_are_safe_and_unique():
    anchors = Anchors()
    assert [anchors.of(k) for k in ("a b/c", "a-b-c", 'x" onclick="', "", "<>", "main")] == [
        "a-b-c", "a-b-c-2", "x-onclick", "part", "part-2", "main-2",
    ]  # fmt: skip


def test_backticks_in_pairs_are_code():
    assert prose("use `a<b` now") == "use <code>a&lt;b</code> now"
    assert prose("one ` only <") == "one ` only &lt;"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("94.1% (90.0 to 97.2)", "94.1% <small>(90.0 to 97.2)</small>"),
        ("+4.1 better (-1,0.9 to 7.2)", "+4.1 better <small>(-1,0.9 to 7.2)</small>"),
        ("spec:4 (see <b> to)", "spec:4 (see &lt;b&gt; to)"),
        ("1 (2 to 3) (4 to 5)", "1 (2 to 3) (4 to 5)"),
        ("-", "-"),
    ],
)
def test_intervals_stand_below_their_values(text, written):
    assert cell(text) == written
