from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Load
from adaserve_jax.scheduler.controllers.baselines import ClosedFormController, FixedController
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.objective import BudgetQuestion, Objective, choose_budget
from adaserve_jax.types import CostSamples
from tests.scheduler.harness import limits_of


def load_of(rows, *, need=0.0, lag=2, prefill=0, waited=0.0, speculate=True):
    return Load(
        need_rate=np.full(rows, need, np.float64),
        draft_lag=np.full(rows, lag),
        can_speculate=np.full(rows, speculate),
        num_prefill=int(prefill > 0),
        prefill_tokens=prefill,
        wait_ratio=waited,
    )


def joint(limits, *, token_s=0.0, level_s=0.0005, knee=0, objective=None):
    """A machine with 10 ms steps, `token_s` more for each token beyond `knee`, and a draft of `level_s` a level."""
    verify = {(edge, 1): 0.01 + token_s * max(0, edge - knee) for edge in limits.token_edges}
    levels = {(1, width): level_s for width in (1, limits.max_width)}
    costs = CostTable(CostSamples(verify, {64: 0.0002}, levels), limits)
    acceptance = LearnedAcceptance(limits.max_depth, limits.max_width)
    return JointController(limits, costs, acceptance, objective or Objective())


def test_fixed_chain_takes_the_rest_for_prefill_and_never_all():
    limits = limits_of()
    assert FixedController(limits, 4).decide(load_of(3, prefill=100)).tree_token_cap == 15
    assert FixedController(limits, 4).decide(load_of(3, prefill=100)).prefill_tokens == 49
    crowded = FixedController(limits_of(max_tree_tokens=64, max_requests=16), 8).decide(load_of(15, prefill=100))
    assert (crowded.tree_token_cap, crowded.prefill_tokens) == (48, 16)
    off = FixedController(limits, 0).decide(load_of(3, prefill=5))
    assert (off.depth, off.tree_token_cap, off.prefill_tokens, off.feed_draft) == (0, 3, 5, False)


def test_eq_8_and_9_by_hand():
    """B1 = 512, B2 = 96, c1 = 2, c2 = -1: at n = 30, d = 512 // 32 - 1 = 15 and w = 96 // 30 - 1 = 2."""
    limits = limits_of(max_depth=16, max_width=8, max_tree_tokens=512, token_edges=(1024,))
    closed = ClosedFormController(limits, 512, 96, depth_offset=2, width_offset=-1, min_depth=4)
    assert [(closed.decide(load_of(n)).depth, closed.decide(load_of(n)).width) for n in (1, 30, 60, 126)] == [
        (16, 8),
        (15, 2),
        (7, 1),
        (4, 1),
    ]
    scaled = ClosedFormController.for_limits(limits_of(max_tree_tokens=128))
    assert (scaled.verify_tokens, scaled.draft_tokens) == (128, 24)


def test_free_verification_speculates_deep_and_dear_verification_not_at_all():
    limits = limits_of()
    assert joint(limits).decide(load_of(4)).depth == limits.max_depth
    assert joint(limits, token_s=0.01).decide(load_of(4)).depth == 0
    assert joint(limits, level_s=0.1).decide(load_of(4)).depth == 0
    assert joint(limits).decide(load_of(4, speculate=False)).depth == 0


def test_trees_shrink_where_more_tokens_read_more_experts():
    """One token takes 10 ms on both machines, 8 of which read weights. On the mixture each token reads two of eight
    experts: two tokens 7/16 of them, and a large batch all, so that one more costs nothing there."""
    limits = limits_of(token_edges=(1, 2, 4, 8, 16, 32, 64))

    def table(read):
        verify = {(edge, 1): 0.002 + 0.008 * read(edge) for edge in limits.token_edges}
        levels = {(1, width): 0.0005 for width in (1, limits.max_width)}
        return CostTable(CostSamples(verify, {64: 0.0002}, levels), limits)

    def decided(rows, read):
        acceptance = LearnedAcceptance(limits.max_depth, limits.max_width)
        return JointController(limits, table(read), acceptance, Objective()).decide(load_of(rows))

    def budget(read):
        """Tree tokens of one request whose candidates are taken with 0.7, 0.49, ..."""
        question = BudgetQuestion(
            np.zeros(1), np.array(limits.token_edges), table(read).verify_s(1), 0.002, 0, 0.0, 48, 4, 0.01
        )
        return choose_budget(Objective(), 0.7 ** np.arange(1, 13)[None], question)[0]

    def dense(tokens):
        return 1.0

    def mixture(tokens):
        return (1 - (1 - 2 / 8) ** tokens) * 4

    small, large = decided(1, mixture), decided(1, dense)
    assert small.depth < large.depth and small.width < large.width
    assert budget(mixture) <= 4 < budget(dense)
    assert decided(1, mixture).depth < decided(8, mixture).depth


