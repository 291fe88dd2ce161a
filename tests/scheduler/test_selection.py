from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve_jax.errors import BudgetError
from adaserve_jax.scheduler import selection
from adaserve_jax.scheduler.shapes import kernels
from adaserve_jax.types import CandidateTrees
from tests.oracles import selection as oracle

PROBABILITIES = (1.0, 0.9, 0.75, 0.5, 0.4, 0.25, 0.1)  # repeated values make ties
ORDERS = ("cheapest-first", "slowest-first", "fastest-first")


def trees_of(requests, root_token, need, budget, **kwargs):
    """Selection over oracle-style candidate sets; returns the packed trees."""
    columns = max((len(nodes) for nodes in requests), default=0)
    shape = (len(requests), columns)
    depth = np.ones(columns, np.int32)
    parent, log_f = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
    for row, nodes in enumerate(requests):
        for column, (f, level, above) in enumerate(nodes):
            depth[column], parent[row, column] = level, above
            log_f[row, column] = np.log(f) if f > 0 else -np.inf
    token = np.arange(columns * len(requests), dtype=np.int32).reshape(shape)
    candidates = CandidateTrees(token, parent, log_f, depth)
    ranked = selection.rank(candidates)
    trees = selection.select_slo(candidates, root_token, ranked, np.array(need), budget=budget, **kwargs)
    for node in np.flatnonzero(trees.candidate >= 0):
        row, column = trees.row[node], trees.candidate[node]
        assert trees.token[node] == token[row, column]
        above = trees.parent[node]
        assert trees.candidate[above] == parent[row, column]
        assert trees.f[node] == pytest.approx(requests[row][column][0], rel=1e-6)
    assert oracle.is_connected(trees)
    return trees


def chosen_sets(trees, rows):
    return [set(trees.candidate[(trees.row == row) & (trees.candidate >= 0)].tolist()) for row in range(rows)]


@st.composite
def candidate_sets(draw, max_requests=4, max_levels=3, max_width=2):
    """Requests over one (depth, width) grid, beam order, f the product along the path; some nodes absent."""
    levels, width = draw(st.integers(1, max_levels)), draw(st.integers(1, max_width))
    requests = []
    for _ in range(draw(st.integers(1, max_requests))):
        nodes = []
        for level in range(1, levels + 1):
            for _ in range(width):
                above = -1 if level == 1 else (level - 2) * width + draw(st.integers(0, width - 1))
                f = (1.0 if above < 0 else nodes[above][0]) * draw(st.sampled_from((*PROBABILITIES, 0.0)))
                nodes.append((f, level, above))
        requests.append(nodes)
    need = [draw(st.sampled_from((-1.0, 0.3, 1.0, 1.45, 1.83, 2.62, 4.0))) for _ in requests]
    spare = draw(st.integers(0, 8))
    return requests, need, len(requests) + spare


@settings(max_examples=120, deadline=None)
@given(candidate_sets(), st.sampled_from(ORDERS), st.sampled_from((0, 1, 2)))
def test_equals_algorithm_2_written_as_loops(case, order, n_max):
    requests, need, budget = case
    rows = len(requests)
    trees = trees_of(requests, np.arange(rows), need, budget, order=order, max_slo_nodes=n_max)

    def nodes_to_need(i):
        ranked = sorted((node[0] for node in requests[i]), reverse=True)
        reached, nodes = 1.0, 0
        while reached < need[i] and nodes < len(ranked) and ranked[nodes] > 0:
            reached += ranked[nodes]
            nodes += 1
        capped = min(nodes, n_max) if n_max else nodes
        return (reached < need[i], capped)

    sort_key = {"cheapest-first": nodes_to_need, "slowest-first": lambda i: -need[i], "fastest-first": need.__getitem__}
    expected = oracle.algorithm_2(requests, need, budget, n_max, sorted(range(rows), key=sort_key[order]))
    assert chosen_sets(trees, rows) == expected


@settings(max_examples=40, deadline=None)
@given(candidate_sets(max_requests=3, max_levels=2))
def test_cheapest_first_meets_as_many_needs_as_possible(case):
    requests, need, budget = case
    trees = trees_of(requests, np.arange(len(requests)), need, budget, order="cheapest-first")
    reached = np.bincount(trees.row, trees.f)
    assert (reached >= np.array(need) - 1e-6).sum() == oracle.most_met(requests, need, budget)


