"""Nightjar and the contextual bandits: their arithmetic by hand, and the mends of the published algorithm."""

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import ArmReport, Feedback
from adaserve_jax.scheduler.controllers.baselines import SAMPLING_WIDTH, UCB_WIDTH, LinearSampling, LinUcb
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.nightjar import (
    BINGREEDY,
    MEMORY_STEPS,
    MIN_DWELL,
    TRIAL_ROWS,
    TRIAL_STEPS,
    V1,
    V2,
    ArmBucket,
    ExplorationSchedule,
    NightjarController,
    Rule,
    SwitchTable,
    doubling,
)
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.types import CostSamples, Limits
from tests.scheduler.harness import Run, limits_of, random_load
from tests.scheduler.test_controllers import load_of

SAMPLES = CostSamples(
    {(tokens, rows): 0.02 + 0.001 * tokens for tokens in (1, 2, 4, 8, 16, 32, 64) for rows in (1, 8)},
    {16: 0.004, 64: 0.01}, {(1, 1): 0.002, (8, 1): 0.002},
)  # fmt: skip
"""20 ms + 1 ms a token to verify, 2 ms a drafted level, 4 ms to feed the draft up to 16 tokens."""
PUBLISHED = SwitchTable((128, 256, 512), (32, 64), np.array([[17.87, 28.53], [20.65, 22.33], [24.30, 102.03]]) / 1e3)


def costs_of_chains(limits: Limits) -> ChainCosts:
    return ChainCosts(limits, CostTable(SAMPLES, limits), LearnedAcceptance(limits.max_depth, limits.max_width))


def nightjar(rule: Rule = V2, seed: int = 0, **limits) -> NightjarController:
    bounds = limits_of(**{"max_depth": 3, **limits})
    return NightjarController(bounds, costs_of_chains(bounds), PUBLISHED, rule, seed)


def step_of(depth: int, rows: int, decoded: int, step_s: float = 0.03, **others) -> Feedback:
    """Of a batch whose rows all drafted what was decided."""
    drafts = {"rows": rows, "drafted": rows * depth, "emitted": decoded} if depth else {"rows": 0, "drafted": 0}
    return Feedback(
        **{"accepted": 0, "emitted": 0, **drafts, **others}, decode_rows=rows, decoded=decoded, step_s=step_s
    )


def turned_off(controller: NightjarController) -> NightjarController:
    """After a step in which no draft could be asked."""
    controller.decide(replace(load_of(4), can_draft=False))
    controller.learn(step_of(0, 4, 4))
    return controller


def run(controller, sizes, tokens_of=lambda depth: 1 + depth / 2):
    """Depth of each step, one for each size of batch."""
    depths = []
    for rows in sizes:
        depth = controller.decide(load_of(rows)).depth
        controller.learn(step_of(depth, rows, round(rows * tokens_of(depth))))
        depths.append(depth)
    return depths


class TestSwitchTable:
    def test_published_values_made_monotone_and_looked_up_rounding_up(self):
        """64 rows at 256 tokens were timed at less than at 128 tokens."""
        looked_up = {at: PUBLISHED.switch_s(*at) * 1e3 for at in [(1, 1), (129, 32), (129, 33), (512, 64), (9999, 99)]}
        assert looked_up == pytest.approx(
            {(1, 1): 17.87, (129, 32): 20.65, (129, 33): 28.53, (512, 64): 102.03, (9999, 99): 102.03}
        )

    def test_of_a_cost_table_every_row_is_fed_as_much_as_the_longest_lag(self):
        """4 rows x 4 tokens are 16: 4 ms; x 5, rounded up to 8, are 32: 10 ms; x 32 are 128, twice the largest: 20."""
        limits = limits_of()
        table = SwitchTable.of(CostTable(SAMPLES, limits), limits)
        assert [table.switch_s(lag, 4) for lag in (4, 5, 32)] == pytest.approx([0.004, 0.010, 0.020])
        assert (
            doubling(200) == [1, 2, 4, 8, 16, 32, 64, 128, 200] and doubling(8) == [1, 2, 4, 8] and doubling(1) == [1]
        )

    @pytest.mark.parametrize(
        ("lags", "rows", "seconds", "message"),
        [
            ((1, 2), (1,), [[0.1]], r"must have 2 lags x 1 rows of seconds, at least one, got shape \(1, 1\)"),
            ((2, 1), (1,), [[0.1], [0.2]], r"lags and rows of the switching costs must rise, got \[2, 1\] and \[1\]"),
            ((1,), (1,), [[-0.1]], "at least 0 seconds, got -0.1"),
        ],
    )
    def test_what_is_no_table_is_refused(self, lags, rows, seconds, message):
        with pytest.raises(ConfigError, match=message):
            SwitchTable(lags, rows, np.array(seconds))


