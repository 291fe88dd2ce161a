"""Figures of benchmarks/osd/online_learning.py: acceptance by requests served.

    python -m benchmarks.osd.figures --results benchmarks/results/online-learning --out docs/figures

Colours are Okabe and Ito's, told apart by colour-blind readers too; lines that do not learn are dashed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.osd.views import OFFLINE, ONE, ONLINE, SHIPPED, START, TAG, TOPIC, way

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STILL = {SHIPPED: ("0.35", ":"), OFFLINE: ("black", "--"), START: ("0.6", "-.")}
"""Drafts that do not learn."""
SAID = {
    SHIPPED: "the embedded draft", OFFLINE: "distilled offline, same prompts", START: "at the start",
    ONLINE: "online", ONE: "one draft", TAG: "one for each kind, by tag", TOPIC: "one for each kind, by topic",
    "wrong": "wrong positions only", "lora": "low-rank update", "reverse_kl": "reverse KL", "jsd": "JSD",
}  # fmt: skip

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="folder that online_learning.py wrote")],
    out: Annotated[Path, typer.Option(help="folder of figures")],
) -> None:
    """Draw what there is."""
    out.mkdir(parents=True, exist_ok=True)
    narrow = [(path.stem.removeprefix("narrow-"), _read(path)) for path in sorted(results.glob("narrow-*.json"))]
    if narrow:
        _save(_narrow(narrow), out / "learning-narrow.png")
    for name, draw in (("shift", _shift), ("mixed", _mixed)):
        path = results / f"{name}.json"
        if path.exists():
            _save(draw(_read(path)), out / f"learning-{name}.png")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    print(path)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(1 + 4.2 * count, 3.6), squeeze=False, facecolor="white", sharey=True)
    axes[0][0].set_ylabel("acceptance: mean of Σ min(p, q)")
    for panel in axes[0]:
        panel.set_xlabel("requests served")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _curve(panel: Axes, run: dict[str, Any], domain: str, **style: Any) -> None:
    points = run["points"]
    panel.plot([p["requests"] for p in points], [p["acceptance"][domain] for p in points], **style)


def _still(panel: Axes, result: dict[str, Any], domain: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name in result["acceptance"]:
            colour, dashes = STILL[name]
            panel.axhline(result["acceptance"][name][domain], color=colour, linestyle=dashes, label=SAID[name])


def _narrow(results: list[tuple[str, dict[str, Any]]]) -> Figure:
    figure, panels = _panels(len(results))
    for panel, (domain, result) in zip(panels, results, strict=True):
        _still(panel, result, domain, (SHIPPED, OFFLINE))
        for colour, run in zip(COLOURS, result["runs"], strict=False):
            _curve(panel, run, domain, color=colour, label=SAID[way(run)])
        panel.set_title(domain)
        panel.legend(fontsize=8, loc="lower right")
    return figure


def _shift(result: dict[str, Any]) -> Figure:
    figure, (panel,) = _panels(1)
    figure.set_size_inches(8, 4)
    (run,) = result["runs"]
    order = result["order"]
    for colour, domain in zip(COLOURS, dict.fromkeys(order), strict=False):
        _curve(panel, run, domain, color=colour, label=domain, linewidth=1)
        served = [p for p in run["points"] if p["requests"] and order[p["requests"] - 1] == domain]
        panel.plot(
            [p["requests"] for p in served], [p["acceptance"][domain] for p in served], color=colour, linewidth=3
        )
    for index, (one, other) in enumerate(pairwise(order)):
        if one != other:
            panel.axvline(index + 1, color="0.5", linewidth=0.8, linestyle=":")
    panel.set_title("one kind of traffic after another; bold while it is served")
    panel.legend(fontsize=8, loc="lower right")
    return figure


def _mixed(result: dict[str, Any]) -> Figure:
    domains = list(dict.fromkeys(result["order"]))
    figure, panels = _panels(len(domains))
    for panel, domain in zip(panels, domains, strict=True):
        for colour, run in zip(COLOURS, result["runs"], strict=False):
            _curve(panel, run, domain, color=colour, label=SAID[way(run)])
        panel.set_title(f"{domain}, all kinds served at once")
        panel.legend(fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    app()
