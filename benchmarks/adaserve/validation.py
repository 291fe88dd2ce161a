"""Does the simulator say what the engine does? The same requests through both, policy by policy.

    python -m benchmarks.adaserve.validation --traces adaserve-traces --out validation

The first requests of one of AdaServe's traces, their texts cut to a thirteenth of their tokens so that prefill has the
share of a step that it has on the paper's machine, with its targets in multiples of the baseline latency, arrive at
several rates at a real engine with a grown target: plain decoding, the chain that the simulator finds best, the paper's
policy and ours, in interleaved rounds. The engine starts from a profile that is measured first, unless --out has one.
All draft with the draft model alone, since the simulator has no text to draft from. Acceptance is recorded: from the
chain's runs, and from the others how good second choices are. The latency that targets are scaled by, and the chain,
are kept in chosen.json, so that a run that was stopped goes on with them, and so does one whose profile was removed to
be measured again. What other options measured is measured again. Then the same prompts, output lengths, arrivals and
targets are simulated with the recorded acceptance: on the profile as it is, and once for each round with the times that
its steps took, warm-up included, beside the profile's samples. The first is a prediction; the second shows the error
that is left without the machine's drift.

Printed and written to validation.json: attainment (TPOT alone, and with TTFT) and goodput of all three, differences to
the engine, and whether engine and simulations put the policies in the same order. Rows and records of the real runs are
beside it.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import TypeAdapter
from rich.table import Table

from adaserve_jax.bench.local_client import LocalBenchEngine
from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.profile import measure_profile, serving_factors
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.cli.terminal import notes, open_bench_engine, table_console
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.jsonl import make_folder, read_rows
from adaserve_jax.results.profile import ServingFactors, read_profile, write_profile
from adaserve_jax.results.provenance import settings_hash, source_commit
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.schema import ALL_CLASSES, ResultRow
from adaserve_jax.sim.acceptance import AcceptanceModel, AcceptanceRecord, fit_acceptance
from adaserve_jax.sim.machines import Machine, ProfiledMachine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest, Workload, WorkloadItem
from adaserve_jax.workloads.traces import Trace, load_trace
from benchmarks import program
from benchmarks.grown import grown_target

COMPARED = ("attainment_tpot", "attainment", "goodput_tps")
SIMULATED = ("simulated", "as_served")
"""Sides of a comparison that the simulator computed."""
FACTORS = TypeAdapter(ServingFactors)
SIMULATIONS = 5
"""Seeds that a simulated point is the mean of; the real one is the mean of its repeats."""
CHECK_S = 45.0
"""Of mixed load when a profile is measured."""
PROMPT_PARTS = 13
"""A prompt keeps one of so many of its tokens."""
PAPER_BASELINE_S = 0.030
"""What AdaServe's absolute targets, and the TTFT target, are scaled by."""
TTFT_SLO_S = 4.0


@dataclass(frozen=True)
class Asked:
    """One request. due_s: in the trace's own time."""

    due_s: float
    item: WorkloadItem
    prompt_tokens: int
    output_tokens: int

    def measured(self, prompt_ids: Sequence[int]) -> Asked:
        """With the prompt's length as the engine has it."""
        return replace(self, prompt_tokens=len(prompt_ids))


def asked_requests(
    folder: Path, name: str, *, count: int, new_tokens: int, baseline_s: float, temperature: float
) -> list[Asked]:
    """Read the first `count` of a trace, with the beginnings of their prompts. baseline_s: of the machine, which all
    targets are scaled to."""
    path = folder / f"{name}.jsonl.gz"
    trace = load_trace(path)
    with gzip.open(path, "rt") as file:
        ids = [values["prompt_id"] for values in sorted(map(json.loads, file), key=lambda values: values["t_ms"])]
    texts = _texts(folder)
    tokenizer = Tokenizer.from_folder(resolve_folder("demo", "target"))
    scale = baseline_s / PAPER_BASELINE_S
    asked = []
    for request, prompt_id in list(zip(trace.requests, ids, strict=True))[:count]:
        kept = tokenizer.encode(texts[prompt_id])[: max(1, round(request.prompt_tokens / PROMPT_PARTS))]
        tpot_s = request.slo.tpot_s(PAPER_BASELINE_S)
        assert tpot_s is not None
        slo = SLO(tpot_ms=tpot_s * scale * 1e3, ttft_ms=TTFT_SLO_S * scale * 1e3)
        prompt = tokenizer.decode(kept) or " "
        item = WorkloadItem(prompt, (), new_tokens, request.slo_class, slo, temperature, None, None)
        asked.append(Asked(request.due_s, item, len(kept), new_tokens))
    return asked


