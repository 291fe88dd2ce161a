"""Figure of one draft service with N targets: measured, simulated and by closed form, one by one and batched.

    python -m benchmarks.starsd.figures --rows benchmarks/results/star-plan.json --out docs/figures/star-plan.png

Rows are those of `sim.StarRow`, under "rows" of each file. Colours are Okabe and Ito's, told apart by
colour-blind readers too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes

COLOURS = {False: "#0072B2", True: "#D55E00"}
DRAFTED = {False: "one by one", True: "batched"}
KINDS: dict[str, dict[str, Any]] = {
    "closed": {"linestyle": "-", "linewidth": 1.2}, "simulated": {"linestyle": "", "marker": "o", "fillstyle": "none"},
    "measured": {"linestyle": "", "marker": "s"},
}  # fmt: skip
PAPER = {"linestyle": ":", "marker": "x", "color": "0.4", "label": "the paper's Table 1"}
PANELS = {
    "throughput_tps": "throughput, tokens/s", "per_target_tps": "of each target, tokens/s",
    "rounds_per_s": "rounds/s of the draft", "load": "busy share of the draft", "wait_s": "wait in the queue, ms",
    "idle_s": "idle between two drafts, ms",
}  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], path: Path, *, paper: Sequence[dict[str, Any]] = ()) -> None:
    """Write the figure of rows (`StarRow` as dicts). paper: such rows of the paper's Table 1, shown beside them."""
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.4), facecolor="white")
    for panel, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
        factor = 1e3 if name.endswith("_s") and name != "rounds_per_s" else 1.0
        for batched, colour in COLOURS.items():
            for kind, style in KINDS.items():
                label = f"{DRAFTED[batched]}, {kind}"
                chosen = [row for row in rows if (row["batched"], row["kind"]) == (batched, kind)]
                _line(panel, chosen, name, factor, color=colour, label=label, **style)
        _line(panel, paper, name, factor, **PAPER)
        if any(row["n"] > 16 for row in rows):
            panel.set_xscale("log", base=2)
        panel.set_ylim(0, max(1.08 * panel.dataLim.ymax, 0.1))
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("targets")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _line(panel: Axes, rows: Sequence[dict[str, Any]], name: str, factor: float, **style: Any) -> None:
    if rows:
        ordered = sorted(rows, key=lambda row: row["n"])
        values = [row[name] * factor for row in ordered]
        panel.plot([row["n"] for row in ordered], values, markersize=5, **style)


def main(
    rows: Annotated[list[Path], typer.Option(help="files with rows; repeat for several")],
    out: Annotated[Path, typer.Option(help="picture to write")],
) -> None:
    """Draw what the files have."""
    found = [json.loads(path.read_text()) for path in rows]
    paper = next((each["paper"] for each in found if "paper" in each), ())
    draw([row for each in found for row in each["rows"]], out, paper=paper)


if __name__ == "__main__":
    typer.run(main)
