"""What serving does to the device's memory: pools stay where they are, and nothing compiles."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from adaserve_jax import SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.scheduler.scheduler import build_scheduler
from adaserve_jax.types import CostSamples
from tests.hlo import copies_of

STEPS = 500


@pytest.fixture(scope="module")
def ready() -> Iterator[tuple[ModelExecutor, CostSamples]]:
    """The embedded pair, with fewer pages than its requests can need."""
    config = EngineConfig(
        max_requests=4, max_context=128, page_size=16, num_pages=12, token_edges=(4, 32), row_edges=(1, 4),
        max_tree_tokens=16, max_depth=3, max_width=2,
    )  # fmt: skip
    executor = load_executor(config)
    yield executor, executor.warm_up()
    executor.close()


def models_of(executor: ModelExecutor) -> list[DeviceModel]:
    assert executor.local_drafter is not None
    return [executor.target, executor.local_drafter.model]


def test_no_program_of_the_engine_copies_a_pool(ready: tuple[ModelExecutor, CostSamples]) -> None:
    executor, _ = ready
    programs = executor.target.compiled
    assert {"search", "commit"} < {key[1] for key in programs}
    for key, program in programs.items():
        text = program.as_text()
        for model in models_of(executor):
            assert copies_of(text, model.pools.k.shape) == [], key
        if key[1] == "commit":
            # Both pools that come in are the pools that go out.
            model = models_of(executor)[0 if key[0] == "target" else 1]
            assert program.memory_analysis().alias_size_in_bytes == 2 * model.pools.k.nbytes
            assert re.search(r"input_output_alias=\{ \{0\}: \(0,.*\{1\}: \(1,", text)


def test_pools_stay_in_place_and_nothing_compiles_over_a_random_workload(
    ready: tuple[ModelExecutor, CostSamples],
) -> None:
    executor, samples = ready
    config = executor.resolved.config
    scheduler = build_scheduler(config, executor.limits, samples)
    core = EngineCore(executor, scheduler, Tokenizer.from_folder(executor.target_folder), eos_ids=(), baseline_s=0.001)
    rng = np.random.default_rng(7)
    places = [pointers(model) for model in models_of(executor)]
    sent = steps = 0
    while steps < STEPS:
        if core.num_open < 6 and rng.random() < 0.3:
            core.add(random_request(rng, f"r{sent}"), core.clock())
            sent += 1
        if sent and rng.random() < 0.01:
            core.abort(f"r{sent - 1}")
        if core.has_work:
            core.step()
            steps += 1
    assert executor.compiles_after_ready == 0
    assert [pointers(model) for model in models_of(executor)] == places
    stats = scheduler.stats
    assert stats.accepted_tokens > 0
    assert stats.preemptions > 0


def pointers(model: DeviceModel) -> list[int]:
    jax.block_until_ready(model.pools)
    return [pool.unsafe_buffer_pointer() for pool in model.pools]


def random_request(rng: np.random.Generator, name: str) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=int(rng.integers(1, 60)),
        temperature=float(rng.choice([0.0, 0.8])),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([0.7, 1.0])),
        seed=int(rng.integers(1000)),
    )
    slo = SLO(tpot_ms=float(rng.choice([0.5, 5.0]))) if rng.random() < 0.7 else SLO()
    prompt = rng.integers(1, 2000, rng.integers(1, 60)).tolist()
    return GenerateRequest(name, prompt, sampling, slo=slo)
