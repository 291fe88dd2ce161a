"""Measures a profile: loads the models of a configuration, times every program at length, tries the predictions out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np

import adaserve_jax
from adaserve_jax.bench.local_client import encode_item
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.build import measure_baseline
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.profile import Profile, ServingFactors
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.loading import identify
from adaserve_jax.runtime.warmup import THOROUGH, measure, measure_switching
from adaserve_jax.scheduler.acceptance import acceptance_of_nodes
from adaserve_jax.scheduler.cost_model import CostTable, PredictionError, ServedTimes, TimesOfKind, errors_of
from adaserve_jax.scheduler.policies import policy_of
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.machines import CLASS, ProfiledMachine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from adaserve_jax.types import SLO, CostSamples, Limits, Progress, SamplingParams
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace
from adaserve_jax.workloads.workload import load_workload


@dataclass(frozen=True)
class ForRows:
    """The proposal for a number of decoding requests. knee: see `knee`. budget, depth, width: those with the most
    expected tokens per second, tokens_per_s; plain_tokens_per_s: without speculation."""

    rows: int
    knee: float
    budget: int
    depth: int
    width: int
    tokens_per_s: float
    plain_tokens_per_s: float


@dataclass(frozen=True)
class Proposal:
    """max_tree_tokens, max_depth, max_width: the largest that any number of requests wants."""

    by_rows: tuple[ForRows, ...]
    max_tree_tokens: int
    max_depth: int
    max_width: int


def propose(samples: CostSamples, limits: Limits, acceptance: float | None) -> Proposal:
    """Propose settings for every number of rows that was timed, at the typical context. acceptance: of the draft's
    first choice; None: nothing is drafted."""
    cost = CostTable(samples, limits)
    rows = [count for count in cost.grid.row_buckets if count <= limits.max_tree_tokens]
    found = tuple(_for_rows(cost, limits, count, acceptance) for count in rows)
    return Proposal(
        found,
        max_tree_tokens=max(each.budget for each in found),
        max_depth=max(each.depth for each in found),
        max_width=max(each.width for each in found),
    )


def knee(edges: Sequence[int], verify_s: np.ndarray) -> float:
    """Return the tokens at which a roofline bends: those that take, at the last edges' seconds per token, as long as
    the first edge. Below it tokens are nearly free. verify_s: f64[E]; the last edge where no token costs anything."""
    last = edges[-1]
    if len(edges) < 2 or verify_s[-1] <= verify_s[-2]:
        return float(last)
    per_token_s = (verify_s[-1] - verify_s[-2]) / (last - edges[-2])
    return float(min(verify_s[0] / per_token_s, last))


def _for_rows(cost: CostTable, limits: Limits, rows: int, acceptance: float | None) -> ForRows:
    edges, verify_s = np.array(limits.token_edges), cost.verify_s(rows)
    held = (edges >= rows) & (edges <= limits.max_tree_tokens)
    if not held.any():  # one edge that also holds prompts
        held = edges == edges[np.searchsorted(edges, rows)]
    budgets, seconds = np.minimum(edges[held], limits.max_tree_tokens), verify_s[held]
    plain = rows / seconds[0]
    best = ForRows(rows, knee(limits.token_edges, verify_s), int(budgets[0]), 0, 0, float(plain), float(plain))
    if acceptance is None or not limits.max_depth:
        return best
    chance = acceptance_of_nodes(acceptance, limits.max_depth, limits.max_width)
    level_s = cost.level_s(rows)
    for depth in range(1, limits.max_depth + 1):
        for width in (width for width in cost.draft_widths if width <= limits.max_width):
            nodes = np.sort(chance[:depth, :width].ravel())[::-1]
            reached = np.concatenate([[0.0], np.cumsum(nodes)])
            emitted = rows * (1 + np.interp(budgets / rows - 1, np.arange(len(reached)), reached))
            draft_s = depth * level_s[width - 1] + cost.catchup_s(2 * rows)
            rate = emitted / (seconds + draft_s)
            at = int(np.argmax(rate))
            if rate[at] > best.tokens_per_s:
                best = replace(best, budget=int(budgets[at]), depth=depth, width=width, tokens_per_s=float(rate[at]))
    return best


PRIOR_STEPS = 8
"""Steps that the mean of all kinds counts for in the times of one kind while serving."""
RELATIVE_TARGETS = (None, 1.5, 3.0, 8.0)
"""TPOT targets of the trial's requests, over the baseline; one in four has none."""
LEAST_PROMPT, MOST_NEW_TOKENS = 16, 96


@dataclass(frozen=True)
class Trial:
    """errors: of the predictions, by kind; None: nothing was tried. acceptance: chance that the target takes the
    draft's first choice, such that chains are accepted as often as they were; None: without a draft. serving: what
    steps took beside their samples."""

    errors: dict[str, PredictionError] | None
    acceptance: float | None
    serving: ServingFactors | None = None


