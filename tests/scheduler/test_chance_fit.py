"""The fit of chances: pooling against its textbook form, recovery of known chances, leaning where little was seen."""

from __future__ import annotations

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import PSEUDO_OUTCOMES, fit, non_decreasing

SHAPE = (2, 3, 2, 8)


def true_chances() -> np.ndarray:
    """Growing along the bins, falling with depth and rank, other by mode."""
    bins = np.linspace(-2.5, 2.5, SHAPE[3])
    depth, rank, mode = np.arange(SHAPE[1]) * -0.3, np.arange(SHAPE[2]) * -1.0, np.array([0.0, 0.5])
    odds = mode[:, None, None, None] + depth[None, :, None, None] + rank[None, None, :, None] + bins
    return 1 / (1 + np.exp(-odds))


def pool_adjacent_violators(value: list[float], weight: list[float]) -> list[float]:
    blocks: list[list[float]] = []
    for mean, mass in zip(value, weight, strict=True):
        blocks.append([mean, mass, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            right, left = blocks.pop(), blocks.pop()
            mass = left[1] + right[1]
            blocks.append([(left[0] * left[1] + right[0] * right[1]) / mass, mass, left[2] + right[2]])
    return [mean for mean, _, count in blocks for _ in range(int(count))]


def test_non_decreasing_is_pooling_of_adjacent_violators() -> None:
    rng = np.random.default_rng(0)
    value, weight = rng.random((40, 9)), rng.uniform(1e-3, 50, (40, 9))
    value[:5] = np.sort(value[:5])
    fitted = non_decreasing(value, weight)
    for row in range(40):
        np.testing.assert_allclose(fitted[row], pool_adjacent_violators(value[row].tolist(), weight[row].tolist()))
    np.testing.assert_array_equal(fitted[:5], value[:5])


def test_without_outcomes_it_is_the_prior() -> None:
    prior = true_chances()
    np.testing.assert_allclose(fit(prior, np.zeros(SHAPE), np.zeros(SHAPE)), prior, atol=1e-6)


@pytest.mark.parametrize("prior", [0.5, 0.02, 0.98])
def test_known_chances_are_recovered_from_any_prior(prior: float) -> None:
    """4,000 outcomes a cell: no estimate is further off than 5 standard errors and the prior's weight."""
    true, number = true_chances(), 4000
    accepted = np.random.default_rng(1).binomial(number, true).astype(float)
    found = fit(np.full(SHAPE, prior), np.full(SHAPE, float(number)), accepted)
    assert (np.diff(found, axis=-1) >= 0).all()
    assert (np.abs(found - true) <= 5 * np.sqrt(true * (1 - true) / number) + PSEUDO_OUTCOMES / number).all()


def test_few_outcomes_lean_on_other_depths_scaled() -> None:
    """The prior says that depth 3 is accepted half as often in odds. Depth 1 turns out better than the prior, and of
    depth 3 nothing is seen: it is moved by as much in odds, and keeps its ratio."""
    prior = np.full((1, 3, 1, 4), 0.5)
    prior[:, 2] = 1 / 3
    outcomes, accepted = np.zeros(prior.shape), np.zeros(prior.shape)
    outcomes[0, 0], accepted[0, 0] = 1e6, 0.8e6
    found = fit(prior, outcomes, accepted)
    odds = found / (1 - found)
    np.testing.assert_allclose(odds[0, 0], 4.0, rtol=1e-3)
    np.testing.assert_allclose(odds[0, 2], 2.0, rtol=1e-3)


def test_a_single_outcome_moves_little() -> None:
    prior = true_chances()
    outcomes, accepted = np.zeros(SHAPE), np.zeros(SHAPE)
    outcomes[0, 1, 0, 3] = 1.0
    found = fit(prior, outcomes, accepted)
    assert 0 < np.abs(found - prior).max() < 1 / PSEUDO_OUTCOMES
    np.testing.assert_allclose(found[1], prior[1], atol=1e-6)


def test_shrinkage_beats_plain_shares_where_little_was_seen() -> None:
    """The loaded table is off by a factor in odds; with 6 outcomes a cell the fit is nearer to the truth than that
    table and than the shares themselves."""
    true = true_chances()
    odds = true / (1 - true) / 3
    prior = odds / (1 + odds)
    number = np.full(SHAPE, 6.0)
    accepted = np.random.default_rng(2).binomial(6, true).astype(float)
    error = {
        name: np.abs(table - true).mean()
        for name, table in (("fit", fit(prior, number, accepted)), ("prior", prior), ("share", accepted / number))
    }
    assert error["fit"] < 0.6 * min(error["prior"], error["share"])
