"""Figures of benchmarks/nightjar/tables.py: fixed lengths by load, and every method beside plain decoding.

Colours are Okabe and Ito's, told apart by colour-blind readers too, and every line has a marker of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.nightjar.points import CLASSES, MAIN, METHODS, POISSON
from benchmarks.nightjar.views import BUSY, LATENCY, OURS, PLAIN, THROUGHPUT, Tables

STYLES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": "black", "marker": "x", "linewidth": 1.6, "label": "no speculation"},
    OURS: {"color": "#D55E00", "marker": "s", "linewidth": 2.0, "label": "nightjar"},
    MAIN: {"color": "#0072B2", "marker": "o", "linewidth": 2.0, "label": "adaserve"},
}
CHAIN_SHADES = ("0.80", "0.45")
"""From the shortest chain to the longest."""
LOADS = {"low": ("#56B4E9", "^"), "high": ("#E69F00", "v"), "dynamic": ("#009E73", "D")}
NARROW, TICKS = 2.0, (1, 1.5, 2, 3, 5, 7)
"""Largest over smallest value below which an axis stays linear; labelled multiples of powers of ten of the others."""
PANELS = ((BUSY, "throughput while busy"), (LATENCY, "latency"))


def draw(tables: Tables, out: Path) -> list[Path]:
    """Write nightjar-lengths and nightjar-methods as .png and .svg; returns the paths."""
    return [*_save(_lengths(tables), out / "nightjar-lengths"), *_save(_methods(tables), out / "nightjar-methods")]


def _lengths(tables: Tables) -> Figure:
    setups = [setup for setup in tables.setups if tables.against_fixed(setup, POISSON)]
    size = (1 + 4.6 * max(len(setups), 1), 7)
    figure, axes = plt.subplots(2, max(len(setups), 1), figsize=size, squeeze=False, facecolor="white")
    for column, setup in enumerate(setups):
        views = {share: tables.view(setup, POISSON, share) for share in tables.shares(setup, POISSON)}
        chains = [policy for policy in next(iter(views.values())).fixed if policy != PLAIN]
        for row, name in enumerate((THROUGHPUT, LATENCY)):
            panel = axes[row][column]
            for index, policy in enumerate(chains):
                light, dark = map(float, CHAIN_SHADES)
                shade = light + (dark - light) * index / max(len(chains) - 1, 1)
                style: dict[str, Any] = {"color": str(shade), "linewidth": 0.9, "marker": f"${policy[5:]}$"}
                label = "fixed lengths, by their number" if index == 0 else None
                _plot(panel, views, policy, name, {**style, "label": label})
            for policy, style in STYLES.items():
                _plot(panel, views, policy, name, style)
            _tidy(panel)
        axes[0][column].set_title(setup, fontsize=10)
        _scale(axes[1][column], "y")
        axes[1][column].set_xlabel("load, share of the capacity without speculation")
    axes[0][0].set_ylabel("throughput, tokens/s")
    axes[1][0].set_ylabel("mean end-to-end latency, s")
    _legend(figure, axes[0][0], 4 if len(setups) > 1 else 2)
    figure.tight_layout(rect=(0, 0.05 if len(setups) > 1 else 0.08, 1, 1))
    return figure


def _plot(panel: Axes, views: dict[float, Any], policy: str, name: str, style: dict[str, Any]) -> None:
    known = [(share, view.mean(policy, name)) for share, view in views.items() if policy in view]
    if known:
        panel.plot(*zip(*known, strict=True), markersize=5, **style)


def _methods(tables: Tables) -> Figure:
    setups = [setup for setup in tables.setups if any(PLAIN in tables.view(setup, *at) for at in CLASSES.values())]
    columns = max(len(setups), 1)
    size = (1.6 + 3.6 * columns, 8)
    figure, axes = plt.subplots(2, columns, figsize=size, squeeze=False, sharey=True, facecolor="white")
    names = [policy for policy in METHODS if policy != PLAIN][::-1]
    for column, setup in enumerate(setups):
        for row, (name, _) in enumerate(PANELS):
            panel = axes[row][column]
            for load, (color, marker) in LOADS.items():
                view = tables.view(setup, *CLASSES[load])
                if PLAIN not in view:
                    continue
                at = [(view.times(policy, name), policy) for policy in names if policy in view]
                style: dict[str, Any] = {"color": color, "marker": marker, "label": f"{load} load"}
                panel.plot(*zip(*at, strict=True), linestyle="none", **style)
            panel.axvline(1.0, color="black", linewidth=1.0)
            _scale(panel, "x")
            _tidy(panel)
        axes[0][column].set_title(setup, fontsize=10)
    for row, (_, title) in enumerate(PANELS):
        for panel in axes[row]:
            panel.set_xlabel(f"{title}, times no speculation")
    widest = max((panel for panel in axes.flat), key=lambda panel: len(panel.get_lines()))
    _legend(figure, widest, len(LOADS))
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def _scale(panel: Axes, axis: str) -> None:
    """Logarithmic with plain numbers, where values differ by more than a little."""
    low, high = panel.dataLim.intervalx if axis == "x" else panel.dataLim.intervaly
    if high / low < NARROW:
        return
    getattr(panel, f"set_{axis}scale")("log")
    ticks = panel.xaxis if axis == "x" else panel.yaxis
    ticks.set_major_locator(LogLocator(subs=TICKS))
    ticks.set_major_formatter("{x:g}")
    ticks.set_minor_locator(NullLocator())


def _legend(figure: Figure, panel: Axes, columns: int) -> None:
    handles = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(handles, [str(h.get_label()) for h in handles], loc="lower center", ncols=columns, frameon=False)


def _tidy(panel: Axes) -> None:
    panel.grid(color="#E6E6E6", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> list[Path]:
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for each in written:
        figure.savefig(each, dpi=130)
    plt.close(figure)
    return written
