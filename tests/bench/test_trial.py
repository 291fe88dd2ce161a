"""The trial of a profile, on a simulated machine and its clock: who serves for how long, and what is found."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from adaserve_jax.bench import profile as trial
from adaserve_jax.bench.profile import LEAST_PROMPT, MOST_NEW_TOKENS, Trial, run_trial, serving_factors
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.scheduler.cost_model import ServedTimes
from adaserve_jax.types import Progress, StepPlan
from tests.engine.simulated import Machine, costs_of

SECONDS = 3.0
BASELINE_S = 0.0101


class Tried(Machine):
    """Notes every plan and when it was verified."""

    def __init__(self, policy: str = "adaserve", **limits: int):
        super().__init__(EngineConfig(policy=policy), **{"max_context": 256, "num_pages": 256, **limits})
        self.target_folder = resolve_folder("demo", "target")
        self.plans: list[tuple[float, StepPlan]] = []
        self.cores: list[EngineCore] = []

    def verify(self, plan: StepPlan, *others):
        self.plans.append((self._clock.now(), plan))
        return super().verify(plan, *others)

    def longest_prompt(self) -> int:
        ends = (plan.ctx_len[plan.num_decode :] + plan.prefill_counts for _, plan in self.plans)
        return max(int(end.max(initial=0)) for end in ends)

    def chains(self) -> list[bool]:
        """Of each step, whether it drafts chains of the largest depth."""
        longest = (self.limits.max_depth, 1)
        return [p.draft is not None and (p.draft.depth, p.draft.width) == longest for _, p in self.plans]


def tried(
    machine: Tried, monkeypatch: pytest.MonkeyPatch, progress: Progress | None = None, seed: int = 0,
    seconds: float = SECONDS,
) -> Trial:  # fmt: skip
    """Run a trial by the machine's clock, so that every run is the same."""

    def core(*arguments: Any, **named: Any) -> EngineCore:
        machine.cores.append(EngineCore(*arguments, clock=machine._clock.now, **named))
        return machine.cores[-1]

    monkeypatch.setattr(trial, "EngineCore", core)
    samples = costs_of(machine.limits)
    return run_trial(cast(ModelExecutor, machine), samples, BASELINE_S, seconds, seed=seed, progress=progress)


def test_a_machine_that_keeps_its_times_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Tried()
    found = tried(machine, monkeypatch)
    assert found.errors is not None and found.serving is not None
    assert {kind: error.steps for kind, error in found.errors.items() if kind != "draft"} == {
        "verify": len(machine.plans), "step": len(machine.plans),
    }  # fmt: skip
    assert 0 < found.errors["draft"].steps < len(machine.plans)
    assert [found.errors[kind].p90 for kind in ("verify", "draft")] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert found.errors["step"].median == pytest.approx(0.0, abs=1e-6)
    assert (found.serving.verify, found.serving.draft) == pytest.approx((1.0, 1.0))
    assert found.serving.overhead_s == pytest.approx(0.0, abs=1e-9)


def test_what_a_machine_takes_beside_its_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms of every step lie outside both models, and verification takes half as long again."""
    machine = Tried()
    machine._overhead_s = lambda drafts, rows: 0.005
    verify_s = machine._grid.verify_s
    monkeypatch.setattr(machine._grid, "verify_s", lambda *of: 1.5 * verify_s(*of))
    found = tried(machine, monkeypatch)
    assert found.serving is not None
    assert (found.serving.verify, found.serving.draft) == pytest.approx((1.5, 1.0))
    assert found.serving.overhead_s == pytest.approx(0.005)


def test_what_serving_adds_is_kept_by_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that draft lose 5 ms, the others 1 ms; verification of more than 8 tokens takes twice its samples."""
    machine = Tried()
    machine._overhead_s = lambda drafts, rows: 0.005 if drafts else 0.001
    verify_s = machine._grid.verify_s
    monkeypatch.setattr(
        machine._grid, "verify_s", lambda tokens, *of: verify_s(tokens, *of) * (2.0 if tokens > 8 else 1.0)
    )
    serving = tried(machine, monkeypatch).serving
    assert serving is not None
    many = {size: factor for size, factor in serving.verify_by_size.items() if size[0] > 8}
    few = {size: factor for size, factor in serving.verify_by_size.items() if size[0] <= 8}
    assert many and few
    assert max(few.values()) < serving.verify < max(many.values()) <= 2.0
    drafting = [s for (drafts, _), s in serving.overhead_by_kind_s.items() if drafts]
    plain = [s for (drafts, _), s in serving.overhead_by_kind_s.items() if not drafts]
    assert 0.001 < max(plain) < serving.overhead_s < min(drafting) < 0.005
    assert max(drafting) == pytest.approx(0.005, rel=0.1) and min(plain) == pytest.approx(0.001, rel=0.5)


