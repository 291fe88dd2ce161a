"""The baselines: what each decides and selects, against arithmetic done by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from adaserve_jax.scheduler import selection
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Feedback
from adaserve_jax.scheduler.controllers.baselines import (
    ClosedFormController,
    Exp3Spec,
    FastestChain,
    FixedController,
    GoodputController,
    LatencyModel,
    UcbSpec,
    emitted_per_row,
)
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.policies import POLICIES, SPECINFER_NODES, find_policy
from adaserve_jax.scheduler.queue import order_key
from adaserve_jax.scheduler.slo import need_of_the_code
from adaserve_jax.sim.executor import SimExecutor, VirtualClock
from adaserve_jax.types import CandidateTrees, CostSamples, StepPlan
from tests.scheduler.harness import Run, costs_of, limits_of, request_of
from tests.scheduler.test_controllers import load_of


def feedback(rows=0, drafted=0, accepted=0, emitted=0) -> Feedback:
    return Feedback(rows, drafted, accepted, emitted)


def beam(log_f, parent, depth) -> CandidateTrees:
    log_f = np.asarray(log_f, np.float32)
    token = np.arange(log_f.size, dtype=np.int32).reshape(log_f.shape)
    return CandidateTrees(token, np.asarray(parent, np.int32), log_f, np.asarray(depth, np.int32))


class TestDsd:
    """20 ms + 1 ms a token to verify, 2 ms a drafted level, nothing else."""

    samples = CostSamples(
        {(tokens, rows): 0.02 + 0.001 * tokens for tokens in (1, 2, 4, 8, 16) for rows in (1, 8)},
        {16: 0.0}, {(1, 1): 0.002, (8, 1): 0.002},
    )  # fmt: skip

    def controller(self, **options) -> GoodputController:
        limits = limits_of(max_depth=3)
        return GoodputController(limits, CostTable(self.samples, limits), **options)

    def test_the_latency_model_is_the_line_through_the_samples(self):
        model = LatencyModel(self.samples)
        np.testing.assert_allclose(model.target_s(4, np.array([4, 12, 32])), [0.024, 0.032, 0.052], rtol=1e-9)
        assert model.draft_s(3) == pytest.approx(0.002)
        knee = {(tokens, 1): 0.02 + 1e-4 * tokens**2 for tokens in (1, 2, 4, 8, 16)}
        curved = LatencyModel(CostSamples(knee, {}, {}))
        assert curved.target_s(1, np.array([12]))[0] == pytest.approx(0.02 + 1e-4 * 144, rel=1e-6)

    def test_goodput_by_hand(self):
        """n = 2, a = 0.7: k = 1 emits 2 x 1.7 in 2 + 24 ms; k = 2: 2 x 2.19 in 4 + 26; k = 3: 2 x 2.533 in 6 + 28."""
        found = self.controller().goodput(2)
        expected = [1.1 * 2 / 0.022, 3.4 / 0.026, 4.38 / 0.030, 5.066 / 0.034]
        np.testing.assert_allclose(found, expected, rtol=1e-9)

    def test_certain_acceptance_divides_by_nothing(self):
        np.testing.assert_allclose(emitted_per_row(1.0, np.arange(3)), [1, 2, 3])

    def test_acceptance_is_a_moving_average_of_all_drafted_tokens(self):
        controller = self.controller()
        controller.learn(feedback(2, drafted=6, accepted=3))
        assert controller.acceptance == pytest.approx(0.85 * 0.7 + 0.15 * 0.5)

    def test_it_decides_every_20_steps_and_never_comes_back_from_off(self):
        controller = self.controller()
        assert controller.decide(load_of(2)).depth == 3
        for _ in range(19):
            controller.learn(feedback(2, drafted=6, accepted=0))
            assert controller.decide(load_of(2)).depth == 3
        controller.learn(feedback(2, drafted=6, accepted=0))
        assert controller.decide(load_of(2)).depth == 0
        stuck = controller.acceptance
        for _ in range(100):
            controller.learn(feedback())
            assert controller.decide(load_of(2)).depth == 0
        assert controller.acceptance == stuck

    def test_a_probe_finds_that_speculation_pays_again(self):
        controller = self.controller(probe_steps=10)
        controller.acceptance = 0.0
        depths = []
        for _ in range(200):
            depth = controller.decide(load_of(2)).depth
            depths.append(depth)
            controller.learn(feedback(2 * (depth > 0), drafted=2 * depth, accepted=2 * depth))
        assert depths[:9] == [0] * 9 and depths[9] == 1
        assert depths[-1] == 3


class TestTurboSpec:
    def test_it_decides_in_each_step_and_favours_nothing(self):
        """At n = 2 and a = 0.0 a chain of 0 emits 2 in 22 ms and one of 1 as much in 26; it comes back by its probe."""
        parts = type("Parts", (), {"limits": limits_of(max_depth=3), "cost": CostTable(TestDsd.samples, limits_of())})()
        controller = POLICIES["turbospec"].controller(parts)
        np.testing.assert_allclose(controller.goodput(2)[:2], [2 / 0.022, 3.4 / 0.026], rtol=1e-9)
        assert controller.decide(load_of(2)).depth == 3
        controller.acceptance = 0.0
        assert controller.decide(load_of(2)).depth == 0
        depths = []
        for _ in range(120):
            depths.append(controller.decide(load_of(2)).depth)
            controller.learn(feedback(2 * (depths[-1] > 0), drafted=2 * depths[-1], accepted=0))
        assert depths.count(1) == 2 and set(depths) == {0, 1}


class TestAdaSpec:
    def chain(self, rows: int, knee: int) -> int:
        limits = limits_of()
        costs = CostTable(costs_of(limits, knee), limits)
        acceptance = LearnedAcceptance(limits.max_depth, limits.max_width)
        return FastestChain(limits, ChainCosts(limits, costs, acceptance)).decide(load_of(rows)).depth

    def test_the_chain_of_most_tokens_per_second_by_hand(self):
        """One row: 1 in 16 ms, 1.7 in 18, ..., 2.7731 in 21. Eight rows, a token beyond the eighth 1 ms each: 8 tokens
        in 16 ms, 13.6 in 26, 17.52 in 43 (32 tokens fill the bucket of 24)."""
        assert self.chain(1, knee=16) == 4
        assert self.chain(8, knee=8) == 1


@dataclass
class Selected:
    """One call of `Scheduler.select`.

    made_s: when the step was planned. pace: time of the first token and number of tokens after it, of each decode row.
    """

    plan: StepPlan
    f: list[list[float]]
    made_s: float
    now: float
    pace: list[tuple[float, int]]
    nodes: int


def selections(run: Run, names: str, **request) -> list[Selected]:
    """Serve requests of these names to their end; return what was selected while prompts were done and ends far."""
    seen, select, began_s = [], run.scheduler.select, 0.0

    def watched(plan, candidates, now):
        states = [run.scheduler.batch.table.states[slot] for slot in plan.slots[: plan.num_decode]]
        trees = select(plan, candidates, now)
        if candidates.log_f.size and not plan.num_prefill_tokens and all(state.num_output < 40 for state in states):
            f = np.exp(candidates.log_f.astype(np.float64)).tolist()
            pace = [(state.first_token_s, state.num_output - 1) for state in states]
            seen.append(Selected(plan, f, began_s, now, pace, trees.num_nodes - plan.num_decode))
        return trees

    run.scheduler.select = watched
    for name in names:
        run.add(request_of(name, tokens=60, **request))
    while run.scheduler.has_work:
        began_s = run.clock.now()
        run.step()
    assert len(seen) > 5
    return seen


def verify_s(tokens: int, knee: int) -> float:
    """Seconds of the bucket that holds so many tokens: 16 ms, and 1 ms for each beyond `knee`."""
    return 0.016 + 0.001 * max(0, limits_of().bucket(tokens) - knee)


class TestDSpark:
    @pytest.mark.parametrize("knee", [4, 12, 64])
    def test_trees_are_algorithm_1_without_its_early_stop(self, knee):
        """By the profile of the warm-up, in which 4 levels take 1 ms each."""
        seen = selections(Run.of(limits_of(), policy="dspark:4", knee=knee), "abc")
        for each in seen:
            rows, f = each.plan.num_decode, sorted((f for chain in each.f for f in chain), reverse=True)
            rate = [(rows + sum(f[:n])) / (verify_s(rows + n, knee) + 0.004) for n in range(len(f) + 1)]
            assert each.nodes == int(np.argmax(rate))
        assert (min(each.nodes for each in seen if each.plan.num_decode == 3) == 12) == (knee == 64)


class TestAdaSpecSelection:
    @pytest.mark.parametrize("tpot_slo_s", [None, 0.018])
    def test_most_targets_first_then_throughput(self, tpot_slo_s):
        """Each row must be on its target when the step ends; sizes are those that fill a bucket."""
        run = Run.of(limits_of(), policy="adaspec", knee=4)
        beyond_throughput = 0
        for each in selections(run, "abc", tpot_slo_s=tpot_slo_s):
            rows = each.plan.num_decode
            nodes = sorted(((f, row) for row, chain in enumerate(each.f) for f in chain), key=lambda node: -node[0])
            most = min(len(nodes), each.plan.tree_token_cap - rows)
            judged = {}
            for n in {min(max(edge - rows, 0), most) for edge in limits_of().token_edges}:
                ends_s = each.now + verify_s(rows + n, 4)
                gained = [1.0 + sum(f for f, row in nodes[:n] if row == wanted) for wanted in range(rows)]
                met = tpot_slo_s is not None and sum(
                    have >= (ends_s - first_s) / tpot_slo_s - after
                    for have, (first_s, after) in zip(gained, each.pace, strict=True)
                )
                judged[n] = (met, sum(gained) / (ends_s - each.made_s))
            met, rate = judged[each.nodes]
            assert met == max(judged.values())[0] and rate == pytest.approx(max(judged.values())[1])
            beyond_throughput += rate < max(other for _, other in judged.values()) - 1e-9
        assert (beyond_throughput > 0) == (tpot_slo_s is not None)


class TestUcbSpec:
    def test_each_arm_once_then_the_largest_upper_bound(self):
        bandit = UcbSpec(limits_of(max_depth=3))
        emitted = {1: 1.5, 2: 2.5, 3: 2.0}
        for depth in (1, 2, 3):
            assert bandit.decide(load_of(4)).depth == depth
            bandit.learn(feedback(4, drafted=4 * depth, emitted=int(4 * emitted[depth])))
        # t = 3, n = 1, K = 3, L = 3: (3 / 2) sqrt(2 (1 + 2 log(3 * 9 * sqrt 2 / 0.05)))
        expected = 1.5 * np.sqrt(2 * (1 + 2 * np.log(27 * np.sqrt(2) / 0.05)))
        np.testing.assert_allclose(bandit.radius(), expected)
        assert bandit.decide(load_of(4)).depth == 2

    def test_a_step_that_could_not_draft_teaches_nothing(self):
        bandit = UcbSpec(limits_of(max_depth=3))
        first = bandit.decide(load_of(4)).depth
        bandit.learn(feedback())
        assert bandit.decide(load_of(4)).depth == first

    def test_it_finds_the_longest_chain_because_it_does_not_see_time(self):
        bandit, rng, taken = UcbSpec(limits_of(max_depth=3)), np.random.default_rng(0), []
        for _ in range(4000):
            depth = bandit.decide(load_of(1)).depth
            taken.append(depth)
            bandit.learn(feedback(1, drafted=depth, emitted=1 + int((rng.random(depth) < 0.8).cumprod().sum())))
        assert np.mean(np.array(taken[-500:]) == 3) > 0.5


class TestExp3Spec:
    def test_chances_by_hand(self):
        bandit = Exp3Spec(limits_of(max_depth=2), seed=0)
        np.testing.assert_allclose(bandit.chances(), [0.5, 0.5])
        depth = bandit.decide(load_of(1)).depth
        bandit.learn(feedback(1, drafted=depth, emitted=1))
        # loss (2 + 1 - 1) / (2 * 0.5) = 2 for the arm taken; eta_2 = sqrt(log 2 / (2 * 2))
        weight = np.exp(-np.sqrt(np.log(2) / 4) * 2)
        expected = np.array([weight, 1.0]) / (1 + weight)
        np.testing.assert_allclose(bandit.chances(), expected if depth == 1 else expected[::-1])

    def test_it_leaves_an_arm_that_earns_nothing(self):
        bandit = Exp3Spec(limits_of(max_depth=2), seed=1)
        for _ in range(2000):
            depth = bandit.decide(load_of(1)).depth
            bandit.learn(feedback(1, drafted=depth, emitted=3 if depth == 2 else 1))
        assert bandit.chances()[1] > 0.9


class TestTetris:
    def test_chains_two_longer_than_k_and_k_nodes_a_request(self):
        policy, k = find_policy("tetris:2", 8)
        assert (policy.selector, k) == ("best", 2)
        decision = FixedController(limits_of(max_depth=4), 4, nodes=2).decide(load_of(5))
        assert (decision.depth, decision.width, decision.tree_token_cap) == (4, 1, 15)

    def test_the_likeliest_of_all_requests_wherever_they_are(self):
        """f: 0.9, 0.81, 0.73 against 0.5, 0.25, 0.1; of four, three go to the first request."""
        candidates = beam(np.log([[0.9, 0.81, 0.73], [0.5, 0.25, 0.1]]), [[-1, 0, 1]] * 2, [1, 2, 3])
        chosen = selection.best_overall(selection.rank(candidates), 4)
        np.testing.assert_array_equal(chosen, [[True] * 3, [True, False, False]])


class TestSpecInfer:
    levels = np.repeat(np.arange(1, 5), 3)

    def candidates(self) -> CandidateTrees:
        """Four levels of three; in level 2 the best two hang from the level's first, in level 3 two from its first."""
        parent = [-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 6, 7]
        f = [0.5, 0.3, 0.1, 0.4, 0.1, 0.2, 0.2, 0.15, 0.05, 0.1, 0.08, 0.07]
        return beam(np.log([f, f]), [parent, parent], self.levels)

    def test_twenty_nodes_and_a_root(self):
        assert sum(SPECINFER_NODES) == 20
        controller = POLICIES["specinfer"].controller
        limits = limits_of(max_depth=8, max_width=4, max_tree_tokens=64)
        parts = type("Parts", (), {"limits": limits})()
        decision = controller(parts).decide(load_of(2))
        assert (decision.depth, decision.width, decision.tree_token_cap) == (8, 3, 42)

    def test_the_likeliest_whose_parents_are_in_the_tree(self):
        candidates = self.candidates()
        ranked = selection.rank(candidates)
        chosen = selection.static_tree(candidates, ranked, (1, 1, 3, 3), left=100)
        columns = [set(ranked.column[row][chosen[row]].tolist()) for row in range(2)]
        # level 1: node 0; level 2: node 3; level 3: 6 and 7 hang from 3, 8 from 4, which is not in; level 4: all three
        assert columns == [{0, 3, 6, 7, 9, 10, 11}] * 2

    def test_a_small_budget_drops_the_least_likely(self):
        candidates = self.candidates()
        ranked = selection.rank(candidates)
        chosen = selection.static_tree(candidates, ranked, (1, 1, 3, 3), left=5)
        columns = [set(ranked.column[row][chosen[row]].tolist()) for row in range(2)]
        assert columns == [{0, 3, 6}, {0, 3}]
        assert not selection.static_tree(candidates, ranked, (1, 1, 3, 3), left=0).any()


