"""Draws the pictures of docs/concepts.md from what the code does: a step, its tree, its selection, and pages in slabs.

    python -m scripts.concept_figures

A step of the embedded pair is run; candidates, selection, pages and bytes are those of the package. Nothing is timed.
Needs matplotlib. Colours are Okabe and Ito's; what is told apart by colour is told apart by words or hatching too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from adaserve_jax.memory.ledger import MIB, Ledger, mib
from scripts.concept_capture import NEEDS, PROMPTS, Pages, Step, capture, pages_over_time

OUT = Path(__file__).resolve().parent.parent / "docs" / "figures"
HOST, DEVICE, SLO_PHASE, REST, ACCEPTED, BONUS, NONE = (
    "#DCE9F5", "#FBE3CC", "#0072B2", "#E69F00", "#009E73", "#F0E442", "#E4E4E4",
)  # fmt: skip
HOLDERS = {"A": "#56B4E9", "B": "#E69F00", "C": "#009E73", "": "white"}
PAGES_AT = (0.0, -2.6, -5.2, -8.4)
"""Heights of the four moments; below the third one there is room for its moves."""
AXIS_FROM_MIB = 14
WIDTH = 7.0
"""Inches: of a column of the page, so that letters are as large as its text."""


def draw_step(step: Step) -> plt.Figure:
    """Draw, from top to bottom, what the host decides beside what the device runs, with what goes between them."""
    plan, trees = step.plan, step.trees
    draft = plan.draft
    assert draft is not None
    each = step.candidates.token.shape[1]
    boxes = (
        (0, "plan(now)", f"{plan.num_rows} requests run; depth {draft.depth}, width {draft.width};\n"
         f"at most {plan.tree_token_cap} tokens to verify", "StepPlan"),
        (1, "speculate(plan)", f"the draft feeds on what was accepted last,\nthen searches: {each} candidates each",
         "CandidateTrees"),
        (0, "select(plan, candidates, now)", f"the clock is read again; what each needs;\n{trees.num_nodes} of "
         f"{plan.num_rows * (1 + each)} nodes, roots included", "DraftTrees"),
        (1, "verify(plan, trees)", f"one forward of the target over {trees.num_nodes} tokens;\nwhat it agrees with is "
         "accepted and kept", "StepOutcome"),
        (0, "commit(outcome, now)", f"{sum(step.emitted)} tokens: {', '.join(map(str, step.emitted))}; costs and "
         "chances\nare learned, ends noticed, pages freed", ""),
    )  # fmt: skip
    figure, axes = _canvas(WIDTH, 6.4)
    axes.set(xlim=(0, 14), ylim=(-0.3, 12.6))
    for column, (name, colour) in enumerate((("host: the scheduler", HOST), ("device: the executor", DEVICE))):
        axes.text(3.4 + 7.2 * column, 12.2, name, ha="center", fontsize=10, weight="bold")
        axes.axvspan(7.2 * column, 7.2 * column + 6.8, color=colour, alpha=0.35, lw=0)
    for number, (column, title, about, handed) in enumerate(boxes):
        left, middle = 7.2 * column + 0.15, 10.7 - 2.4 * number
        face = (HOST, DEVICE)[column]
        axes.add_patch(FancyBboxPatch((left, middle - 0.8), 6.5, 1.6, "round,pad=0,rounding_size=0.2", fc=face, ec="k"))
        axes.text(left + 3.25, middle + 0.42, title, ha="center", va="center", fontsize=9.5, family="monospace")
        axes.text(left + 3.25, middle - 0.28, about, ha="center", va="center", fontsize=8.5)
        if handed:
            to = 10.6 if column == 0 else 3.4
            tail = (left + 6.5, middle) if column == 0 else (left, middle)
            bend = "angle,angleA=0,angleB=90,rad=6" if column == 0 else "angle,angleA=180,angleB=90,rad=6"
            axes.annotate(
                "", (to, middle - 1.6), tail, arrowprops={"arrowstyle": "-|>", "color": "k", "connectionstyle": bend}
            )
            beside = (to + 0.2, "left") if column == 0 else (to - 0.2, "right")
            axes.text(beside[0], middle - 1.2, handed, ha=beside[1], va="center", fontsize=8.5, style="italic")
    return figure


def draw_tree(step: Step) -> plt.Figure:
    """Draw one request's candidates, which of them are verified, and which of those are accepted: where most are."""
    row = max(range(len(NEEDS)), key=lambda each: (step.refused(each) > 0, step.emitted[each]))
    own = np.flatnonzero(step.trees.row == row)
    verified = {int(step.trees.candidate[node]): bool(step.accepted[node]) for node in own}
    parent, depth = step.candidates.parent[row], step.candidates.depth
    present = [c for c in range(len(depth)) if np.isfinite(step.candidates.log_f[row, c])]
    height = _heights(present, parent.tolist())
    f = {int(column): prob for column, prob in zip(step.ranked.column[row], step.ranked.f[row], strict=True)}
    figure, axes = _canvas(WIDTH, 1.2 + 0.46 * (max(height.values()) + 1))
    for node in present:
        above = int(parent[node])
        colour, style = _node_colours(verified.get(node))
        x, y = (int(depth[node]) - 1, int(depth[node])), (height[above], height[node])
        axes.plot(x, y, color="black" if node in verified else "grey", lw=1, ls=style, zorder=0)
        text = f"{_shown(step.piece[int(step.candidates.token[row, node])])}  {f[node]:.2f}"
        _label(axes, x[1], y[1], text, colour, style)
    root = int(step.trees.token[own[0]])
    _label(axes, 0, height[-1], f"{_shown(step.piece[root])}  1", (ACCEPTED, 0.6), "-")
    last = max((node for node, accepted in verified.items() if accepted), key=lambda n: int(depth[n]) if n >= 0 else 0)
    x = int(depth[last]) if last >= 0 else 0
    bonus = f"{_shown(step.piece[step.bonus[row]])}  bonus"
    axes.plot((x, x + 1), (height[last], height[last] + 0.9), color="black", lw=1, ls=":", zorder=0)
    _label(axes, x + 1, height[last] + 0.9, bonus, BONUS, "-")
    axes.set(xlim=(-0.5, int(depth.max()) + 1.5), ylim=(-1.5, max(height.values()) + 1.5))
    axes.legend(
        handles=[
            Patch(fc=ACCEPTED, alpha=0.6, ec="k", label="verified and accepted"),
            Patch(fc=SLO_PHASE, alpha=0.3, ec="k", label="verified, not accepted"),
            Patch(fc="white", ec="grey", ls="--", label="drafted, not verified"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=8.5,
    )  # fmt: skip
    return figure


def draw_selection(step: Step) -> plt.Figure:
    """Draw a panel for each request: its candidates by f, and which phase took them."""
    rows = len(NEEDS)
    figure, panels = plt.subplots(rows, 1, figsize=(WIDTH, 1.35 * rows + 0.9), sharex=True, facecolor="white")
    for row, (panel, name, need) in enumerate(zip(panels, PROMPTS, NEEDS, strict=True)):
        f = step.ranked.f[row]
        place = np.arange(1, len(f) + 1)
        in_slo = place <= step.taken[row]
        in_rest = step.chosen[row] & ~in_slo
        panel.bar(0, 1, color="white", ec="k")
        panel.bar(place[in_slo], f[in_slo], color=SLO_PHASE, ec="k")
        panel.bar(place[in_rest], f[in_rest], color=REST, ec="k", hatch="//")
        panel.bar(place[~step.chosen[row]], f[~step.chosen[row]], color=NONE)
        gets = 1 + float(f[step.chosen[row]].sum())
        wants = f"needs {need:g} tokens" if need else "has no target"
        panel.text(len(f) + 0.4, 0.93, f"{name} {wants},\ncan expect {gets:.1f}", ha="right", va="top", fontsize=9)
        panel.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), ylabel="f")
        panel.spines[["top", "right"]].set_visible(False)
    columns = step.ranked.f.shape[1]
    panels[-1].set(xlabel="candidates of a request, the likeliest first", xlim=(-0.7, columns + 0.7))
    panels[-1].set_xticks(range(columns + 1), ["root", *map(str, range(1, columns + 1))])
    handles = [
        Patch(fc="white", ec="k", label="root"), Patch(fc=SLO_PHASE, ec="k", label="SLO phase"),
        Patch(fc=REST, ec="k", hatch="//", label="throughput phase"), Patch(fc=NONE, label="not verified"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="upper center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    return figure


def draw_slabs(ledger: Ledger) -> plt.Figure:
    """Draw the bytes of the embedded pair in both layouts, then pages from the draft's leaving to its return."""
    moments, migration = pages_over_time()
    figure, (bytes_, pages) = plt.subplots(
        2, 1, figsize=(WIDTH, 6.6), height_ratios=(1.7, 5), facecolor="white", layout="constrained"
    )
    _draw_layouts(bytes_, ledger)
    pages.set_axis_off()
    for number, moment in enumerate(moments):
        _draw_pages(pages, moment, PAGES_AT[number])
    for old, new in zip(migration.from_pages.tolist(), migration.to_pages.tolist(), strict=True):
        bend = {"arrowstyle": "-|>", "color": "black", "connectionstyle": "arc3,rad=-0.12", "lw": 0.9}
        pages.annotate("", (new + 0.5, PAGES_AT[2]), (old + 0.5, PAGES_AT[2]), arrowprops=bend)
    total = max(len(moment.holder) for moment in moments)
    pages.set(xlim=(-0.2, total + 0.2), ylim=(PAGES_AT[-1] - 1.2, 2.0))
    return figure


def _draw_layouts(axes: Axes, ledger: Ledger) -> None:
    colours = {
        "target weights": "#BBBBBB", "target KV pages": "#56B4E9", "draft weights": "#CC79A7",
        "draft KV pages": "#E8B9D2", "extension pages": "#9AD3F5",
    }  # fmt: skip
    for y, expanded in ((1, False), (0, True)):
        left = 0.0
        for part in ledger.parts(expanded=expanded):
            if part.name not in colours or not part.device_bytes:
                continue
            right = left + part.device_bytes / MIB
            hatch = "//" if "extension" in part.name else ""
            axes.barh(y, right - left, 0.7, left, color=colours[part.name], ec="k", hatch=hatch)
            words = "\n".join((*part.name.split(), mib(part.device_bytes)))
            box = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6} if hatch else None
            middle = (max(left, AXIS_FROM_MIB) + right) / 2
            axes.text(middle, y, words, ha="center", va="center", fontsize=7.5, bbox=box)
            left = right
    axes.set_xlim(AXIS_FROM_MIB, ledger.sizes.target_weights / MIB + 7)
    axes.set_yticks((1, 0), ("draft\nhere", "draft\naway"))
    axes.set_xlabel(f"MiB of the device, embedded pair; the axis begins at {AXIS_FROM_MIB}", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _draw_pages(axes: Axes, moment: Pages, y: float) -> None:
    axes.text(0, y + 1.25, moment.title, fontsize=9, va="bottom")
    for page, holder in enumerate(moment.holder):
        beyond = page >= moment.base
        face = Rectangle(
            (page, y), 1, 1, fc=HOLDERS[holder], ec="black", lw=0.8, hatch="" if holder or not beyond else "//"
        )
        axes.add_patch(face)
        axes.text(page + 0.5, y + 0.5, holder, ha="center", va="center", fontsize=8)
    axes.plot([moment.base] * 2, [y - 0.25, y + 1.2], color="black", lw=2.2)
    axes.text(moment.base, y - 0.3, "K", ha="center", va="top", fontsize=8, weight="bold")


def _heights(present: list[int], parent: list[int]) -> dict[int, float]:
    """Return the height of each node and of the root, -1: leaves one below the other, others in the middle of their
    children."""
    children = {node: [c for c in present if parent[c] == node] for node in (-1, *present)}
    height: dict[int, float] = {}

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        free = -sum(1 for placed in height if not children[placed])
        height[node] = (below[0] + below[-1]) / 2 if below else float(free)
        return height[node]

    place(-1)
    lowest = min(height.values())
    return {node: y - lowest for node, y in height.items()}


def _node_colours(accepted: bool | None) -> tuple[tuple[str, float] | str, str]:
    """Return the colours of face and line of a node; None: it is not verified."""
    if accepted is None:
        return "white", "--"
    return (ACCEPTED, 0.6) if accepted else (SLO_PHASE, 0.3), "-"


def _label(axes: Axes, x: float, y: float, text: str, face: object, style: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": "black" if style == "-" else "grey", "ls": style}
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, family="monospace", bbox=box)
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, family="monospace", bbox=box | {"fc": face})


def _shown(piece: str) -> str:
    """Return a token's text with its spaces and line ends to be seen."""
    return piece.replace(" ", "\u00b7").replace("\n", "\u21b5") or "\u2205"


def _canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height), facecolor="white")
    axes.set_axis_off()
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.94)
    return figure, axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    plt.rcParams.update({"svg.hashsalt": "concepts", "svg.fonttype": "path"})
    step, ledger = capture()
    figures = {
        "step": draw_step(step), "tree": draw_tree(step), "selection": draw_selection(step),
        "slabs": draw_slabs(ledger),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = out / f"concept-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
