"""Figures as inline SVG: drawn by matplotlib, then cleaned. The same figure gives the same bytes.

Colours become CSS variables with the light colour where nobody defines them, letters stay text in the page's own font,
and nothing is left that reaches beyond its own element: no style sheet, no metadata, no identifier of another figure.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from math import isfinite
from typing import Any
from xml.etree import ElementTree

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.characters import printable
from adaserve_jax.report.document import Figure, Panel, Series
from adaserve_jax.report.figure_data import written
from adaserve_jax.report.palette import VARIABLES, Style, styles_of
from adaserve_jax.report.plotting import plotted, swatch

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
WORDS = {"step": "Line", "stack": "Stacked bars", "area": "Stacked areas", "scatter": "Points"}
_DROPPED = {"font-family", "stroke-dashoffset"}


def need_matplotlib() -> None:
    """Raise ConfigError unless figures can be drawn here."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "figures are drawn with matplotlib, which is not installed; install it with "
            "`pip install adaserve-jax[plot]`, or write the report as Markdown, which has their numbers: -o report.md"
        )


def draw(figure: Figure) -> str:
    """HTML of a figure: an SVG per panel, and lists that are legends: one for all panels, or one for each
    where panels have nobody in common.

    Raises ConfigError without matplotlib; ValueError for values that a logarithmic axis cannot show.
    """
    need_matplotlib()
    figure = _cleaned(figure)
    styles = styles_of(figure)
    names = [tuple(dict.fromkeys(series.name for series in panel.series)) for panel in figure.panels]
    everyone = tuple(dict.fromkeys(name for each in names for name in each))
    common = len(names) < 2 or len(everyone) < sum(map(len, names))
    with _settings():
        panels = [_panel(figure, panel, styles, index) for index, panel in enumerate(figure.panels)]
        if common:
            head = _legend(figure, everyone, styles, "all")
        else:
            head = ""
            legends = [_legend(figure, each, styles, str(index)) for index, each in enumerate(names)]
            panels = [f"<div>{panel}{legend}</div>" for legend, panel in zip(legends, panels, strict=True)]
    drawn = "\n".join(panels)
    return f'{head}<div class="plots">\n{drawn}\n</div>'


def _legend(figure: Figure, names: Sequence[str], styles: Mapping[str, Style], key: str) -> str:
    """A list of names with what they look like; nothing for a name that stands alone."""
    if len(names) < 2:
        return ""
    entries = "".join(
        f"<li>{_swatch(figure, styles[name], f'{key}-{index}')}{escape(name)}</li>" for index, name in enumerate(names)
    )
    return f'<ul class="legend">{entries}</ul>\n'


def _panel(figure: Figure, panel: Panel, styles: Mapping[str, Style], index: int) -> str:
    name = f"{figure.key}-{index}"
    root = _svg(plotted(figure, panel, styles), salt=name)
    title, description = ElementTree.Element("title"), ElementTree.Element("desc")
    title.text, description.text = panel.title or figure.title, described(figure, panel)
    title.set("id", f"{name}-title")
    description.set("id", f"{name}-desc")
    root[:0] = [title, description]
    root.attrib |= {"class": "plot", "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    return ElementTree.tostring(root, encoding="unicode")


def _swatch(figure: Figure, style: Style, key: str) -> str:
    root = _svg(swatch(figure, style), salt=f"{figure.key}-swatch-{key}")
    root.attrib |= {"class": "swatch", "aria-hidden": "true", "width": "30", "height": "12"}
    return ElementTree.tostring(root, encoding="unicode")


def described(figure: Figure, panel: Panel) -> str:
    """The panel in words, for those who do not see it: what it shows of whom, and from where to where."""
    parts = [f"{WORDS.get(figure.kind, figure.kind.capitalize())}: {panel.y_label} over {figure.x_label}."]
    for series in panel.series:
        known = [y for y in series.y if y is not None]
        span = f"{written(panel, min(known))} to {written(panel, max(known))}" if known else "no values"
        parts.append(f"{series.name or panel.y_label}: {span}.")
    return " ".join([*parts, "The numbers are in a table below the figure."])


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's own defaults whatever the user's file says; text as it is; no warning for letters of other scripts,
    which the reader's fonts have."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=".*font does not have.*")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "text.parse_math": False, "font.size": 12, "hatch.linewidth": 1.0}
        )
        yield


def _svg(sheet: Any, salt: str) -> ElementTree.Element:
    """The sheet as a clean `svg` element. salt: makes identifiers of parts unique in the page."""
    import matplotlib

    sheet.patch.set_visible(False)
    for axes in sheet.axes:
        axes.patch.set_visible(False)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        sheet.savefig(file, format="svg", metadata=nothing, dpi=72)
    root = ElementTree.fromstring(file.getvalue())
    box = root.attrib["viewBox"]
    _clean(root)
    root.attrib.clear()
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box}
    root.attrib |= {"font-family": FONT, "stroke-linejoin": "round"}
    return root


def _clean(element: ElementTree.Element) -> None:
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    if element.tag != "text":
        element.text = None
    kept: list[ElementTree.Element] = []
    for child in list(element):
        _clean(child)
        if child.tag == "g" and not child.attrib:
            kept += child
        elif child.tag not in ("style", "metadata") and (len(child) or child.tag not in ("g", "defs")):
            kept.append(child)
    element[:] = kept
    style = element.attrib.pop("style", "")
    pairs = [part.split(":", 1) for part in style.split(";") if ":" in part]
    attributes = {name.strip(): value.strip() for name, value in pairs}
    for name, value in element.attrib.items():
        attributes[name.rpartition("}")[2]] = value
    if element.tag == "g":
        attributes.pop("id", None)
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    element.attrib.clear()
    for name, value in attributes.items():
        if name not in _DROPPED:
            element.set(name, VARIABLES.get(value) or (_rounded(value) if name in _NUMBERS else value))


_NUMBERS = {"d", "x", "y", "width", "height", "transform", "points"}


def _rounded(numbers: str) -> str:
    """Shorter by what nobody sees: a hundredth of a pixel."""
    short = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return " ".join(short.split())


def _cleaned(figure: Figure) -> Figure:
    """Its texts on one line each, without characters that XML does not allow; a gap for what is no finite number."""

    def text(value: str) -> str:
        return printable(" ".join(value.split()))

    def series(one: Series) -> Series:
        xs = tuple(text(x) if isinstance(x, str) else x for x in one.x)
        y, low, high = (tuple(map(_finite, column)) for column in (one.y, one.low, one.high))
        return replace(one, name=text(one.name), x=xs, y=y, low=low, high=high, labels=tuple(map(text, one.labels)))

    panels = tuple(
        replace(p, title=text(p.title), y_label=text(p.y_label), series=tuple(map(series, p.series)))
        for p in figure.panels
    )
    marks = tuple((x, text(label)) for x, label in figure.marks)
    return replace(figure, title=text(figure.title), x_label=text(figure.x_label), panels=panels, marks=marks)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