def test_static_trees_take_the_likeliest_of_a_level_wherever_they_stand():
    """Columns of text follow those of the draft, likelier or not."""
    log_f = np.log(np.array([[0.3, 0.1, 0.9]], np.float32))
    candidates = CandidateTrees(np.zeros((1, 3), np.int32), np.full((1, 3), -1, np.int32), log_f, np.ones(3, np.int32))
    ranked = selection.rank(candidates)
    chosen = selection.static_tree(candidates, ranked, (1,), left=9)
    assert ranked.column[chosen].tolist() == [2]


class TestAdaServePaper:
    def test_eq_8_as_the_code_has_it_rounds_up(self):
        """B1 = 512: at n = 60 the text gives 512 // 60 - 1 = 7, the code ceil(512 / 60) = 9."""
        limits = limits_of(max_depth=16, max_width=8, max_tree_tokens=512, token_edges=(1024,))
        assert ClosedFormController.for_limits(limits).decide(load_of(60)).depth == 7
        assert ClosedFormController.for_limits(limits, rounds_up=True).decide(load_of(60)).depth == 9

    def test_need_of_the_code_is_five_percent_more_and_within_the_tree(self):
        np.testing.assert_allclose(need_of_the_code(np.array([-3.0, 0.5, 2.0, 9.0]), 4), [1.0, 1.0, 2.1, 5.0])

    def test_one_step_must_catch_up_all_of_it(self):
        """16 ms to verify and 1 ms a level of 4, as measured at warm-up, whatever happened since; capped at 5."""
        run = Run.of(limits_of(max_depth=4, max_width=1), policy="adaserve-paper", knee=64)
        run.scheduler.add(request_of("late", tokens=60, tpot_slo_s=0.018))
        for _ in range(4):
            run.step()
        (state,) = run.scheduler.batch.running
        planned = run.scheduler._planner.plan(run.clock.now(), 0)
        for late_s, expected in ((0.0, None), (0.06, None), (0.5, 5.0)):
            made_s = run.clock.now() + late_s
            by_hand = (made_s - state.first_token_s + 0.016 + 4 * 0.001) / 0.018 - (state.num_output - 1)
            found = float(run.scheduler._selector._in_one_step(replace(planned, made_s=made_s), 4)[0])
            assert found == pytest.approx(by_hand if expected is None else expected)


