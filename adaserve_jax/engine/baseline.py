"""The baseline latency, which relative targets multiply: one request alone, without speculation. Imports no jax."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore, Spelling
from adaserve_jax.scheduler.scheduler import build_scheduler
from adaserve_jax.types import CostSamples, Executor, SamplingParams

BASELINE_TOKENS = 33


def measure_baseline(executor: Executor, config: EngineConfig, samples: CostSamples, tokenizer: Spelling) -> float:
    """Median seconds per token of one request through the whole step. config: without "auto"."""
    scheduler = build_scheduler(replace(config, policy="ar", prefix_cache=False), executor.limits, samples)
    core = EngineCore(executor, scheduler, tokenizer, eos_ids=(), baseline_s=1.0)
    room = min(config.max_context, config.num_pages * config.page_size) - 1
    sampling = SamplingParams(max_tokens=min(BASELINE_TOKENS, room), seed=0, ignore_eos=True)
    core.add(GenerateRequest("baseline", [0], sampling), core.clock())
    times = []
    while core.has_work:
        core.step()
        times.append(core.clock())
    return statistics.median(after - before for before, after in itertools.pairwise(times))