class TestChainCosts:
    def test_predicted_before_anything_was_tried(self):
        """2 rows, acceptance 0.7: 2, 4, 8 and 8 packed tokens; 0, 2, 4, 6 ms of levels; 4 ms of feeding."""
        seconds, tokens = costs_of_chains(limits_of(max_depth=3)).predicted(2)
        np.testing.assert_allclose(seconds, [0.022, 0.024 + 0.006, 0.028 + 0.008, 0.028 + 0.010])
        np.testing.assert_allclose(tokens, [1, 1.7, 2.19, 2.533])

    def test_rows_share_a_budget_that_holds_no_whole_chains(self):
        """12 tokens for 8 rows: half a node each, 12 packed tokens at most."""
        seconds, tokens = costs_of_chains(limits_of(max_depth=3, max_tree_tokens=12)).predicted(8)
        np.testing.assert_allclose(tokens, [1, 1.35, 1.35, 1.35])
        np.testing.assert_allclose(seconds, [0.028, 0.036 + 0.006, 0.036 + 0.008, 0.036 + 0.010])

    def test_prompts_and_lagging_drafts_are_not_the_chains_to_answer_for(self):
        """4 of 8 tokens are of a prompt. 20 tokens of catch-up, of which 4 are usual: 10 ms in the place of 4."""
        costs = costs_of_chains(limits_of(max_depth=3))
        assert costs.decode_s(step_of(1, 2, 3, 0.06, catchup_tokens=4), 1) == 0.06
        assert costs.decode_s(step_of(1, 2, 3, 0.06, prefill_tokens=4), 1) == pytest.approx(0.03)
        assert costs.decode_s(step_of(1, 2, 3, 0.06, catchup_tokens=20), 1) == pytest.approx(0.054)
        assert costs.decode_s(step_of(1, 2, 3, 0.001, catchup_tokens=20), 1) == pytest.approx(0.0001)


class TestSchedule:
    def test_blocks_last_as_long_as_they_should(self):
        schedule = ExplorationSchedule()
        ends = [step for step in range(1, 493) if schedule.advance()]
        assert np.diff([0, *ends]).tolist() == [1, 1, 4, 4, 16, 25, 64, 121, 256]

    @pytest.mark.parametrize(("rule", "power"), [(V2, 1.0), (V1, 0.5), (BINGREEDY, 0.5)])
    def test_the_chance_to_explore_falls_with_the_bin(self, rule, power):
        """No arm is left that might be the best one and was not tried."""
        controller = nightjar(rule)
        bucket = controller.bucket(4)
        bucket.played[:] = TRIAL_STEPS
        explored = np.zeros((4, 1000))
        for bin_index, step in np.ndindex(explored.shape):
            bucket.schedule.bin = bin_index + 1
            controller.choose(bucket, load_of(4))
            explored[bin_index, step] = bucket.explores
        expected = np.minimum(np.arange(1, 5.0) ** -power, rule.explore_most)
        np.testing.assert_allclose(explored.mean(1), expected, atol=0.04)

    def test_arms_near_the_best_are_tried_first_until_they_were_played_some_steps(self):
        """Latencies 10, 11, 12.4 and 13 ms: the second and the third are within a quarter of the first."""
        controller = nightjar(V2)
        bucket = controller.bucket(4)
        bucket.row_s, bucket.tokens = np.array([10.0, 11.0, 12.4, 13.0]), np.full(4, 1000.0)
        load = load_of(4)
        controller.loss = lambda bucket, load: bucket.latency_s  # type: ignore[method-assign]

        def explored() -> set[int]:
            arms = [controller.choose(bucket, load) for _ in range(50)]
            assert bucket.explores, "the first bin of a block explores while there are such arms"
            return set(arms)

        assert explored() == {1, 2}
        bucket.played[1] = TRIAL_STEPS
        assert explored() == {2}
        bucket.played[2] = TRIAL_STEPS
        arms = [controller.choose(bucket, load) for _ in range(200)]
        assert arms.count(0) > 150 and len(set(arms)) > 1, "one bin in ten explores"