def test_figure_5():
    """Read as A = 1.6 and 1.8, B = 8: two roots, 1 + 2 nodes for the targets, 3 for throughput."""
    first = [(0.7, 1, -1), (0.2, 1, -1), (0.3, 2, 0), (0.15, 2, 0), (0.25, 3, 2), (0.05, 3, 2)]
    second = [(0.5, 1, -1), (0.4, 1, -1), (0.35, 2, 0), (0.1, 2, 1), (0.08, 3, 2), (0.02, 3, 2)]
    requests, need = [first, second], [1.6, 1.8]
    taken = selection.slo_phase(
        np.sort([[f for f, *_ in r] for r in requests])[:, ::-1].copy(), np.array(need), budget=8
    )
    assert taken.tolist() == [1, 2]
    trees = trees_of(requests, np.array([7, 8]), need, 8)
    assert trees.num_nodes == 8
    assert chosen_sets(trees, 2) == [{0, 2, 4}, {0, 1, 2}]
    assert trees.token[trees.candidate < 0].tolist() == [7, 8]


def test_budget_below_one_root_each_is_refused():
    with pytest.raises(BudgetError, match="at least 2 tokens, one root per request, got 1"):
        trees_of([[(0.9, 1, -1)], [(0.8, 1, -1)]], np.array([3, 4]), [2.0, 2.0], 1)


def test_no_requests():
    trees = trees_of([], np.zeros(0, np.int32), [], 0)
    assert trees.num_nodes == 0


def test_no_candidates():
    trees = trees_of([[], []], np.array([3, 4]), [2.0, 2.0], 9)
    assert (trees.row.tolist(), trees.token.tolist(), trees.parent.tolist()) == ([0, 1], [3, 4], [-1, -1])
    absent = trees_of([[(0.0, 1, -1)], [(0.5, 1, -1)]], np.array([3, 4]), [2.0, 2.0], 9)
    assert chosen_sets(absent, 2) == [set(), {0}]


def test_certain_chain_keeps_parents_before_children():
    chain = [(1.0, level + 1, level - 1) for level in range(5)]
    trees = trees_of([chain, chain], np.array([1, 2]), [3.0, 1.0], 7)
    assert chosen_sets(trees, 2) == [{0, 1, 2}, {0, 1}]
    assert trees.parent.tolist() == [-1, 0, 1, 2, -1, 4, 5]


@pytest.mark.parametrize(("log_f", "closed"), [
    ([-np.inf, -1.0, -0.1, np.nan], [-np.inf, -1.0, -np.inf, -np.inf]),
    ([-3.0, -1.0, -0.1, -2.0], [-3.0, -1.0, -3.0, -2.0]),
    ([0.5, np.nan, 0.2, -0.5], [0.0, -np.inf, 0.0, -np.inf]),
])  # fmt: skip
def test_child_likelier_than_its_parent_never_comes_alone(log_f, closed):
    parent, token = np.array([[-1, -1, 0, 1]], np.int32), np.arange(4, dtype=np.int32)[None]
    candidates = CandidateTrees(token, parent, np.array([log_f], np.float32), np.array([1, 1, 2, 2], np.int32))
    ranked = selection.rank(candidates)
    found = dict(zip(ranked.column[0].tolist(), ranked.f[0].tolist(), strict=True))
    assert [found[column] for column in range(4)] == pytest.approx(np.exp(closed).tolist())


def test_candidates_as_a_device_returns_them_compile_nothing_again():
    """Arrays that are read-only or lie in columns have types of their own to numba."""
    rows, columns = 3, 4
    depth, parent = np.arange(1, 5, dtype=np.int32), np.tile(np.arange(-1, 3, dtype=np.int32), (rows, 1))
    token = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    arrays = [token, parent, np.tile(np.log([0.9, 0.7, 0.5, 0.3]).astype(np.float32), (rows, 1)), depth]
    expected = selection.rank(CandidateTrees(*arrays))
    loops = kernels()
    compiled = [loops.cost, loops.rank, loops.slo_phase, loops.throughput_phase, loops.pack]
    before = [len(each.signatures) for each in compiled]
    for order in ("C", "F"):
        given = [np.array(each, order=order) for each in arrays]
        for each in given:
            each.flags.writeable = False
        candidates, root = CandidateTrees(*given), np.broadcast_to(np.int32(7), rows)
        ranked = selection.rank(candidates)
        np.testing.assert_array_equal(ranked.key, expected.key)
        assert selection.select_slo(candidates, root, ranked, np.full(rows, 1.5), budget=8).num_nodes == 8
        assert selection.pack(candidates, root, ranked, selection.equal_share(ranked, 4)).num_nodes == 7
        assert selection.pack_all(candidates, root).num_nodes == 15
    assert [len(each.signatures) for each in compiled] == before


