"""Figure of benchmarks/cluster/plan.py: requests that met their targets, by replicas, router and load.

    python -m benchmarks.cluster.figures --results benchmarks/results/cluster-plan --out docs/figures

Colours are Okabe and Ito's, told apart by colour-blind readers too, and every line has a marker of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer

STYLES = {
    "round-robin": {"color": "#E69F00", "marker": "^"}, "least-loaded": {"color": "#009E73", "marker": "s"},
    "slo-aware:4": {"color": "#56B4E9", "marker": "v"}, "slo-aware": {"color": "#0072B2", "marker": "o"},
}  # fmt: skip


def main(
    results: Annotated[Path, typer.Option(help="folder that benchmarks.cluster.plan wrote")],
    out: Annotated[Path, typer.Option(help="folder of figures")],
) -> None:
    """One row of panels per policy and mix, one panel per load."""
    lines = [json.loads(line) for line in (results / "points.jsonl").read_text().splitlines()]
    compared = [each for each in lines if each["point"]["part"] in ("fixed", "adaserve")]
    settings = sorted({(each["point"]["policy"], each["point"]["mix"]) for each in compared}, reverse=True)
    loads = sorted({each["point"]["load"] for each in compared})
    sizes = sorted({each["point"]["replicas"] for each in compared})
    size = (1.5 + 3.4 * len(loads), 1.5 + 2.6 * len(settings))
    figure, panels = plt.subplots(
        len(settings), len(loads), figsize=size, squeeze=False, sharey=True, facecolor="white"
    )
    for row, (policy, mix) in enumerate(settings):
        for column, load in enumerate(loads):
            panel = panels[row][column]
            of = [each for each in compared if _setting(each) == (policy, mix, load)]
            for router, style in STYLES.items():
                met = {
                    each["point"]["replicas"]: 100 * each["summaries"][0]["attainment"]
                    for each in of if each["point"]["router"] == router
                }  # fmt: skip
                panel.plot(sorted(met), [met[count] for count in sorted(met)], label=router, markersize=5, **style)
            panel.set_xscale("log")
            panel.set_xticks(sizes, [str(count) for count in sizes])
            panel.minorticks_off()
            panel.set_title(f"{policy}, mix {mix}, load {load:.0%}", fontsize=9)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        panels[row][0].set_ylabel("requests met, %")
    for panel in panels[-1]:
        panel.set_xlabel("replicas")
    handles, labels = panels[0][0].get_legend_handles_labels()
    columns = len(STYLES) if len(loads) > 1 else 2
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    figure.tight_layout(rect=(0, 0.25 * -(-len(STYLES) // columns) / size[1], 1, 1))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "cluster-plan.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


def _setting(line: dict[str, Any]) -> tuple[str, str, float]:
    return line["point"]["policy"], line["point"]["mix"], line["point"]["load"]


if __name__ == "__main__":
    typer.run(main)