class TestBucket:
    @pytest.mark.parametrize(("rows", "given_up_at"), [(8, TRIAL_STEPS), (1, TRIAL_ROWS), (3, 6)])
    def test_an_arm_on_trial_is_given_up_once_it_was_seen_enough_and_is_worse(self, rows, given_up_at):
        """The best arm takes 20 ms a token; 30 ms are worse, 10 ms are not. Enough are 4 steps and 16 rows of them."""
        for step_s, gives_up in ((0.03, True), (0.01, False)):
            bucket = ArmBucket(np.array([0.02, 0.02]), np.array([1.0, 1.0]), rows)
            bucket.begin_trial(1)
            told = [bucket.on_trial(rows, step_s, rows) for _ in range(20)]
            assert told == [gives_up and step >= given_up_at for step in range(1, 21)]

    def test_a_trial_is_judged_by_its_own_steps(self):
        bucket = ArmBucket(np.array([0.02, 0.02]), np.array([1.0, 1.0]), 8)
        for _ in range(TRIAL_STEPS):
            bucket.on_trial(8, 0.03, 8)
        bucket.begin_trial(1)
        assert not any(bucket.on_trial(8, 0.03, 8) for _ in range(TRIAL_STEPS - 1))

    def test_what_is_not_seen_again_gives_way_to_the_prediction(self):
        bucket = ArmBucket(np.array([0.1, 0.1]), np.array([1.0, 2.0]), rows=4)
        predicted = bucket.latency_s.copy()
        bucket.learn(0, 4, 0.3, 4)
        assert bucket.latency_s[0] == pytest.approx((0.4 + 1.2) / 8)
        bucket.fade()
        assert bucket.latency_s[0] == pytest.approx((0.4 + 0.6) / 6)
        for _ in range(40):
            bucket.fade()
        np.testing.assert_allclose(bucket.latency_s, predicted)
        assert bucket.played.tolist() == [1, 0]

    def test_it_begins_with_the_prediction_and_adds_sums(self):
        """Sums, not means of ratios: 40 ms for 2 rows' 2 tokens and then 30 ms for their 6 are 140 ms for 8."""
        bucket = ArmBucket(np.array([0.02, 0.03]), np.array([1.0, 1.5]), rows=2)
        np.testing.assert_allclose(bucket.latency_s, [0.02, 0.02])
        bucket.learn(1, 2, 0.040, 2)
        bucket.learn(1, 2, 0.030, 6)
        np.testing.assert_allclose(bucket.latency_s, [0.02, (0.06 + 0.08 + 0.06) / (3 + 2 + 6)])
        np.testing.assert_allclose(bucket.row_steps, [2, 6])

    def test_one_step_that_hung_counts_as_four(self):
        bucket = ArmBucket(np.array([0.02]), np.array([1.0]), rows=1)
        bucket.learn(0, 1, 5.0, 1)
        assert bucket.latency_s[0] == pytest.approx((0.02 + 0.08) / 2)

    def test_it_forgets_what_is_older_than_its_memory(self):
        bucket = ArmBucket(np.array([0.02]), np.array([1.0]), rows=3)
        for _ in range(3 * MEMORY_STEPS):
            bucket.learn(0, 3, 0.02, 3)
        for _ in range(MEMORY_STEPS):
            bucket.learn(0, 3, 0.04, 3)
        assert bucket.row_steps[0] == pytest.approx(3 * MEMORY_STEPS)
        kept = (1 + 1 / MEMORY_STEPS) ** -MEMORY_STEPS
        assert bucket.latency_s[0] == pytest.approx(0.02 * kept + 0.04 * (1 - kept))