def test_f_is_uncalibrated_where_it_is_published_so():
    """Others' is calibrated. Uncalibrated, the simulated draft squares the odds of its first choice, and what the
    target accepts stays the same."""
    seen = {}
    for name in ("adaserve-paper", "adaserve-code", "tetris:2", "adaserve", "spec:2"):
        run = Run.of(limits_of(max_depth=4), policy=name)
        run.scheduler.add(request_of("one"))
        while (plan := run.step()[0]).draft is None or not plan.draft.depth:
            pass
        assert plan.draft.calibrated == (name in ("adaserve", "spec:2")), name
        seen[name] = plan
    plan = seen["adaserve"]
    draft = replace(plan.draft, depth=3, width=1)
    executor = SimExecutor(limits_of(), costs_of(limits_of()), 0.6, VirtualClock())
    found = {
        calibrated: executor.speculate(replace(plan, draft=replace(draft, calibrated=calibrated)))
        for calibrated in (True, False)
    }
    logs = [np.diff(found[calibrated].log_f[0].astype(np.float64), prepend=0.0) for calibrated in (True, False)]
    honest, said = (np.exp(log) for log in logs)
    odds = honest / (1 - honest)
    np.testing.assert_allclose(said, odds**2 / (1 + odds**2), rtol=1e-4)
    np.testing.assert_array_equal(found[True].token, found[False].token)


