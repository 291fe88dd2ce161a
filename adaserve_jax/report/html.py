"""Documents as single HTML files without scripts, fonts or links to other files. Their templates are in templates/.

The content security policy allows one style sheet, by its hash, and pictures within the file; so nothing runs and
nothing is fetched, whatever names the data have.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, replace
from hashlib import sha256
from html import escape
from itertools import chain, count

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import adaserve_jax
from adaserve_jax.report.document import Document, Figure, Section, Table, Text, printable, tables_of
from adaserve_jax.report.figures import draw
from adaserve_jax.report.palette import css_variables

POLICY = "default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
MOST_ROWS = 200
"""Most rows of the tables of numbers below figures."""
_WITH_INTERVAL = re.compile(r"([-+]?[\d.,]+%?(?: \w+)?) \(([^()]+ to [^()]+)\)")


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with its drawing and its tables of numbers."""

    figure: Figure
    svg: Markup
    tables: tuple[Table, ...]

    @property
    def key(self) -> str:
        return self.figure.key

    @property
    def title(self) -> str:
        return self.figure.title


@dataclass(frozen=True)
class RenderedSection:
    """A section with its figures drawn. items: kind (warning, text, table, figure) and content."""

    key: str
    title: str
    items: tuple[tuple[str, Text | Table | DrawnFigure], ...]
    folded: bool


def render_html(document: Document) -> str:
    """Return the file's content. The same document gives the same text. Raises ConfigError: there is a figure to draw,
    and matplotlib is not installed."""
    anchors = Anchors()
    parts = [_rendered(section, anchors) for section in document.sections]
    loader = PackageLoader("adaserve_jax.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"prose": prose, "cell": cell}
    css = environment.get_template("report.css.jinja").render(
        light=Markup(css_variables(dark=False)), dark=Markup(css_variables(dark=True))
    )
    digest = b64encode(sha256(css.encode()).digest()).decode()
    warned = [(part, sum(kind == "warning" for kind, _ in part.items)) for part in parts]
    text = environment.get_template("report.html.jinja").render(
        document=document,
        parts=parts,
        warned=[(part, count) for part, count in warned if count],
        css=Markup(css),
        policy=POLICY.format(digest=digest),
        version=adaserve_jax.__version__,
    )
    return printable(text)


def _rendered(section: Section, anchors: Anchors) -> RenderedSection:
    key = anchors.of(section.key)
    items: list[tuple[str, Text | Table | DrawnFigure]] = []
    for item in section.items:
        if isinstance(item, Text):
            items.append(("warning" if item.warns else "text", item))
        elif isinstance(item, Table):
            items.append(("table", replace(item, key=anchors.of(item.key))))
        else:
            figure = replace(item, key=anchors.of(item.key))
            tables = tables_of(figure, most_rows=MOST_ROWS)
            items.append(("figure", DrawnFigure(figure, Markup(draw(figure)), tables)))
    return RenderedSection(key, section.title, tuple(items), section.folded)


class Anchors:
    """Identifiers of letters, digits and hyphens, each handed out once."""

    def __init__(self) -> None:
        self._taken: set[str] = {"main", "contents", "conditions"}

    def of(self, key: str) -> str:
        """Return an identifier like the key."""
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", key).strip("-") or "part"
        names = chain([stem], (f"{stem}-{again}" for again in count(2)))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name


def prose(text: str) -> Markup:
    """Escape a text, and mark up `code` where backticks come in pairs."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return Markup(escape(text))
    return Markup("".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)))


def cell(text: str) -> Markup:
    """Escape a cell, and make an interval after a value small: +4.1 better (0.9 to 7.2)."""
    found = _WITH_INTERVAL.fullmatch(text)
    if found is None:
        return Markup(escape(text))
    value, interval = found.groups()
    return Markup(f"{escape(value)} <small>({escape(interval)})</small>")