class TestNightjar:
    bucket = ArmBucket(np.array([0.020, 0.030, 0.036]), np.array([1.0, 1.5, 2.0]), rows=1)

    def test_loss_while_speculating_favours_to_go_on(self):
        controller = nightjar(max_depth=2)
        np.testing.assert_allclose(controller.loss(self.bucket, load_of(1)), [0.0204, 0.020, 0.018])

    def test_loss_while_off_charges_the_switch_over_the_tokens_of_the_dwell(self):
        """A lag of 200 tokens at one row costs 20.65 ms, over 16 steps of 1.5 or 2 tokens."""
        controller = turned_off(nightjar(max_depth=2))
        expected = [0.020, 0.0204 + 0.02065 / (16 * 1.5), 0.01836 + 0.02065 / (16 * 2)]
        np.testing.assert_allclose(controller.loss(self.bucket, load_of(1, lag=200)), expected)

    def test_bingreedy_knows_no_switch_and_one_size_of_batch(self):
        controller = turned_off(nightjar(BINGREEDY, max_depth=2))
        np.testing.assert_allclose(controller.loss(self.bucket, load_of(1, lag=200)), [0.020, 0.020, 0.018])
        run(controller, [1, 8, 3])
        assert len(controller.arms().arms) == 1

    def test_the_arm_stays_for_a_bin_and_with_its_size_of_batch(self):
        """Steps of another size come in the middle of a bin of 16 steps, and nothing changes."""
        controller = nightjar(seed=3)
        bucket = controller.bucket(4)
        while bucket.schedule.bin_steps < 16 or bucket.schedule.step < 5:
            run(controller, [4])
        arm, step = bucket.arm, bucket.schedule.step
        assert arm is not None
        run(controller, [1] * 40)
        assert (bucket.arm, bucket.schedule.step) == (arm, step)
        depths = run(controller, [4] * MIN_DWELL)
        assert set(depths[depths.index(arm) :][: 17 - step]) == {arm}

    def test_sizes_that_alternate_cannot_switch_without_bound(self):
        """One row gains from drafts, eight lose, and every step is the other's."""
        changes, tries = {}, {}
        for rule in (V2, V1):
            controller = nightjar(rule)
            depths, trials = [], []
            for rows in [1, 8] * 1000:
                depth = controller.decide(load_of(rows)).depth
                trials.append(controller.bucket(rows).explores)
                seconds = 0.03 if rows == 1 else 0.03 * (1 + 3 * depth)
                controller.learn(step_of(depth, rows, rows * (1 + depth), seconds))
                depths.append(depth)
            changes[rule] = np.flatnonzero(np.diff(np.array(depths) > 0))
            tries[rule] = np.array(trials)[changes[rule] + 1]
        gaps = np.diff(changes[V2])
        assert np.mean(gaps >= MIN_DWELL) > 0.6, "what is only tried is not held to"
        chosen = ~tries[V2][1:] & ~tries[V2][:-1]
        assert chosen.any() and gaps[chosen].min() >= MIN_DWELL
        assert len(changes[V2]) < len(changes[V1])

    @pytest.mark.parametrize(("rule", "expected"), [(V2, [0, 256 / 257, 1 / 257]), (V1, [1 / 3] * 3)])
    def test_arms_that_seem_bad_are_explored_less(self, rule, expected):
        """At twice the latency 2 ** 8 times less, and the best is known; uniformly in the first version."""
        controller = nightjar(rule, max_depth=2)
        bucket = ArmBucket(np.array([0.01, 0.02, 0.08]), np.array([1.0, 1.0, 2.0]), rows=1)
        bucket.explores, bucket.schedule.step = True, 2
        drawn = [controller.choose(bucket, load_of(1)) for _ in range(6000)]
        np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 6000, expected, atol=0.02)

    def test_v1_draws_anew_in_each_step_of_an_exploring_bin(self):
        assert len(set(run(nightjar(V1), [4] * 300)[20:46])) > 1

    def test_regret_is_the_time_beyond_what_the_best_arm_would_have_taken(self):
        """Arms of 10, 20, 20 and 40 ms a token: the last one's 30 ms would have been 7.5 with the first."""
        controller = nightjar()
        bucket = controller.bucket(4)
        for arm, expected in ((3, 0.0225), (1, 0.0225 + 0.015), (0, 0.0375)):
            bucket.row_s, bucket.tokens = np.array([1.0, 2.0, 2.0, 4.0]), np.full(4, 100.0)
            bucket.arm = arm
            assert controller.decide(load_of(4)).depth == arm
            controller.learn(step_of(arm, 4, 8, 0.03))
            assert controller.arms().regret_s == pytest.approx(expected)

    def test_sizes_of_batch_share_statistics_up_to_the_next_power_of_two(self):
        controller = nightjar(max_requests=6)
        buckets = [controller.bucket(rows) for rows in range(1, 7)]
        assert [buckets.index(bucket) + 1 for bucket in buckets] == [1, 2, 3, 3, 5, 5]

    def test_a_plan_that_is_forgotten_changes_nothing(self):
        once, twice = nightjar(seed=5), nightjar(seed=5)
        for rows in [4, 4, 2, 4, 8, 4] * 20:
            twice.decide(load_of(rows))
            assert run(once, [rows]) == run(twice, [rows])

    def test_a_step_that_could_not_draft_says_nothing_of_its_chain(self):
        controller = nightjar()
        bucket = controller.bucket(4)
        bucket.arm = 2
        before = bucket.latency_s
        controller.decide(load_of(4))
        controller.learn(Feedback(1, 2, 0, 1, decode_rows=4, decoded=4, step_s=0.5))
        np.testing.assert_array_equal(bucket.latency_s, before)

    def test_without_decode_rows_it_goes_on_as_it_was(self):
        controller = nightjar()
        assert controller.decide(load_of(0, prefill=20)).feed_draft
        turned_off(controller)
        assert not controller.decide(load_of(0, prefill=20)).feed_draft

    def test_without_a_draft_there_is_one_arm(self):
        assert set(run(nightjar(max_depth=0), [1, 2, 3] * 20)) == {0}