def as_workload(asked: Sequence[Asked], rate_rps: float) -> Workload:
    """Return them with arrivals at a mean rate."""
    scale = len(asked) / asked[-1].due_s / rate_rps
    items = tuple(replace(each.item, arrival_s=each.due_s * scale) for each in asked)
    return Workload(f"first {len(asked)} at {rate_rps:g}/s", "", items)


def as_trace(asked: Sequence[Asked]) -> Trace:
    """Return them as the simulator takes them."""
    requests = [
        TraceRequest(each.due_s, each.prompt_tokens, each.output_tokens, each.item.slo, each.item.slo_class)
        for each in asked
    ]
    return Trace(f"first {len(asked)}", "", tuple(requests))


def _texts(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("prompts_*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            texts |= {values["id"]: values["prompt"] for values in map(json.loads, file)}
    if not texts:
        raise ConfigError(f"{folder} has no prompts_*.jsonl.gz; give the folder of AdaServe's traces")
    return texts


@dataclass(frozen=True)
class Compared:
    """One policy at one rate, by measure: means over the engine's rounds, and over the simulator's seeds.

    simulated: on the profile as it is. as_served: with the times of each round. factors: of each round's times over
    the profile's samples.
    """

    policy: str
    rate_rps: float
    real: dict[str, float]
    simulated: dict[str, float]
    as_served: dict[str, float]
    factors: list[ServingFactors]
    real_repeats: list[dict[str, float]]

    def difference(self, measure: str, side: str = "simulated") -> float:
        """Return simulated minus real; of goodput as a share of the real one."""
        difference = getattr(self, side)[measure] - self.real[measure]
        return difference / self.real[measure] if measure == "goodput_tps" and self.real[measure] else difference


POINT = TypeAdapter(Compared)


@dataclass(frozen=True)
class Round:
    """One policy at one rate on the engine: its measures, and its steps' times over the profile's samples."""

    measures: dict[str, float]
    served: ServingFactors


def best_chain(machine: Machine, trace: Trace, rates: Sequence[float]) -> int:
    """k of the `spec:<k>` that attains most on average over the rates."""
    attained = {}
    for k in range(1, machine.max_depth + 1):
        points = [_simulated(f"spec:{k}", machine, trace, rate, None, seeds=1) for rate in rates]
        attained[k] = float(np.mean([point["attainment"] for point in points]))
    return max(attained, key=attained.__getitem__)


def _simulated(
    policy: str, machine: Machine, trace: Trace, rate: float, acceptance: AcceptanceModel | None, *, seeds: int
) -> dict[str, float]:
    requests = tuple(replace(r, due_s=r.due_s * trace.rate_rps / rate) for r in trace.requests)
    scaled = replace(trace, requests=requests)
    found = []
    for seed in range(seeds):
        plan = SimulationPlan((), seed, acceptance=acceptance, keep_token_times=False)
        done = simulate(policy, plan, machine, scaled)
        found.append(_measures(done.records, done.wall_s))
    return _mean(found)


def _measures(records: list[RequestRecord], wall_s: float) -> dict[str, float]:
    overall = summarize(records, wall_s=wall_s)[0]
    return {name: float(getattr(overall, name) or 0.0) for name in COMPARED}


def _mean(measures: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in measures])) for name in COMPARED}


