"""Colours of a report, light and dark, and the markers, dashes and hatches that tell series apart without colour.

The first four series colours are those of the dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from adaserve_jax.report.document import Figure

COLOURS = {
    "page": ("#f3f5f8", "#0c1117"),
    "panel": ("#ffffff", "#151c25"),
    "ink": ("#16202c", "#e9eef4"),
    "muted": ("#566273", "#9aa7b6"),
    "line": ("#e0e5ec", "#26303c"),
    "edge": ("#d5dce5", "#303b48"),
    "focus": ("#0b57d0", "#a8c7fa"),
    "warn-page": ("#fff1e0", "#3a2410"),
    "warn-ink": ("#7a3400", "#ffd9b0"),
    "warn-edge": ("#c65102", "#f0a04b"),
    "s0": ("#0072b2", "#56b4e9"),
    "s1": ("#c65102", "#f0a04b"),
    "s2": ("#00805d", "#33c79a"),
    "s3": ("#a3437f", "#e08fc0"),
    "s4": ("#5c0f26", "#d8405a"),
    "s5": ("#2f2be6", "#6158ff"),
    "s6": ("#574700", "#f4ec3c"),
    "s7": ("#808cb0", "#f2f5f8"),
}
"""Light and dark shade by name."""
SERIES_COLOURS = tuple(name for name in COLOURS if name[0] == "s" and name[1:].isdecimal())
MARKERS = "osD^vPX*"
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2.5), (1.5, 2), (8, 2.5, 1.5, 2.5), (3.5, 1.5, 1.5, 1.5, 1.5, 1.5))
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "/", "++")


@dataclass(frozen=True)
class Style:
    """Appearance of a series. colour: a name of COLOURS. dash: lengths in points, empty for a whole line. hollow:
    markers are not filled."""

    colour: str
    marker: str
    dash: tuple[float, ...]
    hatch: str
    hollow: bool


def styles_of(figure: Figure) -> dict[str, Style]:
    """Return a style by name of series, the same in all panels.

    Series that share a colour and a panel differ in dashes and fillings.
    """
    variants: dict[str, tuple[int, int]] = {}
    beside: dict[str, set[str]] = {}
    for panel in figure.panels:
        names = {series.name for series in panel.series}
        for series in panel.series:
            beside.setdefault(series.name, set()).update(names)
    for panel in figure.panels:
        for series in panel.series:
            if series.name not in variants:
                taken = {variants[name] for name in beside[series.name] & variants.keys()}
                variants[series.name] = next((series.colour, n) for n in count() if (series.colour, n) not in taken)
    return {name: _style(colour, variant) for name, (colour, variant) in variants.items()}


def _style(colour: int, variant: int) -> Style:
    """Return the style of a colour. variant: number of series beside it that have the colour already."""
    lap, kind = divmod(colour, len(SERIES_COLOURS))
    turn = kind + lap + 2 * variant
    hatch = HATCHES[turn % len(HATCHES)]
    return Style(SERIES_COLOURS[kind], MARKERS[kind], DASHES[turn % len(DASHES)], hatch, variant % 2 == 1)


def shades(*, dark: bool) -> dict[str, str]:
    """Return the light or the dark shade of every colour, as #rrggbb by name."""
    return {name: both[dark] for name, both in COLOURS.items()}


def css_variables(*, dark: bool) -> str:
    """Return definitions of every colour, for a CSS rule."""
    return " ".join(f"--{name}: {shade};" for name, shade in shades(dark=dark).items())