def test_equal_share_fills_level_by_level():
    chain = np.log(np.array([[0.9, 0.8, 0.7], [0.5, 0.3, 0.0], [0.2, 0.1, 0.05]]) + 1e-300).astype(np.float32)
    chain[1, 2] = -np.inf
    parent = np.broadcast_to(np.array([-1, 0, 1], np.int32), (3, 3))
    candidates = CandidateTrees(np.zeros((3, 3), np.int32), parent, chain, np.array([1, 2, 3], np.int32))
    ranked = selection.rank(candidates)
    counts = [selection.equal_share(ranked, left).sum(axis=1).tolist() for left in (-1, 0, 2, 5, 7, 99)]
    assert counts == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [2, 2, 1], [3, 2, 2], [3, 2, 3]]


@pytest.mark.parametrize(("order", "expected"), [("slowest-first", [1, 0]), ("fastest-first", [0, 1])])
def test_who_is_served_first_has_the_last_node(order, expected):
    """One node is left for two requests, of which the first needs more."""
    f, need = np.array([[0.9, 0.8], [0.9, 0.8]]), np.array([2.5, 1.5])
    assert selection.slo_phase(f, need, budget=3, order=order).tolist() == expected


def test_a_request_that_cannot_reach_its_need_is_served_last():
    """The first wants 1 node and would still be short of 3 tokens; the second reaches 2.5 tokens with 2 nodes."""
    f = np.array([[0.5, 0.0], [0.9, 0.7]])
    assert selection.slo_phase(f, np.array([3.0, 2.5]), budget=4).tolist() == [0, 2]


def test_an_equal_rest_is_shared_level_by_level_beyond_what_was_taken():
    """The first request has one of three already; the second has two to give, and takes part from its first on."""
    ranked = selection.Ranked(
        np.arange(6).reshape(2, 3), np.array([[0.9, 0.8, 0.7], [0.5, 0.3, 0.0]]), np.zeros((2, 3))
    )
    taken = np.array([1, 0])
    counts = [selection.equal_rest(ranked, taken, left).sum(axis=1).tolist() for left in (-1, 0, 1, 2, 3, 4, 9)]
    assert counts == [[1, 0], [1, 0], [2, 0], [2, 1], [3, 1], [3, 2], [3, 2]]


def test_nodes_of_vanishing_probability_stay_connected():
    chain = [(1e-30, 1, -1), (1e-60, 2, 0), (1e-90, 3, 1)]
    trees = trees_of([chain], np.array([0]), [1.0], 4)
    assert chosen_sets(trees, 1) == [{0, 1, 2}]


@settings(max_examples=60, deadline=None)
@given(candidate_sets(max_requests=4, max_levels=4, max_width=2), st.booleans())
def test_a_budget_that_holds_all_takes_all_without_ranking(case, spoilt):
    """Beside the trees that ranking and packing make, with parents less likely than their children and NaNs too."""
    requests = case[0]
    candidates = candidates_of(requests)
    if spoilt:
        rng = np.random.default_rng(candidates.log_f.size)
        noise = rng.choice([0.0, -1.0, 0.5, np.nan], candidates.log_f.shape)
        candidates = replace(candidates, log_f=(candidates.log_f + noise).astype(np.float32))
    root, ranked = np.arange(len(requests), dtype=np.int32), selection.rank(candidates)
    expected = selection.pack(candidates, root, ranked, ranked.f > 0)
    assert_same(selection.pack_all(candidates, root), expected)
    assert oracle.is_connected(expected)


def assert_same(trees, expected):
    for name in ("row", "token", "parent", "depth", "candidate", "f"):
        np.testing.assert_array_equal(getattr(trees, name), getattr(expected, name), err_msg=name)
        assert getattr(trees, name).dtype == getattr(expected, name).dtype


def candidates_of(requests):
    columns = len(requests[0])
    depth = np.array([level for _, level, _ in requests[0]], np.int32)
    parent = np.array([[above for _, _, above in nodes] for nodes in requests], np.int32)
    with np.errstate(divide="ignore"):
        log_f = np.log(np.array([[f for f, _, _ in nodes] for nodes in requests])).astype(np.float32)
    token = np.arange(columns * len(requests), dtype=np.int32).reshape(-1, columns)
    return CandidateTrees(token, parent, log_f, depth)