def run_trial(
    executor: ModelExecutor, samples: CostSamples, baseline_s: float, seconds: float, *, seed: int = 0,
    progress: Progress | None = None,
) -> Trial:  # fmt: skip
    """Serve for so many seconds: in equal parts by the configured policy, by chains and without speculation, each with
    few, some and as many requests open as can run. Every part starts from `samples` and learns anew."""
    config = executor.resolved.config
    depth = executor.limits.max_depth
    chains = f"spec:{depth}"
    policies = list(dict.fromkeys([config.policy, chains, "ar"] if depth else [config.policy, "ar"]))
    most = config.max_requests
    levels = sorted({1, -(-most // 4), most})
    tokenizer = Tokenizer.from_folder(executor.target_folder)
    requests = _requests(tokenizer, config, seconds, seed)
    predicted, acceptance, served = [], None, ServedTimes()
    for done, policy in enumerate(policies, 1):
        as_tried = replace(config, policy=policy, infeasible_slo="best_effort", prefix_cache=False)
        scheduler = Scheduler(as_tried, executor.limits, samples)
        core = EngineCore(executor, scheduler, tokenizer, eos_ids=(), baseline_s=baseline_s, seed=seed)
        ended = [m for level in levels for m in _serve(core, requests, level, seconds / len(policies) / len(levels))]
        core.bring_back_draft()  # the next part's scheduler expects the draft where it was
        predicted.append(scheduler.costs.predictions())
        served.add(scheduler.costs.served)
        if policy == chains:
            acceptance = acceptance_of_chains(ended, depth)
        if progress is not None:
            progress("serving", done, len(policies))
    return Trial(errors_of(np.concatenate(predicted)), acceptance, serving_factors(served))


def serving_factors(served: ServedTimes) -> ServingFactors | None:
    """Return what serving adds to the samples, by kind of step; None before anything was served.

    A kind counts as if PRIOR_STEPS more of its steps had been as all steps are.
    """
    if not served.verify:
        return None

    def total(kinds: Iterable[TimesOfKind]) -> TimesOfKind:
        summed = TimesOfKind()
        for each in kinds:
            summed.add(each)
        return summed

    def blend(times: TimesOfKind, own: float, overall: float) -> float:
        return (times.steps * own + PRIOR_STEPS * overall) / (times.steps + PRIOR_STEPS)

    verified, outside = total(served.verify.values()), total(served.overhead.values())
    verify, overhead_s = verified.seconds / verified.sampled_s, outside.seconds / outside.steps
    return ServingFactors(
        verify=verify,
        draft=served.draft.seconds / served.draft.sampled_s if served.draft.sampled_s else 1.0,
        overhead_s=overhead_s,
        verify_by_size={
            size: blend(times, times.seconds / times.sampled_s, verify) for size, times in served.verify.items()
        },
        overhead_by_kind_s={
            (int(drafts), rows): blend(times, times.seconds / times.steps, overhead_s)
            for (drafts, rows), times in served.overhead.items()
        },
    )


def acceptance_of_chains(ended: list[RequestMetrics], depth: int) -> float | None:
    """Return the chance of each level that gives the mean accepted tokens per verification, from 0.001 to 0.999."""
    verifications = sum(metrics.verify_steps for metrics in ended)
    if not verifications:
        return None
    chance = chance_of_chains(sum(metrics.accepted_tokens for metrics in ended) / verifications, depth)
    return min(max(chance, 0.001), 0.999)


def chance_of_chains(accepted: float, depth: int) -> float:
    """Return the chance a for which a + a^2 + ... + a^depth is the mean accepted tokens of a chain, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**level for level in range(1, depth + 1)) < accepted else (low, middle)
    return low


def _serve(
    core: EngineCore, requests: Iterator[GenerateRequest], most_open: int, seconds: float
) -> list[RequestMetrics]:
    """Keep so many requests open for a while, then end what is left. Returns the metrics of all."""
    ended: list[RequestMetrics] = []
    names: set[str] = set()
    until = core.clock() + seconds
    while core.clock() < until:
        while core.num_open < most_open:
            request = next(requests)
            core.add(request, core.clock())
            names.add(request.request_id)
        for chunk in core.step():
            if chunk.metrics is not None:
                ended.append(chunk.metrics)
                names.discard(chunk.request_id)
    for name in names:
        ended += [chunk.metrics for chunk in core.abort(name) if chunk.metrics is not None]
    return ended


def _requests(tokenizer: Tokenizer, config: EngineConfig, ttft_s: float, seed: int) -> Iterator[GenerateRequest]:
    """Yield requests without end: prompts of the packaged workload, joined to lengths drawn evenly in their
    logarithm. ttft_s: target of every first token; without one they would wait where the others' pace is tight."""
    rng = np.random.default_rng(seed)
    items = [encode_item(tokenizer, item) for item in load_workload(None).items]
    room = min(config.max_context, config.num_pages * config.page_size)
    longest = max(LEAST_PROMPT, room - MOST_NEW_TOKENS - 1)
    number = 0
    while True:
        length = int(math.exp(rng.uniform(math.log(LEAST_PROMPT), math.log(longest))))
        ids: list[int] = []
        while len(ids) < length:
            ids += items[rng.integers(len(items))]
        most = max(1, min(MOST_NEW_TOKENS, room - length - 1))
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, most + 1)), temperature=float(rng.choice([0.0, 1.0])), seed=number,
            ignore_eos=True,
        )  # fmt: skip
        slo = SLO(relative=RELATIVE_TARGETS[rng.integers(len(RELATIVE_TARGETS))], ttft_ms=1e3 * ttft_s)
        yield GenerateRequest(f"trial-{number}", ids[:length], sampling, slo)
        number += 1


