"""What AdaServe's figure 13 states, read from the trace that a simulation kept. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.traces import DURATION_S, PEAKS, Trace, load_trace
from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, series

BIN_S, WINDOW_S = 10.0, 60.0
OFF_S = 20.0
"""Seconds that a peak may be off the one read from the paper's figure."""
PEAK_CLAIMS = (
    Claim("largest distance of a class's busiest minute from the paper's peak, seconds", "peaks off, s", "at most",
          OFF_S, None, "s"),
    Claim("smallest ratio of arrivals in a class's busiest minute to those in an average minute", "least swing",
          "at least", 1.0),
)  # fmt: skip


def peaks(step: str) -> Callable[[Folders], Found]:
    def read(folders: Folders) -> Found:
        files = sorted(folders[step].glob("trace-*.jsonl.gz"))
        if not files:
            raise ConfigError(f"{folders[step]} has no trace-*.jsonl.gz; remove the folder and run the figure again")
        return found_in(load_trace(files[-1]))

    return read


def found_in(trace: Trace) -> Found:
    """Where each class peaks: the middle of the minute that has most of its requests."""
    times = {name: np.array([r.due_s for r in trace.requests if r.slo_class == name]) for name in PEAKS}
    busiest = {name: _busiest(at) for name, at in times.items()}
    values = {
        "peaks off, s": max(abs(busiest[name][0] - PEAKS[name].at_s) for name in PEAKS),
        "least swing": min(
            busiest[name][1] / (len(at) * WINDOW_S / DURATION_S) for name, at in times.items() if len(at)
        ),
    }  # fmt: skip
    edges = np.arange(0.0, DURATION_S + BIN_S, BIN_S)
    curves = {
        name: dict(zip(edges[:-1].tolist(), (np.histogram(at, edges)[0] / BIN_S).tolist(), strict=True))
        for name, at in times.items()
    }
    shown = figure("arrivals", "Arrivals by class", trace.name, "seconds", [("arrivals", "requests/s", series(curves))])
    return Found(values, (shown,), {"workload": trace.name})


def _busiest(at_s: np.ndarray) -> tuple[float, int]:
    """(middle, requests) of the busiest window that begins at a whole second; of equals, the middle one."""
    starts = np.arange(0.0, DURATION_S - WINDOW_S + 1)
    counts = np.array([np.count_nonzero((at_s >= start) & (at_s < start + WINDOW_S)) for start in starts])
    best = np.flatnonzero(counts == counts.max())
    return float(starts[best[len(best) // 2]] + WINDOW_S / 2), int(counts.max())