class TestSarathi:
    def test_prefill_gets_what_512_tokens_leave(self):
        limits = limits_of(max_requests=64, token_edges=(64, 1024, 2048), max_tree_tokens=64, max_context=4096)
        controller = POLICIES["sarathi"].controller(type("Parts", (), {"limits": limits})())
        assert controller.decide(load_of(12, prefill=3000)).prefill_tokens == 500
        assert FixedController(limits, 0).decide(load_of(12, prefill=3000)).prefill_tokens == 2036


class TestPriority:
    def test_a_better_request_takes_the_place_of_the_worst(self):
        run = Run.of(limits_of(max_requests=2), policy="priority")
        for name, priority in (("worst", 2), ("middling", 1)):
            run.scheduler.add(request_of(name, tokens=30, priority=priority))
        run.step()
        run.scheduler.add(request_of("urgent", tokens=3, arrival_s=run.clock.now(), priority=0))
        run.step()
        running = {state.sequence.sequence_id for state in run.scheduler.batch.running}
        assert running == {"middling", "urgent"}
        while run.scheduler.has_work:
            run.step()
        assert list(run.last) == ["urgent", "middling", "worst"]
        assert run.last["worst"].metrics.preemptions == 1
        assert len(run.text["worst"]) == 30

    def test_nobody_is_preempted_whose_pages_would_not_be_enough(self):
        """Of ten pages the best has seven and the worst two; the one between needs five."""
        run = Run.of(limits_of(num_pages=10, page_size=8), policy="priority", prefix_cache=False)
        run.scheduler.add(request_of("best", prompt=50, tokens=4, priority=0))
        run.scheduler.add(request_of("worst", prompt=10, tokens=4, priority=5))
        run.step()
        assert len(run.scheduler.batch.running) == 2
        run.scheduler.add(request_of("between", prompt=40, tokens=4, arrival_s=run.clock.now(), priority=1))
        while run.scheduler.has_work:
            run.step()
        assert {name: last.metrics.preemptions for name, last in run.last.items()} == {
            "best": 0, "worst": 0, "between": 0,
        }  # fmt: skip

    def test_nor_one_that_shares_them_with_a_better_request(self):
        """Of twelve pages the best and the worst share six, so that the worst would give back two at most."""
        run = Run.of(limits_of(num_pages=12, page_size=8), policy="priority")
        run.scheduler.add(request_of("best", prompt=50, tokens=12, priority=0))
        while not run.text.get("best"):
            run.step()
        run.scheduler.add(request_of("worst", prompt=50, tokens=3, arrival_s=run.clock.now(), priority=5))
        run.step()
        assert run.scheduler.stats.cache_hit_tokens == 48
        between = request_of("between", prompt=40, tokens=4, arrival_s=run.clock.now(), priority=1)
        run.scheduler.add(replace(between, prompt_ids=between.prompt_ids + 50))
        while run.scheduler.has_work:
            run.step()
        assert {name: last.metrics.preemptions for name, last in run.last.items()} == {
            "best": 0, "worst": 0, "between": 0,
        }  # fmt: skip

    def test_equals_wait_for_their_turn(self):
        run = Run.of(limits_of(max_requests=1), policy="priority")
        run.scheduler.add(request_of("first", tokens=5))
        run.step()
        run.scheduler.add(request_of("second", tokens=2, arrival_s=run.clock.now()))
        while run.scheduler.has_work:
            run.step()
        assert list(run.last) == ["first", "second"]

    def test_priorities_are_strict_and_others_age(self):
        low = request_of("low", arrival_s=0.0, priority=1)
        later = replace(request_of("high"), arrival_s=1e6)
        assert order_key(later, "priority", None) < order_key(low, "priority", None)
        assert order_key(later, "arrival", None) > order_key(low, "arrival", None)


def test_most_prefill_tokens_of_a_step():
    run = Run.of(limits_of(), policy="ar", max_prefill_tokens=7)
    run.scheduler.add(request_of("long", prompt=40))
    plan, _ = run.step()
    assert plan.num_prefill_tokens == 7
