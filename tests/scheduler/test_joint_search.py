"""The joint choice against a search by plain loops over every shape, edge and share."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Load
from adaserve_jax.scheduler.controllers.corrected import CorrectedController
from adaserve_jax.scheduler.controllers.joint import COARSE_EDGES, GRID, JointController
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.types import CostSamples, Limits
from tests.scheduler.harness import Run, limits_of, request_of
from tests.scheduler.test_shapes import compiled_once
from tests.slow import slow_after

OBJECTIVE = Objective()


class Oracle:
    """Values one option at a time, from the same tables."""

    def __init__(self, limits: Limits, cost: CostTable, acceptance: LearnedAcceptance, load: Load):
        self.limits, self.cost, self.load = limits, cost, load
        self.chance = acceptance.expected()
        self.rows = load.num_decode

    def options(self):
        """(value, depth, chunk) of every option."""
        shapes = [(0, 0)] + [(d, w) for d in range(1, self.limits.max_depth + 1) for w in self.cost.draft_widths]
        shapes = shapes if self.load.can_speculate.any() else [(0, 0)]
        most = min(
            max(self.rows * (1 + max(d * w for d, w in shapes)), 0), self.limits.max_tree_tokens
        ) + self.load.prefill_tokens  # fmt: skip
        edges = [e for e in self.limits.token_edges if e >= self.rows + min(self.load.prefill_tokens, 1)]
        last = next((e for e in edges if e >= most), edges[-1])
        for depth, width in shapes:
            for edge in (e for e in edges if e <= last):
                for share in (1.0, 0.5, 0.25):
                    room = edge - self.rows
                    chunk = min(ceil(room * share), self.load.prefill_tokens)
                    nodes = min(edge - chunk, self.limits.max_tree_tokens) - self.rows
                    if nodes >= 0:
                        yield self.value(depth, width, edge, chunk, nodes, last), depth, chunk

    def step_s(self, depth: int, width: int, edge: int, last: int) -> float:
        rows = self.rows + self.load.num_prefill
        verify_s = float(self.cost.verify_s(rows)[self.limits.token_edges.index(edge)])
        if not depth:
            return verify_s + self.cost.overhead_s(False)
        lag = [int(each) for each, can in zip(self.load.draft_lag, self.load.can_speculate, strict=True) if can]
        usual = sum(min(each, self.limits.max_depth + 1) for each in lag)
        catchup = self.cost.catchup_s(usual + min(self.load.prefill_tokens, last - self.rows))
        catchup += self.cost.catchup_s(sum(lag) - usual) / OBJECTIVE.horizon
        return verify_s + depth * float(self.cost.level_s(rows)[width - 1]) + catchup + self.cost.overhead_s(True)

    def value(self, depth: int, width: int, edge: int, chunk: int, nodes: int, last: int) -> float:
        step_s = self.step_s(depth, width, edge, last)
        best = sorted((self.chance[d, r] for d in range(depth) for r in range(width)), reverse=True)
        costs = []
        for rate, can in zip(self.load.need_rate, self.load.can_speculate, strict=True):
            if rate <= 0 or not np.isfinite(rate):
                continue
            wanted = ceil(max(rate * step_s * GRID - GRID, 0.0)) / GRID
            enough = [n for n in range(len(best) + 1) if sum(best[:n]) >= wanted] if can else [0] * (wanted <= 0)
            costs += enough[:1]
        on_pace, left = 0, nodes
        for needed in sorted(costs):
            if needed <= left:
                on_pace, left = on_pace + 1, left - needed
        drafting = max(int(self.load.can_speculate.sum()), 1)
        each = min(nodes / drafting, len(best))
        gain = sum(best[: int(each)]) + (best[int(each)] * (each % 1) if int(each) < len(best) else 0.0)
        weight = OBJECTIVE.prefill_weight(self.load.wait_ratio)
        emitted = self.rows + drafting * gain
        in_time = sum(rate <= chunk / step_s for rate in self.load.prompt_rates)
        return on_pace + in_time + (OBJECTIVE.emit * emitted + weight * chunk) * self.cost.baseline_s / step_s


def random_machine(rng: np.random.Generator, limits: Limits) -> CostTable:
    times = 0.01 + np.cumsum(rng.uniform(0, 0.004, len(limits.token_edges)))
    verify = {(edge, 1): float(s) for edge, s in zip(limits.token_edges, times, strict=True)}
    levels = {(1, width): float(rng.uniform(0.0002, 0.002)) * (1 + 0.2 * width) for width in (1, 2, 4)}
    return CostTable(CostSamples(verify, {16: 0.0004, 64: 0.001}, levels), limits)


def random_load(rng: np.random.Generator, rows: int) -> Load:
    prefill = int(rng.choice([0, 5, 40, 300])) if rows else 40
    return Load(
        need_rate=rng.choice([0.0, 30.0, 70.0, 110.0, 170.0, np.inf], rows) * rng.uniform(0.8, 1.2),
        draft_lag=rng.integers(1, 12, rows),
        can_speculate=rng.random(rows) < 0.8,
        num_prefill=int(prefill > 0),
        prefill_tokens=prefill,
        wait_ratio=float(rng.uniform(0, 1.2)),
        prompt_rates=np.sort(
            rng.choice([50.0, 500.0, 2000.0, np.inf], int(rng.integers(0, 4))) * rng.uniform(0.8, 1.2)
        ),
    )


def found_and_best(seed: int, limits: Limits) -> tuple[float, float]:
    """The value of what was chosen, and the highest."""
    rng = np.random.default_rng(seed)
    cost, acceptance = random_machine(rng, limits), LearnedAcceptance(limits.max_depth, limits.max_width)
    load = random_load(rng, int(rng.integers(0, 9)))
    decision = JointController(limits, cost, acceptance, OBJECTIVE).decide(load)
    options = list(Oracle(limits, cost, acceptance, load).options())
    chosen = [v for v, depth, chunk in options if depth == decision.depth and chunk == decision.prefill_tokens]
    return max(chosen), max(value for value, _, _ in options)


@pytest.mark.parametrize("seed", slow_after(40, range(60)))
def test_few_edges_are_searched_whole(seed):
    limits = limits_of()
    assert len(limits.token_edges) <= COARSE_EDGES
    found, best = found_and_best(seed, limits)
    assert found == pytest.approx(best, rel=1e-9)


def test_many_edges_cost_little_of_the_best():
    limits = limits_of(token_edges=(1, *range(2, 129, 2)), max_tree_tokens=64)
    lost = [1 - found / best for found, best in (found_and_best(seed, limits) for seed in range(6))]
    assert np.mean(lost) < 0.01
    assert np.count_nonzero(np.array(lost) > 0.02) <= 1


def test_no_decision_compiles_a_loop_again():
    """Whatever arrays a load has: with text and without, rows with and without a draft, one shape or all; and in steps
    of a scheduler, which choose the budget too."""
    limits, rng = limits_of(), np.random.default_rng(3)
    cost, acceptance = random_machine(rng, limits), LearnedAcceptance(limits.max_depth, limits.max_width)
    joint = JointController(limits, cost, acceptance, OBJECTIVE)
    for rows in (0, 1, 8):
        load = random_load(rng, rows)
        text = -np.sort(-rng.uniform(0, 1, (rows, 5)), axis=1)
        for suffix_f in (None, text, np.asfortranarray(text)):
            joint.decide(replace(load, suffix_f=suffix_f))
    for can_draft in (True, False):
        joint.sustains(np.array([1.0, 5.0]), 1, 3.5, 0.6, can_draft=can_draft)
    run = Run.of(limits, policy="adaserve")
    run.serve([request_of("one", prompt=9, tokens=12), request_of("two", prompt=5, tokens=12, tpot_slo_s=0.02)])
    assert compiled_once()


def test_prompts_ask_for_what_keeps_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot: the first prompt runs and the others wait behind it. One without a target asks for nothing."""
    loads, decide = [], CorrectedController.decide
    monkeypatch.setattr(CorrectedController, "decide", lambda self, load: loads.append(load) or decide(self, load))
    run = Run.of(limits_of(max_requests=1), policy="adaserve")
    run.add(request_of("first", prompt=200, ttft_slo_s=1.0))
    run.add(request_of("second", prompt=60, ttft_slo_s=2.0))
    run.add(request_of("third", prompt=100))
    run.step()
    assert loads[0].prompt_rates == pytest.approx([260 / 1.8, 200 / 0.9])


