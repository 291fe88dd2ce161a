"""c1 and c2 of AdaServe's eq. 8 and 9 by grid search: `adaserve-paper` simulated with each pair. Imports no jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.bench.profiled_machine import CLASS, ProfiledMachine
from adaserve_jax.bench.simulation import SimulationPlan, simulate
from adaserve_jax.bench.traces import Trace, TraceRequest
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.types import SLO, Progress

C1, C2 = (0, 2, 4, 8, 16), (-1, 0, 1, 2)
POLICY = "adaserve-paper"
LOADS = (0.6, 0.9)
"""Rates of the generated workloads, as shares of the most requests per second that the machine is expected to emit."""
REQUESTS, MOST_TOKENS, TARGETS = 32, 64, (1.5, 3.0, 6.0)
"""Of a generated workload: requests, most output tokens, and TPOT targets over the baseline, in turn."""


@dataclass(frozen=True)
class Found:
    """The best pair, and what it gave: mean joint attainment over the traces, and mean goodput in tokens per second."""

    c1: int
    c2: int
    attainment: float
    goodput_tps: float


def search_offsets(
    machine: ProfiledMachine, traces: Sequence[Trace], progress: Progress | None = None,
    *, c1: tuple[int, ...] = C1, c2: tuple[int, ...] = C2,
) -> Found:  # fmt: skip
    """The pair of best mean attainment; of equals the one with most goodput, then the first."""
    found: list[Found] = []
    pairs = list(itertools.product(c1, c2))
    for pair in pairs:
        found.append(_try(replace(machine, searched_offsets=pair), traces, pair))
        if progress is not None:
            progress("searching c1, c2", len(found), len(pairs))
    return max(found, key=lambda each: (each.attainment, each.goodput_tps))


def generated_traces(machine: ProfiledMachine, tokens_per_s: float, seed: int = 0) -> list[Trace]:
    """One per load of LOADS: Poisson arrivals, lengths even in their logarithm. tokens_per_s: what the machine is
    expected to emit at most."""
    rng = np.random.default_rng(seed)
    longest = np.array([[machine.max_context // 2], [min(MOST_TOKENS, machine.max_context // 4)]])
    prompt, output = np.exp(rng.uniform(np.log(np.minimum(8, longest)), np.log(longest), (2, REQUESTS))).astype(int)
    gaps = rng.exponential(1.0, REQUESTS)
    traces = []
    for load in LOADS:
        due_s = np.cumsum(gaps) * output.mean() / (tokens_per_s * load)
        requests = tuple(
            TraceRequest(
                float(due_s[i]), int(prompt[i]), int(output[i]), SLO(relative=TARGETS[i % len(TARGETS)]), CLASS
            )
            for i in range(REQUESTS)
        )
        traces.append(Trace(f"generated at {load:g} of capacity", "", requests))
    return traces


def _try(machine: ProfiledMachine, traces: Sequence[Trace], pair: tuple[int, int]) -> Found:
    attained, goodput = [], []
    for trace in traces:
        simulated = simulate(POLICY, SimulationPlan((POLICY,)), machine, trace)
        overall = summarize(simulated.records, wall_s=simulated.wall_s)[0]
        attained.append(overall.attainment or 0.0)
        goodput.append(overall.goodput_tps)
    return Found(*pair, float(np.mean(attained)), float(np.mean(goodput)))
