"""Figures of the sweeps: attainment above goodput, a column per sweep, a file per machine and kind of targets.

Colours are Okabe and Ito's, told apart by colour-blind readers too, and every line has a marker of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from adaserve_jax.bench.simulate import TUNED
from benchmarks.adaserve.sweeps_points import BASELINE_GROUP, OURS, PAPER, SWEEPS
from benchmarks.adaserve.sweeps_tables import KINDS, Line, best_baseline, grouped

STYLES = {
    OURS: {"color": "#0072B2", "marker": "o", "linewidth": 2.4, "label": "adaserve"},
    TUNED: {"color": "#D55E00", "marker": "s", "linewidth": 1.6, "label": "best fixed chain, tuned per point"},
    PAPER: {"color": "#009E73", "marker": "^", "linewidth": 1.6, "label": "adaserve-paper"},
}
BEST = {"color": "black", "linestyle": "--", "marker": "x", "linewidth": 1.6,
        "label": "best baseline at the paper's setting"}  # fmt: skip
EACH = {"color": "#BBBBBB", "linewidth": 0.9, "label": "each baseline at the paper's setting"}


def draw(lines: Sequence[Line], out: Path) -> list[Path]:
    """Write <machine>-<targets>.png and .svg; returns the paths."""
    groups = grouped(lines)
    written = []
    for machine, targets in dict.fromkeys((machine, targets) for machine, targets, _ in groups):
        sweeps = [sweep for sweep in SWEEPS if (machine, targets, sweep) in groups]
        size = (1.2 + 3.4 * max(len(sweeps), 2), 6.2)
        figure, axes = plt.subplots(2, len(sweeps), figsize=size, squeeze=False, facecolor="white")
        for column, sweep in enumerate(sweeps):
            by_value = groups[machine, targets, sweep]
            _panel(axes[0][column], by_value, "attainment", 100.0)
            _panel(axes[1][column], by_value, "goodput", 1.0)
            axes[0][column].set_ylim(-2, 103)
            axes[1][column].set_ylim(0, 1.06 * axes[1][column].dataLim.ymax)
            axes[1][column].set_xlabel(SWEEPS[sweep])
        axes[0][0].set_ylabel("requests met, %")
        axes[1][0].set_ylabel("goodput, tokens/s")
        figure.suptitle(f"{machine} (simulated), {KINDS[targets]}")
        handles = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
        shown = {name: line for name, line in handles.items() if not str(name).startswith("_")}
        figure.legend(
            shown.values(), shown.keys(), loc="lower center", ncols=2 if len(sweeps) < 3 else 5, frameon=False
        )
        figure.tight_layout(rect=(0, 0.1 if len(sweeps) < 3 else 0.05, 1, 1))
        for suffix in ("png", "svg"):
            written.append(out / f"{Path(machine).stem}-{targets}.{suffix}")
            figure.savefig(written[-1], dpi=100)
        plt.close(figure)
    return written


def _panel(axes: Axes, by_value: dict[float, dict[str, Line]], figure: str, factor: float) -> None:
    def plot(at: list[tuple[float, Line | None]], **style: object) -> None:
        known = [(value, factor * getattr(line, figure)) for value, line in at if line is not None]
        if known:
            axes.plot(*zip(*known, strict=True), markersize=5, **style)  # pyright: ignore[reportArgumentType]

    members = dict.fromkeys(
        name for at in by_value.values() for name, line in at.items() if line.group == BASELINE_GROUP
    )
    for index, name in enumerate(members):
        style = EACH if index == 0 else {**EACH, "label": None}
        plot([(value, at.get(name)) for value, at in by_value.items()], **style)
    plot([(value, best_baseline(at, lambda line: getattr(line, figure))) for value, at in by_value.items()], **BEST)
    for name in reversed(STYLES):
        plot([(value, at.get(name)) for value, at in by_value.items()], **STYLES[name])
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
