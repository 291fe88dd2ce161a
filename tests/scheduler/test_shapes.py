"""What shapes of the draft are expected to bring and which rows they keep on pace, against plain loops over nodes."""

import numpy as np
import pytest

from adaserve_jax.scheduler.controllers.joint import GRID
from adaserve_jax.scheduler.shapes import (
    Shapes,
    all_on_pace,
    cumulated,
    kernels,
    value_options,
)
from tests.scheduler.harness import limits_of

CHANCE = np.array([[0.8, 0.15], [0.6, 0.1], [0.5, 0.05]])


def shapes_of() -> Shapes:
    return Shapes.of(limits_of(max_depth=3, max_width=2), (1, 2))


def best_first(shapes: Shapes, option: int) -> list[float]:
    depth, width = int(shapes.depth[option]), int(shapes.width[option])
    return sorted((CHANCE[d, r] for d in range(depth) for r in range(width)), reverse=True)


def fewest(best: list[float], rate: float, seconds: float) -> float:
    """Nodes that bring a row the tokens it needs in a step, to a step of the grid; inf where all of them do not."""
    wanted = np.ceil((max(rate * seconds - 1.0, 0.0)) * GRID - 1e-9) / GRID
    return next((n for n in range(len(best) + 1) if sum(best[:n]) >= wanted - 1e-12), np.inf)


def test_tokens_by_nodes_are_sums_of_the_best_chances():
    shapes = shapes_of()
    tokens = shapes.tokens(CHANCE)
    for option in range(len(shapes.depth)):
        best = best_first(shapes, option)
        assert shapes.size[option] == len(best)
        for nodes in range(tokens.shape[1]):
            assert np.isclose(tokens[option, nodes], sum(best[:nodes]))


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize("num_plain", [0, 2, 5])
def test_rows_on_pace_are_as_many_as_the_nodes_can_serve(with_text, num_plain):
    shapes, rng = shapes_of(), np.random.default_rng(num_plain)
    drafted, plain = (np.sort(rng.uniform(5, 60, count)) for count in (5 - num_plain, num_plain))
    step_s = np.linspace(0.02, 0.09, 4) + np.zeros((len(shapes.depth), 1))
    extra = np.array([[-1, 0], [1, 2], [3, 5], [8, 20]])
    f = -np.sort(-rng.uniform(0.2, 0.9, (5, 4)), axis=1)
    text = {"drafted_text": cumulated(f[num_plain:]), "plain_text": cumulated(f[:num_plain])} if with_text else {}
    tokens = shapes.tokens(CHANCE)
    gained, chunk = rng.uniform(0, 9, (*step_s.shape, 2)), np.array([[0, 4]] * 4)
    prompts = np.array([40.0, 150.0, np.inf])

    value, found = value_options(
        drafted, plain, step_s, extra, tokens, GRID,
        gained=gained, chunk=chunk, root_tokens=5, emit=0.7, prefill=0.3, baseline_s=0.03, prompt_rates=prompts,
        **text,
    )  # fmt: skip

    for option, edge, share in np.ndindex(found.shape):
        seconds = float(step_s[option, edge])
        costs = []
        for row, rate in enumerate([*plain, *drafted]):
            cost = fewest(best_first(shapes, option) if row >= num_plain else [], rate, seconds)
            costs.append(min(cost, fewest(list(f[row]), rate, seconds) if with_text else np.inf))
        served = np.cumsum(sorted(costs)) <= extra[edge, share]
        assert found[option, edge, share] == served.sum(), (option, edge, share)
        rate = 0.7 * (5 + gained[option, edge, share]) + 0.3 * chunk[edge, share]
        expected = served.sum() + rate * 0.03 / seconds + np.count_nonzero(prompts <= chunk[edge, share] / seconds)
        assert value[option, edge, share] == (pytest.approx(expected) if extra[edge, share] >= 0 else -np.inf)
    if not (with_text or num_plain):
        for edge, share in np.ndindex(extra.shape):
            alone = all_on_pace(
                drafted, step_s[:, edge : edge + 1].copy(), extra[edge, share : share + 1], tokens, GRID
            )
            assert alone == (found[:, edge, share] == 5).any()
    assert compiled_once()


def test_all_rows_are_on_pace_only_where_one_shape_and_edge_keeps_them_all():
    """Two rows that each gain half a token: a node that brings it for each, in steps that are short enough."""
    tokens, rates = np.array([[0.0, 0.0], [0.0, 0.5]]), np.full(2, 15.0)
    one, two, none = (np.array([n]) for n in (1, 2, -1))
    assert all_on_pace(rates, np.full((2, 1), 0.1), two, tokens, GRID)
    assert not all_on_pace(rates, np.full((2, 1), 0.1), one, tokens, GRID)
    assert not all_on_pace(rates, np.full((2, 1), 0.11), two, tokens, GRID)
    assert all_on_pace(rates, np.array([[0.1], [0.06]]), np.array([0]), tokens, GRID)
    assert not all_on_pace(rates, np.full((2, 1), 0.01), none, tokens, GRID)
    assert not all_on_pace(np.full(1, 1e300), np.full((2, 1), 0.1), two, tokens, GRID)


def compiled_once() -> bool:
    """Return whether no call had arguments of other types than those that the loops were compiled for."""
    loops = kernels()
    compiled = (loops.gain, loops.all_on_pace, loops.value_options)
    return all(len(each.signatures) == 1 for each in compiled)
