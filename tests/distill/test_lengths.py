"""The length of a micro-step: the longest that is measured to keep within the delay."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from adaserve_jax.distill.footprint import LENGTHS, choose_length, longest_length
from adaserve_jax.errors import ConfigError
from tests.distill.conftest import LEARN
from tests.distill.made import CONFIG


@pytest.mark.parametrize("power", [0.0, 1.0, 1.6])
def test_the_longest_that_keeps_within_is_chosen_after_few_measurements(power: float):
    asked: list[int] = []

    def measured(length: int) -> float:
        asked.append(length)
        return 0.003 + 0.01 * (length / 32) ** power

    within = [length for length in LENGTHS if 0.003 + 0.01 * (length / 32) ** power <= 0.05]
    assert longest_length(0.05, measured) == max(within)
    assert set(asked) <= {32, 128, *(length for length in LENGTHS if length >= max(within))}


def test_a_prediction_that_was_too_hopeful_is_measured_and_left():
    assert longest_length(0.05, {32: 0.01, 128: 0.012, 512: 0.2, 256: 0.07}.__getitem__) == 128


def test_a_length_in_between_is_found_where_the_second_is_too_slow():
    assert longest_length(0.05, {32: 0.01, 128: 0.08, 64: 0.04}.__getitem__) == 64


def test_a_delay_that_not_even_the_shortest_keeps_is_refused_with_the_one_that_it_would():
    with pytest.raises(ConfigError, match="learn_delay_ms must be at least 71, which training on 32 tokens takes"):
        longest_length(0.05, lambda length: 0.0705)


@pytest.mark.slow
def test_programs_of_the_chosen_length_are_complete():
    programs = choose_length(CONFIG, replace(LEARN, learn_delay_ms=1e6), jnp.float32)
    assert programs.num_tokens == LENGTHS[-1]
    assert {key[0] for key in programs.compiled} == {
        "begin", "accumulate", "apply", "copy", "no_sums", "evaluate", "export",
    }  # fmt: skip
    assert programs.time_micro_step() > 0
