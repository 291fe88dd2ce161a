"""Acceptance learned by LoRA adapter: f of an adapter's rows becomes honest, and nodes go where they are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import AdapterAcceptance
from adaserve_jax.types import CandidateTrees, DraftTrees, StepOutcome, StepPlan
from tests.scheduler.harness import Run, limits_of, request_of
from tests.sim_kv import StrictExecutor

CLAIM = 0.4
"""Power of f that the draft states for rows of adapter 1: it thinks that it knows them better than it does."""


class OverconfidentOfAdapters(StrictExecutor):
    """accepted: of the last verification, bool[N]."""

    accepted = np.zeros(0, bool)

    def speculate(self, plan: StepPlan) -> CandidateTrees:
        found = super().speculate(plan)
        if plan.adapters is None or not found.log_f.size:
            return found
        power = np.where(plan.adapters[: plan.num_decode] == 1, np.float32(CLAIM), np.float32(1))
        return replace(found, log_f=found.log_f * power[:, None])

    def verify(self, *args, **options) -> StepOutcome:
        outcome = super().verify(*args, **options)
        self.accepted = outcome.accepted
        return outcome


def adapted(name: str, adapter: int, tokens: int = 100):
    return replace(request_of(name, tokens=tokens), adapter=adapter)


def totals(policy: str, rows: tuple[int, ...] = (0, 1), skip: int = 60) -> dict[int, tuple[float, int, int]]:
    """By adapter: the sum of f, the number accepted and the number verified of all nodes but roots, after some steps.

    A request of each of `rows` runs at all times.
    """
    run = Run.of(limits_of(max_tree_tokens=12), executor=OverconfidentOfAdapters, policy=policy, acceptance=0.6)
    found = dict.fromkeys(rows, (0.0, 0, 0))
    for number in range(4):
        for place, adapter in enumerate(rows):
            run.add(adapted(f"{number}-{place}", adapter))
        while run.scheduler.has_work:
            plan, trees = run.step()
            if run.steps <= skip or plan is None or not plan.num_decode:
                continue
            slots = np.zeros(plan.num_rows, np.int32) if plan.adapters is None else plan.adapters
            for adapter in rows:
                own = (slots[trees.row] == adapter) & (trees.candidate >= 0)
                f, hits, nodes = found[adapter]
                hits += int(run.executor.accepted[own].sum())
                found[adapter] = (f + float(trees.f[own].sum()), hits, nodes + int(own.sum()))
    return found


@pytest.mark.slow
def test_f_becomes_honest_and_nodes_go_where_they_are_accepted() -> None:
    learned, as_stated = totals("adaserve"), totals("spec:4")
    for f, hits, nodes in learned.values():
        assert nodes > 200 and f == pytest.approx(hits, rel=0.15)
    f, hits, _ = as_stated[1]
    assert f == pytest.approx(hits, rel=0.15), "a policy of chains learns it too, though it selects by rank alone"
    assert learned[1][2] < 1.25 * learned[0][2], "adapter 1 gets no more nodes for what it claims"


def test_published_policies_take_the_draft_at_its_word() -> None:
    f, hits, nodes = totals("adaserve-paper")[1]
    assert nodes > 200 and f > 1.3 * hits


def trees_of(chances: np.ndarray) -> tuple[CandidateTrees, DraftTrees]:
    """Chains of two nodes, one for each row of f64[R, 2] chances, all selected."""
    rows = len(chances)
    log_f = np.log(np.cumprod(chances, axis=1)).astype(np.float32)
    ints = np.tile(np.arange(2, dtype=np.int32), (rows, 1))
    candidates = CandidateTrees(ints, ints - 1, log_f, np.array([1, 2], np.int32))
    index = np.arange(3 * rows, dtype=np.int32)
    place = index % 3
    return candidates, DraftTrees(
        row=index // 3, token=index, parent=np.where(place == 0, -1, index - 1).astype(np.int32), depth=place,
        candidate=place - 1, f=np.ones(3 * rows, np.float32),
    )  # fmt: skip


def test_the_power_is_that_of_the_outcomes() -> None:
    """Chances of 0.5 of which a quarter is accepted are squares of what they should be."""
    rng = np.random.default_rng(0)
    found = AdapterAcceptance()
    assert not found.is_needed and found.power(1) == 1.0
    slots = np.array([0, 1] * 50, np.int32)
    for _ in range(30):
        candidates, trees = trees_of(np.full((100, 2), 0.5))
        first, second = rng.random((2, 100)) < np.where(slots == 1, 0.25, 0.5)
        accepted = np.stack([np.ones(100, bool), first, first & second], axis=1).ravel()
        found.observe(candidates, trees, accepted, slots)
    assert found.is_needed
    assert found.power(0) == pytest.approx(1.0, abs=0.1) and found.power(1) == pytest.approx(2.0, abs=0.2)
    f = np.exp(found.corrected(candidates, slots).log_f[1])
    assert f == pytest.approx([0.25, 0.0625], rel=0.25)
    found.forget(1)
    assert found.power(1) == 1.0 and not found.is_needed


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_whatever_happens_f_stays_a_probability_that_does_not_rise(share: float) -> None:
    found = AdapterAcceptance()
    chances = np.array([[1.0, 0.9], [1e-6, 1.0], [0.5, 0.5]])
    candidates, trees = trees_of(chances)
    for _ in range(50):
        accepted = np.where(trees.candidate < 0, True, share > 0)
        found.observe(candidates, trees, accepted, np.ones(3, np.int32))
    f = np.exp(found.corrected(candidates, np.ones(3, np.int32)).log_f)
    assert (f <= 1).all() and (f[:, 1] <= f[:, 0]).all() and 0.25 <= found.power(1) <= 4


def test_rows_whose_logits_are_edited_and_nodes_of_others_teach_nothing() -> None:
    found = AdapterAcceptance()
    candidates, trees = trees_of(np.full((2, 2), 0.5))
    accepted = trees.candidate < 0
    found.observe(candidates, trees, accepted, np.ones(2, np.int32), edited=np.array([True, True]))
    found.observe(candidates, trees, accepted, np.ones(2, np.int32), columns=np.full(6, -1, np.int32))
    assert found.power(1) == 1.0