class TestLinear:
    def test_ucb_by_hand(self):
        """x = [1, 0.5], reward 0.4: A = [[2, .5], [.5, 1.25]], b = [.4, .2], A^-1 = [[1.25, -.5], [-.5, 2]] / 2.25."""
        limits = limits_of(max_depth=1)
        bandit = LinUcb(limits, costs_of_chains(limits))
        x = np.array([1.0, 0.5])
        bandit.reward(0, x, 0.4)
        weights = [bandit.expected(unit)[0] for unit in np.eye(2)]
        np.testing.assert_allclose(weights, [0.4 / 2.25, 0.2 / 2.25])
        np.testing.assert_allclose(bandit.uncertainty(x), [np.sqrt(1.25 / 2.25), np.sqrt(1.25)])
        np.testing.assert_allclose(bandit.margin(np.array([2.0])), [2 * UCB_WIDTH])

    def test_many_rewards_against_linear_algebra(self):
        limits, rng = limits_of(max_depth=2), np.random.default_rng(0)
        bandit = LinUcb(limits, costs_of_chains(limits))
        seen = {arm: ([], []) for arm in range(3)}
        for _ in range(200):
            arm, x, reward = int(rng.integers(3)), np.array([1.0, rng.random()]), float(rng.random())
            bandit.reward(arm, x, reward)
            seen[arm][0].append(x)
            seen[arm][1].append(reward)
        x = np.array([1.0, 0.3])
        for arm, (xs, rewards) in seen.items():
            design = np.eye(2) + np.array(xs).T @ np.array(xs)
            np.testing.assert_allclose(
                [bandit.expected(unit)[arm] for unit in np.eye(2)], np.linalg.solve(design, np.array(xs).T @ rewards)
            )
            assert bandit.uncertainty(x)[arm] ** 2 == pytest.approx(x @ np.linalg.solve(design, x))

    def test_reward_is_a_rows_tokens_per_second_over_the_most_that_could_be(self):
        """4 rows' 8 tokens in 40 ms are 50 tokens/s each; 3 tokens in a plain step of 21 ms would be the most."""
        limits = limits_of(max_depth=2)
        bandit = LinUcb(limits, costs_of_chains(limits))
        depth = bandit.decide(load_of(4)).depth
        bandit.learn(step_of(depth, 4, 8, 0.04))
        x, reward = np.array([1.0, 0.5]), 50 / (3 / 0.021)
        assert bandit.expected(x)[depth] == pytest.approx(x @ np.linalg.solve(np.eye(2) + np.outer(x, x), reward * x))

    def test_thompson_sampling_draws_what_weights_drawn_from_the_posterior_score(self):
        limits = limits_of(max_depth=1)
        bandit = LinearSampling(limits, costs_of_chains(limits), seed=1)
        x = np.array([1.0, 0.5])
        for reward in (0.2, 0.6, 0.4):
            bandit.reward(1, x, reward)
        design = np.eye(2) + 3 * np.outer(x, x)
        rng = np.random.default_rng(2)
        posterior = rng.multivariate_normal(np.zeros(2), SAMPLING_WIDTH**2 * np.linalg.inv(design), 4000) @ x
        drawn = [bandit.margin(bandit.uncertainty(x))[1] for _ in range(4000)]
        assert np.std(drawn) == pytest.approx(np.std(posterior), rel=0.05)
        assert np.mean(drawn) == pytest.approx(0, abs=0.005)