C1, C2 = (0, 2, 4, 8, 16), (-1, 0, 1, 2)
POLICY = "adaserve-paper"
LOADS = (0.6, 0.9)
"""Rates of the generated workloads, as shares of the most requests per second that the machine is expected to emit."""
REQUESTS, MOST_TOKENS, TARGETS = 32, 64, (1.5, 3.0, 6.0)
"""The generated workloads: requests, most output tokens, and TPOT targets over the baseline, in turn."""


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
    """Return the pair with the best mean attainment; among equals the one with the most goodput, then the first."""
    found: list[Found] = []
    pairs = list(itertools.product(c1, c2))
    for pair in pairs:
        offset = replace(machine, searched_offsets=pair)
        runs = [simulate(POLICY, SimulationPlan((POLICY,)), offset, trace) for trace in traces]
        overall = [summarize(run.records, wall_s=run.wall_s)[0] for run in runs]
        attained, goodput = ([each.attainment or 0.0 for each in overall], [each.goodput_tps for each in overall])
        found.append(Found(*pair, float(np.mean(attained)), float(np.mean(goodput))))
        if progress is not None:
            progress("searching c1, c2", len(found), len(pairs))
    return max(found, key=lambda each: (each.attainment, each.goodput_tps))


def generated_traces(machine: ProfiledMachine, tokens_per_s: float) -> list[Trace]:
    """Return a trace per load of LOADS: Poisson arrivals, lengths even in their logarithm. tokens_per_s: what the
    machine is expected to emit at most."""
    rng = np.random.default_rng(0)
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


def measure_profile(
    config: EngineConfig, *, name: str = "", check_s: float = 0.0, acceptance: float | None = None,
    progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """Measure the profile of this machine with the models of `config`. name: "" for the target's. check_s: seconds of a
    mixed load that predictions are compared with; 0: none. acceptance: of the draft's first choice; None: measure it on
    the mixed load. Raises CheckpointError, ConfigError."""
    policy_of(config)  # an unknown one is refused before anything is measured
    executor = load_executor(replace(config, profile=None))
    try:
        executor.compile(progress)
        timings = measure(executor, THOROUGH, progress)
        timings.switching.update(measure_switching(executor, THOROUGH.passes, progress))
        samples, used = timings.samples(), executor.resolved.config
        tokenizer = Tokenizer.from_folder(executor.target_folder)
        baseline_s = measure_baseline(executor, used, samples, tokenizer)
        trial = Trial(None, None)
        if check_s > 0:
            trial = run_trial(executor, samples, baseline_s, check_s, seed=used.seed, progress=progress)
        acceptance = trial.acceptance if acceptance is None else acceptance
        draft_folder = None if used.draft is None else resolve_folder(used.draft, "draft", used.target)
        return Profile(
            name=name or Path(used.target).name,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=source_commit(),
            package_version=adaserve_jax.__version__,
            jax_version=jax.__version__,
            identity=identify(executor.resolved, executor.target_folder, draft_folder),
            timings=timings,
            baseline_s=baseline_s,
            acceptance=acceptance,
            errors=None if trial.errors is None else {kind: asdict(each) for kind, each in trial.errors.items()},
            proposal=asdict(propose(samples, executor.limits, acceptance)),
            serving=trial.serving,
        )
    finally:
        executor.close()


def with_offsets(profile: Profile, where: Path, traces: list[Trace], progress: Progress | None = None) -> Profile:
    """Return the profile with the c1 and c2 of AdaServe's eq. 8 and 9 that serve the traces best, by grid search over
    simulations of `adaserve-paper`. No traces: generate workloads for it."""
    machine = ProfiledMachine.of(profile, str(where))
    assert profile.proposal is not None
    best = max(each["tokens_per_s"] for each in profile.proposal["by_rows"])
    found = search_offsets(machine, traces or generated_traces(machine, best), progress)
    return replace(profile, c1=found.c1, c2=found.c2)
