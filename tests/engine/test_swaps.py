"""The engine's loop lets the draft and KV pages change places, and an idle engine leaves the draft resident."""

from __future__ import annotations

import pytest

from adaserve_jax.bench.sim_executor import SimExecutor, SwapTimes, VirtualClock
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.errors import SwapError
from adaserve_jax.memory.residency import SwapRule
from adaserve_jax.scheduler.scheduler import build_scheduler
from adaserve_jax.types import SLO, SamplingParams
from tests.engine.simulated import EOS, VOCAB, Spelling, costs_of, expected, limits_of


class Machine(SimExecutor):
    refuses = False

    def contract(self) -> None:
        if self.refuses:
            raise SwapError("the slab is still in use")
        super().contract()


@pytest.fixture
def core() -> EngineCore:
    """Of 12 pages and 12 more, for requests that take 12 each; its draft is hardly ever right."""
    limits, clock = limits_of(num_pages=12, extension_pages=12), VirtualClock()
    executor = Machine(limits, costs_of(limits), 0.02, clock, vocab_size=VOCAB, swap_times=SwapTimes(0.14, 0.01, 0.0))
    config = EngineConfig(policy="nightjar", elastic="on", seed=1)
    rule = SwapRule(persist_steps=3, min_stay_steps=1000)
    scheduler = build_scheduler(config, limits, costs_of(limits), swap_rule=rule)
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
    assert stats.swaps == {"expand": 1, "contract": 1}, "at the last end the draft is sent for; nobody asked since"
    assert 0 < max(used) <= 12 and used[-1] == 0
    assert not stats.draft_resident
    core.settle()
    assert core.scheduler.stats.draft_resident


def test_an_engine_that_cannot_settle_says_so(core: EngineCore) -> None:
    while core.scheduler.stats.draft_resident:
        core.step()
    for number in range(9):
        core.abort(f"q{number}")
    core.executor.refuses = True
    with pytest.raises(SwapError, match="could not be given up; try again later"):
        core.settle()
    core.executor.refuses = False
    core.settle()
    assert core.scheduler.stats.draft_resident
