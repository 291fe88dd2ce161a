"""Figures as pictures for HTML: SVG as matplotlib writes it, once in light and once in dark colours.

Each picture is an <img> with the SVG in its address, so that it fetches nothing, runs nothing and shares no identifier
or style with the page. The classes `light` and `dark` say which of two pictures the style sheet shows. The same figure
gives the same bytes.
"""

from __future__ import annotations

import io
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from math import isfinite
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.characters import printable
from adaserve_jax.report.document import Figure, Panel, Series
from adaserve_jax.report.figure_data import written
from adaserve_jax.report.palette import Style, shades, styles_of
from adaserve_jax.report.plotting import Colours, plotted, swatch

WORDS = {"step": "Line", "stack": "Stacked bars", "area": "Stacked areas", "scatter": "Points"}


def need_matplotlib() -> None:
    """Raise ConfigError unless figures can be drawn here."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "figures are drawn with matplotlib, which is not installed; install it with "
            "`pip install adaserve-jax[plot]`, or write the report as Markdown, which has their numbers: -o report.md"
        )


def draw(figure: Figure) -> str:
    """Return the HTML of a figure: a picture per panel, and lists that are legends: one for all panels, or one for each
    where panels have no series in common.

    Raises ConfigError without matplotlib; ValueError for values that a logarithmic axis cannot show.
    """
    need_matplotlib()
    figure = _cleaned(figure)
    styles = styles_of(figure)
    names = [tuple(dict.fromkeys(series.name for series in panel.series)) for panel in figure.panels]
    everyone = tuple(dict.fromkeys(name for each in names for name in each))
    common = len(names) < 2 or len(everyone) < sum(map(len, names))
    with _settings():
        panels = [_panel(figure, panel, styles) for panel in figure.panels]
        if common:
            head = _legend(figure, everyone, styles)
        else:
            head = ""
            legends = [_legend(figure, each, styles) for each in names]
            panels = [f"<div>{panel}{legend}</div>" for legend, panel in zip(legends, panels, strict=True)]
    drawn = "\n".join(panels)
    return f'{head}<div class="plots">\n{drawn}\n</div>'


def _legend(figure: Figure, names: Sequence[str], styles: Mapping[str, Style]) -> str:
    """Return a list of names with what they look like; nothing for a name that stands alone."""
    if len(names) < 2:
        return ""
    entries = "".join(f"<li>{_swatch(figure, styles[name])}{escape(name)}</li>" for name in names)
    return f'<ul class="legend">{entries}</ul>\n'


def _panel(figure: Figure, panel: Panel, styles: Mapping[str, Style]) -> str:
    alt = f"{panel.title or figure.title}. {described(figure, panel)}"
    return _pictures(lambda colours: plotted(figure, panel, styles, colours), f'class="plot {{}}" alt="{escape(alt)}"')


def _swatch(figure: Figure, style: Style) -> str:
    return _pictures(lambda colours: swatch(figure, style, colours), 'class="swatch {}" alt="" width="30" height="12"')


def _pictures(drawn: Callable[[Colours], Any], attributes: str) -> str:
    """Return the light and the dark picture of a sheet. attributes: of both, with {} for the class of the shade."""
    return "".join(
        f'<img {attributes.replace("{}", name)} src="data:image/svg+xml;base64,{_encoded(drawn(shades(dark=dark)))}">'
        for name, dark in (("light", False), ("dark", True))
    )


def described(figure: Figure, panel: Panel) -> str:
    """Return the panel in words, as alternative text: its axes, and the range of every series."""
    parts = [f"{WORDS.get(figure.kind, figure.kind.capitalize())}: {panel.y_label} over {figure.x_label}."]
    for series in panel.series:
        known = [y for y in series.y if y is not None]
        span = f"{written(panel, min(known))} to {written(panel, max(known))}" if known else "no values"
        parts.append(f"{series.name or panel.y_label}: {span}.")
    return " ".join([*parts, "The numbers are in a table below the figure."])


@contextmanager
def _settings() -> Iterator[None]:
    """Use matplotlib's own defaults whatever the user's file says; text stays text; identifiers are always the same; no
    warning for letters of other scripts, which the reader's fonts have."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=".*font does not have.*")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "adaserve", "text.parse_math": False, "font.size": 12,
             "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "hatch.linewidth": 1.0}
        )  # fmt: skip
        yield


def _encoded(sheet: Any) -> str:
    """Return the sheet as SVG in base64, transparent and without a date."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    sheet.patch.set_visible(False)
    for axes in sheet.axes:
        axes.patch.set_visible(False)
    sheet.savefig(file, format="svg", metadata=nothing, dpi=72)
    return b64encode(file.getvalue().encode()).decode()


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