@settings(max_examples=60, deadline=None)
@given(candidate_sets(max_requests=4, max_levels=4, max_width=1), st.integers(0, 12), st.booleans())
def test_chains_are_ranked_and_shared_as_any_tree_is(case, left, spoilt):
    """A second column of absent nodes makes trees of the same chains, which rank and share alike."""
    chains = candidates_of(case[0])
    rows, columns = chains.log_f.shape
    if spoilt:
        noise = np.random.default_rng(columns).choice([0.0, -1.0, 0.5, np.nan], chains.log_f.shape)
        chains = replace(chains, log_f=(chains.log_f + noise).astype(np.float32))
    beside = np.full((rows, columns), -np.inf, np.float32)
    above = np.where(chains.parent < 0, -1, 2 * chains.parent).astype(np.int32)
    trees = CandidateTrees(
        np.repeat(chains.token, 2, axis=1),
        np.repeat(above, 2, axis=1),
        np.stack([chains.log_f, beside], axis=2).reshape(rows, 2 * columns),
        np.repeat(chains.depth, 2),
    )
    found, expected = selection.rank(chains), selection.rank(trees)
    np.testing.assert_array_equal(found.f, expected.f[:, :columns])
    for rule in (selection.equal_share, selection.best_overall):
        np.testing.assert_array_equal(rule(found, left), rule(expected, left)[:, :columns])
    present = [(place, row) for row in range(rows) for place in range(columns) if found.f[row, place] > 0]
    shared = {(place, row) for row, place in zip(*np.nonzero(selection.equal_share(found, left)), strict=True)}
    assert shared == set(sorted(present)[:left])


def chains_of(f):
    """Rank chains whose nodes have these f, [R, C]."""
    f = np.asarray(f, np.float64)
    depth = np.arange(1, f.shape[1] + 1, dtype=np.int32)
    parent = np.tile(np.arange(-1, f.shape[1] - 1, dtype=np.int32), (len(f), 1))
    token = np.zeros(f.shape, np.int32)
    log_f = np.log(f, out=np.full(f.shape, -np.inf), where=f > 0).astype(np.float32)
    return selection.rank(CandidateTrees(token, parent, log_f, depth))


@pytest.mark.parametrize(("confidence", "length"), [(0.9, 2), (0.0, 0)])
def test_dsparks_own_example(confidence, length):
    """Appendix A: steps per second 1, 0.5 and 0.45 for batches of 1, 2 and 3. With a_1 = 0.8 and c_2 = 0.9, tokens per
    second are 1, 0.9 and 1.134; with c_2 = 0, there is no second node, and none is worth 0.9."""
    ranked = chains_of([[0.8, 0.8 * confidence]])
    chosen = selection.most_per_second(ranked, np.array([0, 1, 2]), 1 / np.array([1.0, 0.5, 0.45]))
    assert chosen.sum() == length


@given(
    st.lists(st.lists(st.sampled_from((*PROBABILITIES, 0.0)), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 14), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_most_per_second_equals_trying_every_size(chances, sizes, targets, seed):
    rng, f = np.random.default_rng(seed), np.cumprod(chances, axis=1)
    sizes = np.sort(np.array(sizes))
    step_s, need = np.sort(rng.uniform(0.01, 0.1, len(sizes))), rng.uniform(0.5, 3.0, (len(f), len(sizes)))
    ranked = chains_of(f)
    nodes = sorted(
        (int(ranked.key[row, place]), row, place, float(ranked.f[row, place]))
        for row in range(len(f)) for place in range(3) if ranked.f[row, place] > 0
    )  # fmt: skip
    judged = []
    for index, size in enumerate(sizes.tolist()):
        expected = [1.0 + sum(each for _, row, _, each in nodes[:size] if row == wanted) for wanted in range(len(f))]
        met = sum(have >= want for have, want in zip(expected, need[:, index], strict=True)) if targets else 0
        judged.append((met, sum(expected) / step_s[index]))
    found = selection.most_per_second(ranked, sizes, step_s, need if targets else None)
    taken = {(row, place) for row, place in zip(*found.nonzero(), strict=True)}
    for index, size in enumerate(sizes.tolist()):
        if taken == {(row, place) for _, row, place, _ in nodes[:size]} and judged[index][0] == max(judged)[0]:
            assert judged[index][1] == pytest.approx(max(judged)[1])
            return
    raise AssertionError("no size has these nodes and keeps as many targets")


def test_only_needed_leaves_the_rest():
    ranked = chains_of([[0.9, 0.81], [0.5, 0.25], [0.4, 0.2]])
    chosen = selection.only_needed(ranked, np.array([2, 0, 1]), left=10)
    np.testing.assert_array_equal(chosen, [[True, True], [False, False], [True, False]])


def test_the_longest_path_of_text_leaves_absent_nodes_absent():
    """64 tokens deep, as `suffix_depth` allows, beside a node of that depth that is not there."""
    depth = np.array([*range(1, 65), 64], np.int32)
    parent = np.tile(np.array([*range(-1, 63), 62], np.int32), (2, 1))
    log_f = np.zeros((2, 65), np.float32)
    log_f[:, -1] = -np.inf
    ranked = selection.rank(CandidateTrees(np.zeros((2, 65), np.int32), parent, log_f, depth))
    assert (ranked.f == [1.0] * 64 + [0.0]).all()
    assert (ranked.column == np.arange(65)).all()