def test_long_contexts_make_a_draft_too_dear_that_is_cheap_at_short_ones():
    """A level costs 0.5 ms with a token of context and 10 ms more with 100: then a level takes as long as the step."""
    limits = limits_of()
    levels = {(1, width): 0.0005 for width in (1, limits.max_width)}
    verify = {(edge, 1): 0.01 for edge in limits.token_edges}
    samples = CostSamples(verify, {64: 0.0002}, levels, 1, 4, level_per_context_s=dict.fromkeys(levels, 1e-4))
    acceptance = LearnedAcceptance(limits.max_depth, limits.max_width)
    controller = JointController(limits, CostTable(samples, limits), acceptance, Objective())
    depths = [controller.decide(replace(load_of(4), context=np.full(4, c))).depth for c in (1, 40, 100, 1000)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == limits.max_depth and depths[-1] == 0
    one_long = replace(load_of(4), context=np.array([1, 1000, 1, 1]))
    assert controller.decide(one_long).depth == 0  # all wait for it


def test_depth_shrinks_as_load_grows():
    limits = limits_of(max_requests=48, max_tree_tokens=64, token_edges=(1, 2, 4, 8, 16, 32, 64, 128))
    controller = joint(limits, token_s=0.0004)
    depths = [controller.decide(load_of(rows)).depth for rows in (1, 2, 4, 8, 16, 32, 48)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 3
    assert depths[-1] <= 1


def test_a_tight_target_buys_speculation_that_throughput_would_not():
    controller = joint(limits_of(), token_s=0.004, knee=2)
    assert controller.decide(load_of(2)).depth == 0
    assert controller.decide(load_of(2, need=105.0)).depth > 0
    assert controller.decide(load_of(2, need=np.inf)).depth == 0, "hopeless requests are served best-effort"


def test_prefill_chunk_yields_to_targets_and_grows_as_the_oldest_wait_grows():
    limits = limits_of(token_edges=(8, 16, 32, 64))
    weights = Objective(prefill=0.02, prefill_wait=2.0)
    controller = joint(limits, token_s=0.0005, knee=4, objective=weights)
    calm = controller.decide(load_of(4, need=70.0, prefill=500))
    urgent = controller.decide(load_of(4, need=70.0, prefill=500, waited=1.0))
    assert 0 < calm.prefill_tokens < urgent.prefill_tokens
    alone = controller.decide(load_of(0, prefill=500))
    assert (alone.depth, alone.prefill_tokens, alone.feed_draft) == (0, 64, True)


def test_what_can_be_sustained():
    """10 ms steps up to 16 tokens, then 10 ms more for each; 0.7 expected of the first node, 8 rows at most."""
    controller = joint(limits_of(), token_s=0.01, knee=16)
    plain = np.full(8, 80.0)  # one token per 12.5 ms: roots suffice
    assert controller.sustains(plain[:4], 0, 0, 0.6)
    brisk = np.full(2, 140.0)
    assert controller.sustains(brisk, 0, 0, 0.6)
    assert not controller.sustains(np.full(8, 140.0), 0, 0, 0.6), "8 x 2 nodes and roots do not fit a share of 16"
    assert not controller.sustains(plain[:4], 8, 0, 0.6), "twelve rows need more than 0.6 of 16"
    assert not controller.sustains(plain[:4], 0, 0, 0.2), "four rows need more than 0.2 of 16"
    assert not controller.sustains(brisk, 0, 14, 0.6), "prefill takes the room"
    assert controller.sustains(np.full(8, 1e6), 0, 0, 0.6), "what nobody could meet keeps nobody waiting"
    assert not controller.sustains(np.array([*np.full(8, 140.0), 1e6]), 0, 0, 0.6)
    assert FixedController(limits_of(), 4).sustains(np.full(8, 1e6), 0, 0, 0.6)


def test_long_lag_is_weighed_over_the_steps_that_it_serves():
    limits = limits_of()
    assert joint(limits, level_s=0.001).decide(load_of(4, lag=60)).depth > 0


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_budget_choice_equals_a_search_by_loops(rows):
    rng = np.random.default_rng(rows)
    edges = np.array([1, 2, 4, 8, 16, 32, 64])
    objective = Objective()
    for _ in range(60):
        f = np.sort(rng.choice([0.0, 0.1, 0.25, 0.5, 0.75], (rows, 6)))[:, ::-1].copy()
        rate = rng.choice([0.0, 40.0, 90.0, 140.0, 200.0, np.inf], rows)
        question = BudgetQuestion(
            need_rate=rate,
            edges=edges,
            verify_s=np.sort(rng.uniform(0.01, 0.04, len(edges))),
            spent_s=0.003,
            prefill_tokens=int(rng.integers(0 if rows else 1, 9)),
            prefill_weight=0.3,
            tree_token_cap=40,
            depth=4,
            baseline_s=0.01,
        )
        budget, need = choose_budget(objective, f, question)
        scores, lasts_s = {}, {}
        for edge, seconds in zip(edges, question.verify_s, strict=True):
            tokens = min(edge - question.prefill_tokens, 40)
            if tokens < rows:
                continue
            step_s = 0.003 + seconds
            left, on_pace = tokens - rows, 0
            costs = []
            for row in range(rows):
                if np.isfinite(rate[row]):
                    reached, nodes = 1.0, 0
                    wanted = min(rate[row] * step_s, 5.0)
                    while reached < wanted and nodes < 6 and f[row, nodes] > 0:
                        reached += f[row, nodes]
                        nodes += 1
                    if reached >= wanted:
                        costs.append(nodes)
            for cost in sorted(costs):
                if cost <= left:
                    left, on_pace = left - cost, on_pace + 1
            emitted = rows + np.sort(f, axis=None)[::-1][: tokens - rows].sum()
            scores[tokens] = on_pace + (objective.emit * emitted + 0.3 * question.prefill_tokens) * 0.01 / step_s
            lasts_s[tokens] = step_s
            if tokens - rows >= np.count_nonzero(f):
                break
        assert scores[budget] == pytest.approx(max(scores.values()))
        hopeless = np.isinf(rate)
        assert len(need) == rows and (need[hopeless] == 0).all()
        assert need[~hopeless] == pytest.approx(np.minimum(rate[~hopeless] * lasts_s[budget], 5.0))
