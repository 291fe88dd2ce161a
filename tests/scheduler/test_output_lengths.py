"""Lengths that outputs are planned for, against the same quantile read off a list of what ended."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.scheduler.output_lengths import COLD_TOKENS, ENOUGH, MEMORY, TYPICAL, UPPER, OutputLengths

ended = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([3, 900]), st.integers(1, 400)), max_size=120)


def brute_left(
    told: list[tuple[str, int, int]], slo_class: str, prompt: int, written: int, most: int, share: float
) -> int:
    """The definition, kind by kind from the finest to the coarsest."""

    def is_size(other: int) -> bool:
        return math.floor(math.log2(other)) == math.floor(math.log2(prompt))

    kinds = (
        [length for name, size, length in told if name == slo_class and is_size(size)],
        [length for name, _, length in told if name == slo_class],
        [length for _, _, length in told],
    )
    for lengths in kinds:
        longer = sorted(length for length in lengths[-MEMORY:] if length > written)
        if len(longer) >= ENOUGH:
            planned = longer[min(int(share * len(longer)), len(longer) - 1)] - written
            return max(1, min(planned, most))
    return max(1, min(max(COLD_TOKENS - written, written // 2), most))


@given(
    ended, st.sampled_from("abc"), st.sampled_from([3, 900]), st.integers(0, 300), st.integers(1, 500),
    st.sampled_from([TYPICAL, UPPER]),
)  # fmt: skip
def test_a_text_is_planned_like_the_longer_ones_of_its_kind(told, slo_class, prompt, written, most, share) -> None:
    lengths = OutputLengths()
    for each in told:
        lengths.observe(*each)
    found = lengths.left(slo_class, prompt, written, most, share)
    assert found == brute_left(told, slo_class, prompt, written, most, share)


def test_only_the_last_texts_count() -> None:
    lengths = OutputLengths()
    for length in [1000] * MEMORY + [10] * MEMORY:
        lengths.observe("chat", 5, length)
    assert lengths.left("chat", 5, 0, 4000) == 10
    for length in [20] * (MEMORY // 2):
        lengths.observe("chat", 5, length)
    assert [lengths.left("chat", 5, 0, 4000, share) for share in (0.4, 0.6)] == [10, 20]


@pytest.mark.parametrize(("written", "planned"), [(0, COLD_TOKENS), (100, COLD_TOKENS - 100), (600, 300)])
def test_before_anything_ended_a_usual_length_is_planned(written: int, planned: int) -> None:
    lengths = OutputLengths()
    assert lengths.left("chat", 5, written, 4000) == planned
    assert lengths.left("chat", 5, written, 30) == min(planned, 30)


def test_a_text_that_ended_where_this_one_is_counts_as_none_that_is_longer() -> None:
    lengths = OutputLengths()
    for length in [30] * (ENOUGH - 1) + [20]:
        lengths.observe("chat", 5, length)
    assert lengths.left("chat", 5, 19, 4000) == 30 - 19
    assert lengths.left("chat", 5, 20, 4000) == COLD_TOKENS - 20
