"""The engine's loop lets the draft and KV pages change places, and an idle engine leaves the draft resident."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats, GenerateRequest, OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ElasticError
from adaserve_jax.memory.residency import ElasticRule
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import ElasticTimes, VirtualClock
from adaserve_jax.types import SLO, SamplingParams
from tests.engine.simulated import EOS, VOCAB, Spelling, costs_of, expected, limits_of
from tests.sim_kv import StrictExecutor


class Machine(StrictExecutor):
    refuses = False

    def contract(self) -> None:
        if self.refuses:
            raise ElasticError("the slab is still in use")
        super().contract()


@pytest.fixture
def core() -> EngineCore:
    """Of 12 pages and 12 more, for requests that take 12 each; its draft is hardly ever right."""
    limits, clock = limits_of(num_pages=12, extension_pages=12), VirtualClock()
    executor = Machine(
        limits, costs_of(limits), 0.02, clock, vocab_size=VOCAB, elastic_times=ElasticTimes(0.14, 0.01, 0.0)
    )
    config = EngineConfig(policy="nightjar", elastic="on", seed=1)
    rule = ElasticRule(persist_steps=3, min_stay_steps=1000)
    scheduler = Scheduler(config, limits, costs_of(limits), elastic_rule=rule)
    core = EngineCore(executor, scheduler, Spelling(), eos_ids=(EOS,), baseline_s=0.01, clock=clock.now)
    for number in range(9):
        sampling = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
        core.add(GenerateRequest(f"q{number}", [2, 3, 4, 5, number], sampling, SLO()), 0.0)
    return core


def test_steps_swap_while_requests_run_and_texts_stay_what_they_are(core: EngineCore) -> None:
    tokens: dict[str, list[int]] = {}
    used = []
    while core.has_work:
        for chunk in core.step():
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        used.append(core.scheduler.stats.extension_used)
    for number in range(9):
        sampling = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
        request = GenerateRequest(f"q{number}", [2, 3, 4, 5, number], sampling, SLO())
        assert tokens[f"q{number}"] == expected(request, 0, number, 48).token_ids
    stats = core.scheduler.stats
    assert stats.elastic_moves == {"expand": 1, "contract": 1}, (
        "at the last end the draft is sent for; nobody asked since"
    )
    assert 0 < max(used) <= 12 and used[-1] == 0
    assert not stats.draft_resident
    core.bring_back_draft()
    assert core.scheduler.stats.draft_resident


def test_without_requests_the_draft_comes_back_a_part_in_each_call(core: EngineCore) -> None:
    """Also after they were all aborted, when no step follows that could find it due."""
    while core.scheduler.stats.draft_resident:
        assert core.has_work
        core.step()
    for number in range(9):
        core.abort(f"q{number}")
    assert not core.has_work and not core.is_idle
    states = []
    while not core.is_idle:
        core.work_while_idle()
        states.append(core.scheduler.elastic_memory.residency.state)
    assert list(dict.fromkeys(states)) == ["loading", "resident"]
    assert core.scheduler.stats.extension_total == 0


def test_an_engine_that_cannot_settle_says_so(core: EngineCore) -> None:
    while core.scheduler.stats.draft_resident:
        assert core.has_work
        core.step()
    for number in range(9):
        core.abort(f"q{number}")
    core.executor.refuses = True
    with pytest.raises(ElasticError, match="could not be given up; try again later"):
        core.bring_back_draft()
    core.executor.refuses = False
    core.bring_back_draft()
    assert core.scheduler.stats.draft_resident


OFF_WHILE_FULL = """
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.controllers.baselines import fill
from adaserve_jax.scheduler.policies import Policy


class OffWhileFull(Controller):
    def __init__(self, parts):
        self.limits = parts.limits

    def decide(self, load):
        return fill(self.limits, load, depth=3 if load.num_decode < 6 else 0, width=1)


off_while_full = Policy("chains while few requests run", OffWhileFull, selector="equal", elastic=True)
"""


@pytest.mark.slow
def test_a_real_engine_swaps_under_load_and_every_text_is_what_it_is_without(tmp_path: Path) -> None:
    (tmp_path / "off_while_full.py").write_text(OFF_WHILE_FULL)

    def texts(elastic: str) -> tuple[dict[str, list[int]], EngineStats, bool]:
        config = EngineConfig(
            policy=str(tmp_path / "off_while_full.py"), elastic=elastic, max_requests=8, max_context=256, page_size=16,
            num_pages=40, max_depth=3, max_width=1, max_batch_tokens=64, max_tree_tokens=32, deterministic=True,
        )  # fmt: skip
        engine, found, ended = LocalEngine(config), defaultdict(list), threading.Semaphore(0)

        def sink(chunk: OutputChunk) -> None:
            found[chunk.request_id].extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                ended.release()

        rng = np.random.default_rng(0)
        engine.start()
        try:
            for number in range(24):
                sampling = SamplingParams(max_tokens=int(rng.integers(20, 70)), seed=number, ignore_eos=True)
                prompt = rng.integers(5, 900, int(rng.integers(10, 80))).tolist()
                engine.submit(GenerateRequest(f"q{number}", prompt, sampling, SLO()), sink)
            for _ in range(24):
                assert ended.acquire(timeout=120)
            stats = engine.stats()
            engine.set_policy("ar")  # an idle engine that changes its policy has its draft
            return found, stats, engine.stats().scheduler.draft_resident
        finally:
            engine.close()

    plain, _, _ = texts("off")
    swapped, stats, resident = texts("on")
    assert swapped == plain
    assert stats.scheduler.elastic_moves["expand"] >= 1 and stats.compiles_after_ready == 0
    assert resident
