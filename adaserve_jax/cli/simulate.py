"""`adaserve simulate`: runs policies over traces on simulated machines; writes the rows of `adaserve bench`."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.bench.resume import check_folder
from adaserve_jax.bench.simulate import Varied, simulate_all
from adaserve_jax.cli.options import (
    LIST_METAVAR,
    ByClassOption,
    FormatOption,
    LengthsOption,
    SlosOption,
    comma_list,
    numbers_above_0,
)
from adaserve_jax.cli.terminal import point_line, print_rows, say, say_next_step
from adaserve_jax.config import Elastic, EngineConfig, drafts_from_text
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.residency import T_PERSIST, TAU_LOW, ElasticRule
from adaserve_jax.results.jsonl import append_rows, make_folder
from adaserve_jax.results.run_folder import REQUESTS, RESULTS, SAMPLES
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.routing.routers import ROUTERS, find_router
from adaserve_jax.scheduler.policies import expand_groups, find_policy, named_sources
from adaserve_jax.settings import options_of
from adaserve_jax.sim.acceptance import load_acceptance
from adaserve_jax.sim.machines import load_machine, packaged_machines
from adaserve_jax.sim.simulation import Simulated, SimulationPlan
from adaserve_jax.synthetic_acceptance import acceptance_rates
from adaserve_jax.workloads.mixing import parse_lengths, with_lengths
from adaserve_jax.workloads.readers import AUTO
from adaserve_jax.workloads.reshaping import Reshaping, reshape
from adaserve_jax.workloads.traces import RATE_RPS, Trace, adjusted, fluctuating_trace, save_trace, trace_of
from adaserve_jax.workloads.workload import load_workload, parse_slos

DEFAULT_TTFT_S = 4.0
RATE_TOLERANCE = 0.02
"""Share by which the mean rate of a generated trace may be off what was asked for without a word."""


def simulate(
    policies: Annotated[
        str,
        typer.Option(
            help="policies to compare, separated by commas, files (FILE.py) among them; ladder, orders or halves: all "
            "ablations of that name",
            metavar=LIST_METAVAR,
        ),
    ],
    out: Annotated[Path, typer.Option(help="folder for rows, requests and samples")],
    traces: Annotated[
        list[Path] | None, typer.Argument(help="files of requests with their lengths, plain or .gz")
    ] = None,
    fluctuating: Annotated[
        bool,
        typer.Option(
            help="instead of the traces, one of 6 minutes in which chat, code and summarization peak in turn, drawn by "
            "--seed; lengths and targets are drawn from the first of TRACES, where one is given"
        ),
    ] = False,
    format: FormatOption = AUTO,
    slos: SlosOption = None,
    lengths: LengthsOption = None,
    machine: Annotated[
        str, typer.Option(help=f"machine to simulate: {', '.join(packaged_machines())}, or a JSON file, a profile too")
    ] = "llama-70b",
    replicas: Annotated[
        str, typer.Option(help="numbers of replicas to compare, separated by commas", metavar=LIST_METAVAR)
    ] = "1",
    router: Annotated[
        str,
        typer.Option(
            help=f"what assigns requests to replicas: {', '.join(ROUTERS)}, or slo-aware:<d>, which looks at d "
            "replicas drawn for each request: for hundreds"
        ),
    ] = "slo-aware",
    rates: Annotated[
        str,
        typer.Option(
            help="mean requests per second, separated by commas, to compare; trace: as the trace has it",
            metavar=LIST_METAVAR,
        ),
    ] = "trace",
    mix: Annotated[
        list[str] | None,
        typer.Option(help="shares of the classes, such as code=0.6,chat=0.4, drawn anew; repeat to compare several"),
    ] = None,
    slo_scale: Annotated[
        str,
        typer.Option(
            help="TPOT targets, in baseline latencies, of the relative class, to compare; trace: as it is",
            metavar=LIST_METAVAR,
        ),
    ] = "trace",
    requests: Annotated[int, typer.Option(help="requests of each trace, repeated as needed; 0: as it has")] = 0,
    acceptance: Annotated[
        Path | None, typer.Option(help="acceptance.jsonl of `adaserve bench --record`, instead of the machine's")
    ] = None,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            help="instead of the machine's acceptance: LENGTH, the mean number of draft tokens that a verification "
            "accepts, or a JSON list of the chances that the token at depth 1, 2, ... is accepted given the one above"
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(help="also find, for each point, the best fixed chain or none, prefill chunk and most requests"),
    ] = False,
    exhaustive: Annotated[bool, typer.Option(help="with --tune: try every setting instead of searching")] = False,
    ttft_slo: Annotated[
        float | None,
        typer.Option(
            help="TTFT target of every request in place of its own, seconds; 0: its own or none; left out: "
            f"{DEFAULT_TTFT_S:g} where it has none"
        ),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="what the times of the traces are multiplied by")] = 1.0,
    max_requests: Annotated[int, typer.Option(help="most requests that run at once; 0: the machine's own")] = 0,
    max_prefill_tokens: Annotated[
        int, typer.Option(help="most prompt tokens that one step computes; 0: what the policy finds room for")
    ] = 0,
    num_pages: Annotated[
        int,
        typer.Option(
            help="KV pages of a replica; 0: the machine's own, or without any so many that they never run out"
        ),
    ] = 0,
    extension_pages: Annotated[
        int, typer.Option(help="KV pages that the draft's memory makes while it is away; 0: the draft stays")
    ] = 0,
    elastic: Annotated[Elastic, typer.Option(help=options_of(EngineConfig)["elastic"].help)] = "auto",
    tau_low: Annotated[
        float, typer.Option(help="share of the pages that must be spare, else the draft's memory may become pages")
    ] = TAU_LOW,
    swap_after: Annotated[
        int,
        typer.Option(help="steps of short pages before it does, of no speculation too where the policy says so"),
    ] = T_PERSIST,
    drain: Annotated[float, typer.Option(help="most seconds to serve requests after the last arrival")] = 600.0,
    seed: Annotated[int, typer.Option(help="seeds what the draft gets right, and what is drawn of traces")] = 0,
    token_times: Annotated[
        bool, typer.Option(help="keep the times of tokens; without: no gaps and no fluidity, for very long traces")
    ] = True,
    records: Annotated[
        bool,
        typer.Option(
            help="keep what happened to each request (requests.jsonl); without: rows and samples alone, no times of "
            "tokens, and 200 bytes a request, for a million of them"
        ),
    ] = True,
    by_class: ByClassOption = False,
    save_traces: Annotated[bool, typer.Option(help="also write the traces as simulated to the folder")] = False,
    append: Annotated[bool, typer.Option(help="add the rows to what --out holds")] = False,
) -> None:
    """Compare policies on traces, with the scheduler that serves, on one replica or several. Columns: docs/metrics.md.

    Every policy runs on every trace with every rate, mix, SLO scale and number of replicas.
    """
    names = expand_groups(comma_list("policies", policies, str))
    simulated = load_machine(machine)
    counts = (max_requests, max_prefill_tokens, requests, num_pages, extension_pages)
    ttft_slo_s = DEFAULT_TTFT_S if ttft_slo is None else ttft_slo
    finite = all(math.isfinite(value) for value in (ttft_slo_s, time_scale, drain))
    if not finite or min(ttft_slo_s, seed, *counts) < 0 or min(time_scale, drain) <= 0:
        raise ConfigError(
            "--ttft-slo, --seed, --max-requests, --max-prefill-tokens, --num-pages, --extension-pages and --requests "
            "must not be below 0, --time-scale and --drain must be above"
        )
    if max_requests > (most := simulated.limits(max_requests).max_requests):
        raise ConfigError(
            f"--max-requests must be at most {most}, as many as were measured on {machine}; got {max_requests}"
        )
    if fluctuating:
        given = {"--lengths": lengths, "--slos": slos, "--format": None if format == AUTO else format}
        unused = ["--time-scale"] if time_scale != 1 else []
        unused += [name for name, value in given.items() if value is not None and not traces]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)}: a generated trace has its own times, and without a trace its own lengths and "
                "targets; leave the option out, or simulate a trace"
            )
    if exhaustive and not tune:
        raise ConfigError("--exhaustive says how --tune looks for a setting; give --tune too")
    if acceptance is not None and synthetic_acceptance is not None:
        raise ConfigError("--acceptance and --synthetic-acceptance both say what is accepted; give one of them")
    for name in names:
        find_policy(name, simulated.max_depth)
        if drafts_from_text(named_sources(name)):
            raise ConfigError(
                f"policy {name}: simulated requests have no text, so that nothing can be drafted from it; compare it "
                "with adaserve bench"
            )
    find_router(router)
    reshapings = [
        Reshaping(rate, shares, scale, requests)
        for rate in numbers_above_0("rates", rates, or_trace=True)
        for shares in ([parse_mix(text) for text in mix] if mix else [None])
        for scale in numbers_above_0("slo_scale", slo_scale, or_trace=True)
    ]
    plan = SimulationPlan(
        names, seed, max_requests, max_prefill_tokens, drain, comma_list("replicas", replicas, parse_replicas), router,
        None if acceptance is None else load_acceptance(acceptance), token_times,
        "no" if not tune else "grid" if exhaustive else "search", num_pages, extension_pages,
        elastic, ElasticRule(tau_low, swap_after), records,
        synthetic=None if synthetic_acceptance is None else acceptance_rates(synthetic_acceptance, simulated.max_depth),
    )  # fmt: skip
    if len(set(plan.replicas)) < len(plan.replicas):
        raise ConfigError(f"--replicas must be different numbers, got {replicas!r}")
    if not (names and reshapings and plan.replicas):
        raise ConfigError("--rates, --slo-scale, --replicas and --policies must not be empty")
    keeps_own = ttft_slo is None
    loaded = [_load(path, format, slos, lengths, ttft_slo_s or None, keeps_own, time_scale) for path in traces or []]
    asked = reshapings if fluctuating else [reshaping for _ in loaded for reshaping in reshapings]
    if fluctuating:
        pairs = _fluctuating(loaded, reshapings, seed, ttft_slo_s or None, plan.limits(simulated).max_context)
        for trace, _ in pairs:
            for note in trace.notes:
                say(f"{trace.name}: {note}")
    elif loaded:
        pairs = [(trace, reshaping) for trace in loaded for reshaping in reshapings]
    else:
        raise ConfigError("nothing to simulate: give trace files, or --fluctuating for a generated trace")
    reshaped = [reshape(trace, reshaping, seed) for trace, reshaping in pairs]
    varied = [Varied.of(trace, reshaping, simulated.baseline_s) for trace, reshaping in pairs]
    check_folder(out, "append" if append else "new")
    make_folder(out)
    if save_traces:
        for number, trace in enumerate(reshaped):
            save_trace(trace, out / f"trace-{number:02d}-{trace.sha256[:8]}.jsonl.gz")
    for (whole, _), trace, reshaping in zip(pairs, reshaped, asked, strict=True):
        if reshaping.rate_rps is not None and abs(trace.rate_rps / reshaping.rate_rps - 1) > RATE_TOLERANCE:
            is_cut = len(trace.requests) < len(whole.requests)
            why = (
                f", because --requests keeps the first {trace.duration_s:.0f} s alone; leave it out for the whole trace"
            )
            say(f"{trace.name}: {reshaping.rate_rps:g} requests/s were asked for; the requests that are simulated come "
                f"at {trace.rate_rps:.4g}/s on average{why if is_cut else ''}")  # fmt: skip
    total = (len(names) + tune) * len(reshaped) * len(plan.replicas)
    done = count(1)

    def on_point(point: Simulated, rows: list[ResultRow]) -> None:
        append_rows(out / REQUESTS, point.records)
        append_rows(out / SAMPLES, point.samples)
        append_rows(out / RESULTS, rows)
        say(point_line(next(done), total, rows))

    print_rows(simulate_all(plan, simulated, reshaped, on_point, varied), by_class=by_class)
    say_next_step(out)


def _load(
    path: Path, format: str, slos: str | None, lengths: str | None, ttft_slo_s: float | None, keeps_own: bool,
    time_scale: float,
) -> Trace:  # fmt: skip
    workload = load_workload(path, format=format, slos=None if slos is None else parse_slos(slos), texts=False)
    if lengths is not None:
        workload = with_lengths(workload, parse_lengths(lengths))
    trace = adjusted(trace_of(workload), ttft_slo_s=ttft_slo_s, keeps_own=keeps_own, time_scale=time_scale)
    for note in trace.notes:
        say(f"{trace.name}: {note}")
    return trace


def _fluctuating(
    loaded: list[Trace], reshapings: list[Reshaping], seed: int, ttft_slo_s: float | None, max_context: int
) -> list[tuple[Trace, Reshaping]]:
    """Return generated traces that fit a machine's context, each with the changes left to make.

    A rate is the generated trace's own mean, so that its peaks stay where they are.
    """
    like = loaded[0] if loaded else None
    return [
        (
            fluctuating_trace(
                seed=seed,
                rate_rps=reshaping.rate_rps or RATE_RPS,
                like=like,
                ttft_slo_s=ttft_slo_s,
                max_context=max_context,
            ),
            Reshaping(None, reshaping.mix, reshaping.slo_scale, reshaping.requests),
        )
        for reshaping in reshapings
    ]


def parse_mix(text: str) -> dict[str, float]:
    """Return shares by class from "code=0.6,chat=0.4"."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = (piece.strip() for piece in part.partition("="))
        if name in shares:
            raise ConfigError(f"--mix gives class {name!r} twice, got {text!r}; give each once")
        try:
            shares[name] = float(share)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--mix must be classes and shares such as code=0.6,chat=0.4, got {text!r}")
    return shares


def parse_replicas(text: str) -> int:
    """Return a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise ConfigError(f"--replicas must be whole numbers above 0, separated by commas, got {text!r}")
    return int(text)
