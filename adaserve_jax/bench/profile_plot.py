"""The roofline of a profile as a picture: verify time and time per token by tokens, draft time by depth.

matplotlib is imported when it is needed, and only then.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.bench.profile import knee
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.profile import Profile

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart."""
MARKERS = "os^Dv<>"


def need_matplotlib(path: Path) -> None:
    """Raise ConfigError unless a picture can be written to `path`."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot must end in {' or '.join(SUFFIXES)}, got {path}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with `pip install adaserve-jax[plot]`")


def plot_profile(profile: Profile, path: Path) -> None:
    """Write the picture. Raises ConfigError: it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.8), layout="constrained", facecolor="white")
    axes: Any = figure.subplots(1, 3)
    _plot_verify(profile, axes[0], axes[1])
    _plot_draft(profile, axes[2])
    figure.suptitle(f"{profile.name} on {profile.identity.device}, {profile.identity.machine}", fontsize=10)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --plot") from error


def _plot_verify(profile: Profile, whole: Any, each: Any) -> None:
    """Plot a line per context, with the most rows that were timed at each size."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    timed = profile.timings.verify
    rows = {tokens: max(r for t, r, _ in timed if t == tokens) for tokens in sorted({t for t, _, _ in timed})}
    edges = list(rows)
    for index, context in enumerate(sorted({context for _, _, context in timed})):
        milliseconds = np.array([timed[tokens, rows[tokens], context] for tokens in edges]) * 1e3
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        whole.plot(edges, milliseconds, label=f"context {context}", **style)
        each.plot(edges, milliseconds / np.array(edges), **style)
        bend = knee(edges, milliseconds)
        whole.plot([bend], [np.interp(bend, edges, milliseconds)], "*", color=style["color"], markersize=13)
    for axis, label in ((whole, "verify, ms"), (each, "verify, ms per token")):
        axis.set(xscale="log", yscale="log", xlabel="packed tokens and rows", ylabel=label)
        axis.set_xticks(edges, [f"{tokens}\n{rows[tokens]}" for tokens in edges], fontsize=7)
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.grid(alpha=0.3)
    whole.plot([], [], "*", color="grey", markersize=11, linestyle="none", label="knee")
    whole.legend(fontsize=8)


def _plot_draft(profile: Profile, axis: Any) -> None:
    """Plot a line per rows and width, at the context nearest to the typical one."""
    timed = profile.timings.search
    axis.set(xlabel="depth", ylabel="draft search, ms")
    axis.grid(alpha=0.3)
    if not timed:
        axis.set_title("no draft", fontsize=9)
        return
    context = min({c for *_, c in timed}, key=lambda c: abs(c - profile.timings.typical_context))
    for index, (rows, width) in enumerate(sorted({(r, w) for r, w, _, _ in timed})):
        depths = sorted(d for r, w, d, c in timed if (r, w, c) == (rows, width, context))
        milliseconds = [timed[rows, width, depth, context] * 1e3 for depth in depths]
        axis.plot(depths, milliseconds, label=f"rows {rows}, width {width}", color=COLOURS[index % len(COLOURS)],
                  marker=MARKERS[index % len(MARKERS)], markersize=4)  # fmt: skip
    axis.set_ylim(0)
    axis.set_title(f"context {context}", fontsize=9)
    axis.legend(fontsize=8)
