"""A short mixed load on a warmed-up executor, in the caller's thread: how well its steps are predicted, and how often
the target agrees with the draft."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from adaserve_jax.bench.local import encode_item
from adaserve_jax.bench.workload import load_workload
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.scheduler.prediction import PredictionError, Served, ServingFactors, errors_of
from adaserve_jax.scheduler.scheduler import build_scheduler
from adaserve_jax.types import SLO, CostSamples, Progress, RequestMetrics, SamplingParams

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
    requests = _requests(tokenizer, config, seed)
    predicted, acceptance, served = [], None, Served()
    for done, policy in enumerate(policies, 1):
        as_tried = replace(config, policy=policy, infeasible_slo="best_effort", prefix_cache=False)
        scheduler = build_scheduler(as_tried, executor.limits, samples)
        core = EngineCore(executor, scheduler, tokenizer, eos_ids=(), baseline_s=baseline_s, seed=seed)
        ended = [m for level in levels for m in _serve(core, requests, level, seconds / len(policies) / len(levels))]
        core.settle()  # the next part's scheduler expects the draft where it was
        predicted.append(scheduler.predictions.seconds())
        served += scheduler.served
        if policy == chains:
            acceptance = acceptance_of_chains(ended, depth)
        if progress is not None:
            progress("serving", done, len(policies))
    return Trial(errors_of(np.concatenate(predicted)), acceptance, served.factors())


def acceptance_of_chains(ended: list[RequestMetrics], depth: int) -> float | None:
    """a with a + a^2 + ... + a^depth accepted tokens per verification, as there were on average, by bisection."""
    verifications = sum(metrics.verify_steps for metrics in ended)
    if not verifications:
        return None
    mean = sum(metrics.accepted_tokens for metrics in ended) / verifications
    low, high = 0.001, 0.999
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**level for level in range(1, depth + 1)) < mean else (low, middle)
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


def _requests(tokenizer: Tokenizer, config: EngineConfig, seed: int) -> Iterator[GenerateRequest]:
    """Endless: prompts of the packaged workload, joined to lengths drawn evenly in their logarithm."""
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
        slo = SLO(relative=RELATIVE_TARGETS[rng.integers(len(RELATIVE_TARGETS))])
        yield GenerateRequest(f"trial-{number}", ids[:length], sampling, slo)
        number += 1
