"""What speculation brings one request by how often the draft is right, simulated, beside what a formula says.

    python -m benchmarks.adaserve.acceptance_speedup --out speedup.json

One request at a time, so that nothing else is in its steps: milliseconds per token of a fixed chain, and how many times
`ar` that is, for each acceptance of the draft's tokens, on each machine. The formula is that of independent acceptances
(Leviathan et al.): (1 - a^(k+1)) / (1 - a) tokens in the time of one verification and k draft steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from adaserve_jax.cli.options import comma_list
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.sim.acceptance import AcceptanceModel
from adaserve_jax.sim.machines import Machine, load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from benchmarks import program

PLAIN = "ar"
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 40, 64, 256
APART_S = 60.0
"""Between arrivals: longer than any request takes."""


@dataclass(frozen=True)
class Speedup:
    """tpot_s: mean over requests. draft_share: time of a draft step over that of verifying one token."""

    machine: str
    draft_share: float
    draft_tokens: int
    acceptance: float
    tpot_s: float
    plain_tpot_s: float
    times: float
    formula_times: float


def one_at_a_time(requests: int = REQUESTS) -> Trace:
    """Requests that never meet."""
    one = TraceRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS, SLO(), "any")
    trace = Trace("one at a time", f"{PROMPT_TOKENS} {OUTPUT_TOKENS}", (one,))
    at = (
        TraceRequest(i * APART_S, one.prompt_tokens, one.output_tokens, one.slo, one.slo_class) for i in range(requests)
    )
    return trace.derived(f"{requests} of {APART_S:g} s", at)


def formula(acceptance: float, draft_tokens: int, draft_share: float) -> float:
    """Speedup over plain decoding. draft_share: of a draft step over a verification, which takes as long as a step of
    plain decoding."""
    tokens = sum(acceptance**depth for depth in range(draft_tokens + 1))
    return tokens / (1 + draft_tokens * draft_share)


def tpot_s(policy: str, machine: Machine, acceptance: float, trace: Trace, seed: int) -> float:
    model = AcceptanceModel({"any": acceptance}, {})
    done = simulate(policy, SimulationPlan((), seed, acceptance=model), machine, trace)
    return fmean(record.tpot_s for record in done.records if record.tpot_s is not None)


def measure(
    machine: Machine, acceptances: Sequence[float], draft_tokens: int, *, seed: int = 0, requests: int = REQUESTS
) -> list[Speedup]:
    """Raises ConfigError: the machine drafts no chain as long."""
    if draft_tokens > machine.limits().max_depth:
        raise ConfigError(
            f"--draft-tokens: {machine.name} drafts at most {machine.limits().max_depth}, got {draft_tokens}"
        )
    trace, found = one_at_a_time(requests), []
    share = machine.draft_level_ms / 1e3 / machine.baseline_s
    plain = tpot_s(PLAIN, machine, acceptances[0], trace, seed)
    for acceptance in acceptances:
        ours = tpot_s(f"spec:{draft_tokens}", machine, acceptance, trace, seed)
        said = formula(acceptance, draft_tokens, share)
        found.append(Speedup(machine.name, share, draft_tokens, acceptance, ours, plain, plain / ours, said))
    return found


def acceptance_speedup(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    machines: Annotated[str, typer.Option(help="machines, by name or file, by commas")] = "llama-70b,qwen-32b",
    acceptances: Annotated[
        str, typer.Option(help="chances that a draft token is right, by commas")
    ] = "0.5,0.6,0.7,0.8,0.9",
    draft_tokens: Annotated[int, typer.Option(help="tokens of the chain")] = 5,
    seed: Annotated[int, typer.Option(help="seeds what the draft gets right")] = 0,
) -> None:
    """Simulate and write speedups."""
    chances = comma_list("acceptances", acceptances, float)
    if not chances or not all(0 < chance < 1 for chance in chances) or draft_tokens < 1:
        raise ConfigError(f"--acceptances must be between 0 and 1 and --draft-tokens above 0, got {acceptances}")
    rows = [
        row for name in comma_list("machines", machines, str)
        for row in measure(load_machine(name), chances, draft_tokens, seed=seed)
    ]  # fmt: skip
    for row in rows:
        typer.echo(
            f"{row.machine} acceptance {row.acceptance:g}: {1e3 * row.tpot_s:.2f} ms per token, {row.times:.2f} times "
            f"{PLAIN} (formula {row.formula_times:.2f})"
        )
    result = {"commit": source_commit(), "machine": machine_name(), "rows": [asdict(row) for row in rows]}
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    program.run(acceptance_speedup)
