"""What serving does to the device's memory: pools stay where they are, and nothing compiles."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from adaserve_jax import SLO, SamplingParams
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.runtime.absent_engine import copies_of
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.scheduler.scheduler import Scheduler
from tests.scheduler.harness import costs_of
from tests.slow import longer_when_slow


def models_of(executor: ModelExecutor) -> list[DeviceModel]:
    assert executor.local_drafter is not None
    return [executor.target, executor.local_drafter.model]


def test_no_program_of_the_engine_copies_a_pool(demo_engine: LocalEngine) -> None:
    executor = demo_engine.executor
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


@pytest.mark.parametrize("num_steps", longer_when_slow([120, 1000]))
def test_pools_stay_in_place_and_nothing_compiles_over_a_random_workload(
    demo_engine: LocalEngine, num_steps: int
) -> None:
    executor = demo_engine.executor
    scheduler = Scheduler(executor.resolved.config, executor.limits, costs_of(executor.limits))
    core = EngineCore(executor, scheduler, Tokenizer.from_folder(executor.target_folder), eos_ids=(), baseline_s=0.001)
    rng = np.random.default_rng(7)
    places = [pointers(model) for model in models_of(executor)]
    sent = steps = 0
    while steps < num_steps:
        most_open = (2, 24)[steps // 50 % 2]
        if core.num_open < most_open and rng.random() < 0.7:
            core.add(random_request(rng, f"r{sent}"), core.clock())
            sent += 1
        if sent and rng.random() < 0.01:
            core.abort(f"r{sent - 1}")
        if core.has_work:
            core.step()
            steps += 1
    assert executor.compiles_after_ready == 0
    assert [pointers(model) for model in models_of(executor)] == places
    assert scheduler.stats.accepted_tokens > 0


def pointers(model: DeviceModel) -> list[int]:
    jax.block_until_ready(model.pools)
    return [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(model.pools)]


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