def test_prompts_ask_for_what_is_not_cached_behind_what_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots: a preempted request runs before the prompt, of which the last page is not cached."""
    loads, decide = [], CorrectedController.decide
    monkeypatch.setattr(CorrectedController, "decide", lambda self, load: loads.append(load) or decide(self, load))
    run = Run.of(limits_of(max_requests=2), policy="adaserve")
    run.serve([request_of("seen", prompt=64, tokens=1)])
    arrival_s = run.clock.now()
    again = request_of("again", prompt=16, ttft_slo_s=1.0, arrival_s=arrival_s, cache_salt="other")
    run.add(again)
    run.step()
    run.step()
    (state,) = run.scheduler.batch.running
    run.scheduler.batch.preempt(state)
    run.add(request_of("prompt", prompt=64, ttft_slo_s=2.0, arrival_s=arrival_s))
    now = run.clock.now()
    computed_again = state.num_tokens - len(run.scheduler.batch.prefixes.find(state)) * 8
    run.step()
    assert computed_again > 0 and state.num_output > 0
    assert loads[-1].prompt_rates == pytest.approx([(computed_again + 8) / (arrival_s + 1.8 - now)])


def test_requests_without_a_ttft_target_start_while_little_of_the_budget_is_taken() -> None:
    """With one, all sixteen start at once: the pace of all takes a third of the budget."""
    started = {}
    for ttft_slo_s in (None, 4.0):
        run = Run.of(limits_of(max_requests=16), policy="adaserve")
        for number in range(16):
            run.add(request_of(f"r{number}", tpot_slo_s=0.05, ttft_slo_s=ttft_slo_s))
        run.step()
        started[ttft_slo_s] = len(run.scheduler.batch.running)
    assert 1 <= started[None] < started[4.0] == 16
