"""What shapes of the draft are expected to bring, against plain loops over nodes."""

import numpy as np

from adaserve_jax.scheduler.controllers.joint import GRID, OUT_OF_REACH, Shapes, _spread
from tests.scheduler.harness import limits_of

CHANCE = np.array([[0.8, 0.15], [0.6, 0.1], [0.5, 0.05]])


def shapes_of() -> Shapes:
    return Shapes.of(limits_of(max_depth=3, max_width=2), (1, 2))


def best_first(shapes: Shapes, option: int) -> list[float]:
    depth, width = int(shapes.depth[option]), int(shapes.width[option])
    return sorted((CHANCE[d, r] for d in range(depth) for r in range(width)), reverse=True)


def test_tokens_by_nodes_are_sums_of_the_best_chances():
    shapes = shapes_of()
    reach = shapes.reach(CHANCE)
    for option in range(len(shapes.depth)):
        best = best_first(shapes, option)
        assert shapes.size[option] == len(best)
        for nodes in range(reach.tokens.shape[1]):
            assert np.isclose(reach.tokens[option, nodes], sum(best[:nodes]))


def test_nodes_for_pace_are_the_fewest_that_reach_the_need_to_a_step_of_the_grid():
    shapes = shapes_of()
    reach = shapes.reach(CHANCE)
    rates = np.array([5.0, 11.0, 20.0, 27.3, 400.0])
    step_s = np.linspace(0.02, 0.12, 4) + np.zeros((len(shapes.depth), 1))
    found = reach.nodes_for(rates, step_s)
    for option, edge, row in np.ndindex(found.shape):
        wanted = np.ceil((max(rates[row] * step_s[option, edge] - 1.0, 0.0)) * GRID - 1e-9) / GRID
        best = best_first(shapes, option)
        fewest = next((n for n in range(len(best) + 1) if sum(best[:n]) >= wanted - 1e-12), OUT_OF_REACH)
        assert found[option, edge, row] == fewest, (option, edge, row)
    some = np.array([3, 1])
    np.testing.assert_array_equal(reach.nodes_for(rates, step_s[some], some), found[some])


def test_gain_is_linear_between_whole_nodes_and_ends_at_the_largest_tree():
    reach = shapes_of().reach(CHANCE)
    np.testing.assert_allclose(reach.gain(np.array([0.5, 1.5, 99.0]), np.array([1])), [[0.4, 0.8, 0.8]])


def test_spread_keeps_both_ends():
    assert _spread(3, 3, 12).tolist() == [3]
    assert _spread(2, 6, 12).tolist() == [2, 3, 4, 5, 6]
    wide = _spread(0, 128, 12)
    assert (wide[0], wide[-1], len(wide)) == (0, 128, 12)