def test_a_kind_of_step_that_was_rare_counts_little() -> None:
    """8 steps of the mean stand beside those of a kind: 2 of 40 ms among 98 of 10 ms, all with samples of 10 ms."""
    served = ServedTimes()
    assert serving_factors(served) is None
    for size, seconds, steps in (((4, 8), 0.04, 2), ((16, 8), 0.01, 98)):
        for _ in range(steps):
            served.verify[size].count(seconds, 0.01)
            served.overhead[False, 8].count(0.001)
    served.draft.count(0.006, 0.004)
    found = serving_factors(served)
    assert found is not None
    assert (found.verify, found.draft, found.overhead_s) == pytest.approx((1.06, 1.5, 0.001))
    expected = {(4, 8): (2 * 4.0 + 8 * 1.06) / 10, (16, 8): (98 * 1.0 + 8 * 1.06) / 106}
    assert found.verify_by_size == pytest.approx(expected)
    twice = ServedTimes()
    for _ in range(2):
        twice.add(served)
    again = serving_factors(twice)
    assert again is not None and again.verify == pytest.approx(1.06)
    assert again.verify_by_size[4, 8] == pytest.approx((4 * 4.0 + 8 * 1.06) / 12)


def test_policies_share_the_time_and_each_serves_few_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured one, chains, and no speculation, in this order; nothing is left running by any of them."""
    machine, told = Tried(), []
    tried(machine, monkeypatch, lambda *said: told.append(said))
    assert told == [("serving", done, 3) for done in (1, 2, 3)]
    begins = [index for index, (_, plan) in enumerate(machine.plans) if plan.step == 0]
    parts = [machine.plans[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
    assert len(parts) == 3
    for part in parts:
        assert part[-1][0] - part[0][0] == pytest.approx(SECONDS / 3, abs=0.1)
        assert {1, 4} <= {plan.num_rows for _, plan in part} <= {1, 2, 3, 4}
    assert np.mean(machine.chains()[begins[1] : begins[2]]) > 0.5, "chains draft in most steps"
    assert all(plan.draft is None for _, plan in parts[2])
    assert [(core.num_open, core.scheduler.stats.pages_used) for core in machine.cores] == [(0, 0)] * 3


@pytest.mark.parametrize(("policy", "parts"), [("spec:3", 2), ("ar", 2), ("spec:2", 3)])
def test_a_policy_is_not_tried_twice(monkeypatch: pytest.MonkeyPatch, policy: str, parts: int) -> None:
    told: list[tuple[str, int, int]] = []
    tried(Tried(policy), monkeypatch, lambda *said: told.append(said), seconds=0.6)
    assert told[-1] == ("serving", parts, parts)


def test_acceptance_is_that_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for acceptance in (0.3, 0.9):
        machine = Tried()
        machine._acceptance = acceptance
        found.append(tried(machine, monkeypatch).acceptance)
    assert found == pytest.approx([0.3, 0.9], abs=0.05)


def test_without_a_draft_there_is_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, told = Tried(max_depth=0, max_width=0), []
    found = tried(machine, monkeypatch, lambda *said: told.append(said), seconds=0.6)
    assert found.acceptance is None and told[-1] == ("serving", 2, 2)
    assert all(plan.draft is None for _, plan in machine.plans)
    assert found.errors is not None and found.errors["draft"].steps == 0


@pytest.mark.slow
def test_requests_fit_the_context_and_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that leaves no room for MOST_NEW_TOKENS behind the shortest prompt is used as far as it goes."""
    made = []
    for seed in (1, 1, 2):
        machine = Tried(max_context=40)
        tried(machine, monkeypatch, seed=seed)
        made.append([plan.prefill_tokens.tolist() for _, plan in machine.plans])
        assert LEAST_PROMPT - 1 <= machine.longest_prompt() <= 40 < LEAST_PROMPT + MOST_NEW_TOKENS
    assert made[0] == made[1] != made[2]
    machine = Tried()
    tried(machine, monkeypatch)
    assert 2 * LEAST_PROMPT < machine.longest_prompt() < 256 - MOST_NEW_TOKENS
