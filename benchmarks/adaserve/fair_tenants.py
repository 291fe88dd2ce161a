"""What a tenant that floods its class costs the others, with fair shares and without, in simulation.

    python -m benchmarks.adaserve.fair_tenants --out fair-tenants.json [--rates 3,4] [--flood 10]

Tenants send requests of one class (TPOT_MS, TTFT_MS) as Poisson processes of equal rates. One of them, the first, sends
at its fair rate, not at all, or at `--flood` times that rate. Attainment: requests that met all their targets, of the
others and of that tenant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.results.provenance import source_commit
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from benchmarks import program

TENANTS = 4
FLOODING = "tenant-0"
TPOT_MS, TTFT_MS = 50.0, 2000.0
PROMPT_TOKENS, OUTPUT_TOKENS = 60, 200
"""Medians of log-normal lengths."""
LOG_SD = 0.5


def tenants_trace(rate_rps: float, flood: float, duration_s: float, seed: int = 0) -> Trace:
    """Return requests of all tenants, at `rate_rps` together when each sends its share.

    flood: what the rate of FLOODING is multiplied by. The requests of the others do not depend on it.
    """
    requests: list[TraceRequest] = []
    for tenant in range(TENANTS):
        rng = np.random.default_rng([seed, tenant])
        times = flood if tenant == 0 else 1.0
        for due_s in rng.uniform(0.0, duration_s, rng.poisson(times * rate_rps / TENANTS * duration_s)):
            prompt, output = np.array([PROMPT_TOKENS, OUTPUT_TOKENS]) * np.exp(LOG_SD * rng.standard_normal(2))
            requests.append(
                TraceRequest(
                    float(due_s),
                    max(1, round(prompt)),
                    max(2, round(output)),
                    SLO(tpot_ms=TPOT_MS, ttft_ms=TTFT_MS),
                    "chat",
                    f"tenant-{tenant}",
                )
            )
    requests.sort(key=lambda request: request.due_s)
    return Trace(f"tenants {rate_rps:g}/s, flood {flood:g}", "0" * 64, tuple(requests))


def attainment(trace: Trace, *, fair: bool) -> tuple[float, float | None]:
    """Return the share of requests that met their targets, of the others and of FLOODING (None without any)."""
    plan = SimulationPlan(("adaserve",), fair_tenants=fair, keep_token_times=False)
    met: dict[bool, list[bool]] = {False: [], True: []}
    for record in simulate("adaserve", plan, load_machine("llama-70b"), trace).records:
        request = trace.requests[int(record.request_id.rpartition("-")[2])]
        met[request.tenant == FLOODING].append(record.slo_met is True)
    others, flooding = met[False], met[True]
    return sum(others) / len(others), sum(flooding) / len(flooding) if flooding else None


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    rates: Annotated[str, typer.Option(help="requests per second of all tenants at their shares")] = "3,4",
    flood: Annotated[float, typer.Option(help="rate of the flooding tenant over its share")] = 10.0,
    seconds: Annotated[float, typer.Option(help="duration of the arrivals")] = 60.0,
    seed: Annotated[int, typer.Option(help="seeds times and lengths")] = 0,
) -> None:
    """Compare the attainment of the others with and without fair shares."""
    rows = []
    table = Table("requests/s", "first tenant sends", "fair shares", "others", "first tenant")
    for rate in map(float, rates.split(",")):
        for times in (0.0, 1.0, flood):
            trace = tenants_trace(rate, times, seconds, seed)
            for fair in (False, True):
                others, own = attainment(trace, fair=fair)
                rows.append({"rate_rps": rate, "flood": times, "fair": fair, "others": others, "flooding": own})
                shown = "-" if own is None else f"{own:.1%}"
                table.add_row(f"{rate:g}", f"{times:g} shares", "on" if fair else "off", f"{others:.1%}", shown)
    settings = {"rates": rates, "flood": flood, "seconds": seconds, "seed": seed, "machine": "llama-70b"}
    out.write_text(json.dumps({"commit": source_commit(), "settings": settings, "rows": rows}, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    program.run(main)