def measure_real(
    engine: LocalBenchEngine, asked: Sequence[Asked], policies: Sequence[str], rates: Sequence[float], repeats: int,
    out: Path, key: str,
) -> dict[tuple[str, float], list[Round]]:  # fmt: skip
    """Run rounds over all rates and policies; return those of each point. What `out` has whole, of the same key, is not
    run again.

    Raises ConfigError: a row is not valid.
    """
    found: dict[tuple[str, float], list[Round]] = {}
    assert isinstance(engine.client, LocalEngine)
    for repeat in range(repeats):
        for index, rate in enumerate(rates):
            shift = (index + repeat) % len(policies)
            workload = as_workload(asked, rate)
            duration_s = workload.items[-1].arrival_s or 0.0
            for policy in (*policies[shift:], *policies[:shift]):
                folder = run_folder(out, repeat, rate, policy)
                times, made_with = folder / "served.json", folder / "settings.txt"
                if not times.exists() or not made_with.exists() or made_with.read_text() != key:
                    shutil.rmtree(folder, ignore_errors=True)
                    plan = BenchPlan((policy,), (None,), duration_s + 1.0, seed=repeat, drain_s=120.0, record=True)
                    run_bench(plan, workload, lambda: engine, folder)
                rows = read_rows(folder / "results.jsonl", ResultRow)
                row = next((row for row in rows if row.slo_class == ALL_CLASSES), None)
                if row is None or not row.valid:
                    reason = "it was interrupted" if row is None else row.invalid_reason
                    raise ConfigError(f"{policy} at {rate:g}/s is not valid: {reason}; run it again")
                if not times.exists():
                    made_with.write_text(key)
                    times.write_text(FACTORS.dump_json(serving_factors(engine.client.served)).decode() + "\n")
                measures = {name: float(getattr(row, name) or 0.0) for name in COMPARED}
                found.setdefault((policy, rate), []).append(Round(measures, FACTORS.validate_json(times.read_text())))
                notes().print(f"round {repeat + 1} {policy} at {rate:g}/s: {measures}", highlight=False)
    return found


def run_folder(out: Path, repeat: int, rate: float, policy: str) -> Path:
    """Return the folder of one round of one policy at one rate."""
    return out / f"real-{repeat}-{rate:g}-{policy.replace(':', '')}"


def read_records(out: Path, rates: Sequence[float], repeats: int, policies: Sequence[str]) -> list[AcceptanceRecord]:
    """Return what the real runs of these policies recorded."""
    folders = [run_folder(out, *each) for each in product(range(repeats), rates, policies)]
    return [each for folder in folders for each in read_rows(folder / "acceptance.jsonl", AcceptanceRecord)]


def order(points: Sequence[Compared], side: str) -> list[str]:
    """Policies by attainment, best first."""
    return [p.policy for p in sorted(points, key=lambda p: -getattr(p, side)["attainment"])]


def same_order(points: Sequence[Compared], side: str = "simulated", tolerance: float = 0.02) -> bool:
    """Return whether no two policies are the other way round, by more than `tolerance` of attainment on both sides."""
    for one in points:
        for two in points:
            real = one.real["attainment"] - two.real["attainment"]
            simulated = getattr(one, side)["attainment"] - getattr(two, side)["attainment"]
            if real > tolerance and simulated < -tolerance:
                return False
    return True


def show(points: Sequence[Compared]) -> None:
    """Print the table to stdout."""
    table = Table(title="engine / simulated on the profile / with the rounds' times", title_justify="left")
    for header in ("rate", "policy", "TPOT met", "both met", "goodput, tokens/s", "points off", "goodput off"):
        table.add_column(header, justify="right")
    for point in points:
        sides = (point.real, point.simulated, point.as_served)
        off = [[point.difference(name, side) for side in SIMULATED] for name in ("attainment", "goodput_tps")]
        table.add_row(
            f"{point.rate_rps:g}", point.policy,
            *(" / ".join(f"{side[name]:.1%}" for side in sides) for name in COMPARED[:2]),
            " / ".join(f"{side['goodput_tps']:.0f}" for side in sides),
            " / ".join(f"{100 * each:+.1f}" for each in off[0]), " / ".join(f"{each:+.1%}" for each in off[1]),
        )  # fmt: skip
    table_console(table).print(table)


