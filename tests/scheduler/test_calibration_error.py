"""Expected calibration error against arithmetic by hand."""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.acceptance import (
    NUM_BINS,
    CalibrationSums,
    expected_calibration_error,
)
from benchmarks.adaserve.calibration import honest_error


def test_by_hand() -> None:
    """Group 0: two stated 0.5 of which one happened (gap 0.0 of 2), and three stated 0.9 of which one happened (gap
    1.7 of 3): 1.7 / 5. Group 1: one stated 1.0 that did not happen: 1."""
    sums = CalibrationSums(3)
    stated = np.array([0.5, 0.5, 0.9, 0.9, 0.9, 1.0])
    happened = np.array([True, False, True, False, False, False])
    sums.add(np.array([0, 0, 0, 0, 0, 1]), stated, happened)
    error = expected_calibration_error(sums.sums)
    np.testing.assert_allclose(error[:2], [1.7 / 5, 1.0])
    assert np.isnan(error[2])


def test_gaps_of_one_bin_cancel_and_those_of_two_do_not() -> None:
    one, two = CalibrationSums(1), CalibrationSums(1)
    happened = np.array([True, False])
    one.add(np.zeros(2, int), np.array([0.51, 0.49]), happened)  # both in [7/15, 8/15): 1.0 stated, 1 happened
    two.add(np.zeros(2, int), np.array([0.55, 0.45]), happened)  # in two bins: 0.45 and 0.45 off
    assert NUM_BINS == 15
    np.testing.assert_allclose(expected_calibration_error(one.sums), [0.0], atol=1e-12)
    np.testing.assert_allclose(expected_calibration_error(two.sums), [0.45])


def test_counts_are_worth_as_many_single_ones_and_sums_subtract() -> None:
    rng = np.random.default_rng(0)
    stated, happened = rng.random(40), rng.random(40) < 0.5
    each, together = CalibrationSums(2), CalibrationSums(2)
    group = rng.integers(0, 2, 40)
    each.add(group, stated, happened)
    before = each.sums.copy()
    for _ in range(3):
        each.add(group, stated, happened)
    together.add(group, stated, 3.0 * happened, np.full(40, 3.0))
    np.testing.assert_allclose(each.sums - before, together.sums)


def test_the_floor_of_honest_chances_is_what_drawing_them_shows() -> None:
    rng = np.random.default_rng(1)
    errors, floors = [], []
    for _ in range(200):
        sums = CalibrationSums(1)
        stated = rng.random(1000)
        sums.add(np.zeros(1000, int), stated, rng.random(1000) < stated)
        errors.append(expected_calibration_error(sums.sums)[0])
        floors.append(honest_error(sums.sums)[0])
    assert abs(np.mean(floors) / np.mean(errors) - 1) < 0.05
    assert np.isnan(honest_error(CalibrationSums(1).sums)).all()