def test_controllers_are_told_what_a_step_brought():
    """Over a whole run: every token that was not a prompt's first, and all the time of steps with decode rows."""
    harness = Run.of(limits_of(), policy="nightjar")
    told: list[Feedback] = []
    controller = harness.scheduler.controller
    learn = controller.learn
    controller.learn = lambda feedback: (told.append(feedback), learn(feedback))
    load, seconds, waiting = random_load(4, 12, 50.0), [], []
    waiting = list(load)
    while waiting or harness.scheduler.has_work:
        while waiting and waiting[0].arrival_s <= harness.clock.now():
            harness.scheduler.add(waiting.pop(0))
        began = harness.clock.now()
        plan, trees = harness.step()
        if plan is None:
            harness.clock.advance(max(waiting[0].arrival_s - harness.clock.now(), 1e-3))
        elif plan.num_decode:
            seconds.append(harness.clock.now() - began)
            drafts = plan.draft is not None and plan.draft.depth > 0
            assert told[-1].rows == (plan.draft.speculates.sum() if drafts else 0)
            assert told[-1].drafted == trees.num_nodes - plan.num_decode
            assert (told[-1].decode_rows, told[-1].prefill_tokens) == (plan.num_decode, plan.num_prefill_tokens)
            fed = 0 if plan.draft is None else plan.draft.catchup_counts[: plan.num_decode].sum()
            assert told[-1].catchup_tokens == fed
            assert told[-1].emitted <= told[-1].decoded
    np.testing.assert_allclose([feedback.step_s for feedback in told], seconds)
    kept = sum(len(text) for text in harness.text.values())
    assert sum(feedback.decoded for feedback in told) >= kept - len(load)


def test_a_profiled_table_of_switching_costs_goes_before_the_computed_one():
    """Measured in any order; (1, 8) was measured above (16, 8), which is no less then."""
    limits = limits_of()
    measured = {(16, 1): 0.004, (1, 1): 0.001, (16, 8): 0.005, (1, 8): 0.02}
    table = SwitchTable.of(CostTable(replace(SAMPLES, switch_s=measured), limits), limits)
    assert [table.switch_s(*at) for at in [(1, 1), (2, 1), (1, 2), (2, 2), (99, 99)]] == [0.001, 0.004] + 3 * [0.02]


@pytest.mark.parametrize("kind", ["nightjar", "linucb"])
def test_a_step_that_nobody_decided_teaches_nothing(kind):
    limits = limits_of(max_depth=3)
    controller = nightjar() if kind == "nightjar" else LinUcb(limits, costs_of_chains(limits))
    controller.learn(step_of(2, 4, 9))
    assert controller.arms() == ArmReport()
    depth = controller.decide(load_of(4)).depth
    controller.learn(step_of(depth, 4, 4 + depth))
    told = controller.arms()
    controller.learn(step_of(depth, 4, 400))
    assert controller.arms() == told, "what was decided once is learned from once"