def policy_validation(
    traces: Annotated[Path, typer.Option(help="folder of AdaServe's traces")],
    out: Annotated[Path, typer.Option(help="folder for the profile, rows and validation.json")],
    trace: Annotated[str, typer.Option(help="trace whose first requests are taken")] = "rate_rps3.6_ol256",
    requests: Annotated[int, typer.Option(help="how many")] = 120,
    new_tokens: Annotated[int, typer.Option(help="most output tokens of each")] = 48,
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "3,4.5,6",
    repeats: Annotated[int, typer.Option(help="rounds of the real engine")] = 2,
    params: Annotated[str, typer.Option(help="size to grow the target to")] = "110M",
    temperature: Annotated[float, typer.Option(help="of all requests")] = 0.0,
    simulate_only: Annotated[bool, typer.Option(help="do not run the engine: to choose rates")] = False,
) -> None:
    """Run both and compare."""
    make_folder(out)
    target = str(grown_target(params))
    config = EngineConfig(target=target, max_context=1024, prefix_cache=False, draft_sources="model")  # as simulated
    path, name = out / "profile.json", f"grown-{params}"
    if not path.exists() or read_profile(path).name != name:
        write_profile(path, measure_profile(config, name=name, check_s=CHECK_S))
    machine = ProfiledMachine.of(read_profile(path), str(path))
    chosen_rates = [float(rate) for rate in rates.split(",")]
    chosen = out / "chosen.json"
    settings = {
        "trace": trace, "requests": requests, "new_tokens": new_tokens, "rates": chosen_rates, "params": params
    }  # fmt: skip
    known = json.loads(chosen.read_text()) if chosen.exists() else {}
    if known.get("settings") != settings:
        known = {"settings": settings, "baseline_s": machine.baseline_s, "chain": None}
    asked = asked_requests(
        traces, trace, count=requests, new_tokens=new_tokens, baseline_s=known["baseline_s"], temperature=temperature
    )
    chain = known["chain"] or f"spec:{best_chain(machine, as_trace(asked), chosen_rates)}"
    chosen.write_text(json.dumps(known | {"chain": chain}) + "\n")
    policies = ("ar", chain, "adaserve-paper", "adaserve")
    if simulate_only:
        for rate in chosen_rates:
            for policy in policies:
                print(rate, policy, _simulated(policy, machine, as_trace(asked), rate, None, seeds=1))
        return
    engine = open_bench_engine(replace(config, profile=str(path)), record=True)
    try:
        info = engine.client.info
        asked = [each.measured(engine.encode(each.item)) for each in asked]
        key = settings_hash({"params": params, "requests": repr(asked)})
        real = measure_real(engine, asked, policies, chosen_rates, repeats, out, key)
    finally:
        engine.client.close()
    emitted = _output_tokens(run_folder(out, 0, chosen_rates[0], "ar") / "requests.jsonl", len(asked))
    trace_asked = as_trace([replace(each, output_tokens=n) for each, n in zip(asked, emitted, strict=True)])
    acceptance = fit_acceptance(read_records(out, chosen_rates, repeats, policies[1:]))

    def compared(policy: str, rate: float) -> Compared:
        rounds = real[policy, rate]
        factors = [each.served for each in rounds]
        measures = [each.measures for each in rounds]
        simulated, *as_served = (
            _simulated(policy, each, trace_asked, rate, acceptance, seeds=SIMULATIONS)
            for each in (machine, *(replace(machine, serving=found) for found in factors))
        )
        return Compared(policy, rate, _mean(measures), simulated, _mean(as_served), factors, measures)

    points = [compared(policy, rate) for rate in chosen_rates for policy in policies]
    show(points)
    by_rate = {rate: [point for point in points if point.rate_rps == rate] for rate in chosen_rates}
    result = {
        "commit": source_commit(),
        "device": info.device,
        "jax_version": info.jax_version,
        "target": f"grown-{params}",
        "trace": trace,
        "requests": requests,
        "prompt_parts": PROMPT_PARTS,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "simulated_seeds": SIMULATIONS,
        "baseline_s": known["baseline_s"],
        "acceptance": asdict(acceptance),
        "prediction_errors": json.loads(path.read_text())["errors"],
        "serving": json.loads(path.read_text())["serving"],
        "points": [POINT.dump_python(point) for point in points],
        "orders": {
            f"{rate:g}": {
                side: {"order": order(at, side), "same": side == "real" or same_order(at, side)}
                for side in ("real", *SIMULATED)
            }
            for rate, at in by_rate.items()
        },
        "largest_off": {
            side: {name: max(abs(point.difference(name, side)) for point in points) for name in COMPARED}
            for side in SIMULATED
        },
    }
    (out / "validation.json").write_text(json.dumps(result, indent=1) + "\n")
    for name in ("orders", "largest_off"):
        print(name, json.dumps(result[name], indent=1))


def _output_tokens(path: Path, count: int) -> list[int]:
    """Return the output tokens of every request, in order; texts, and so lengths, are the same under every policy."""
    by_number = {int(each.request_id.rpartition("-")[2]): each.output_tokens for each in read_rows(path, RequestRecord)}
    return [max(by_number[number], 1) for number in range(count)]


if __name__ == "__main__":
    program.run(policy_validation)
