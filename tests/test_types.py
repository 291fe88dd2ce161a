"""Sampling parameters and targets refuse what no engine could mean, naming the field."""

from __future__ import annotations

import math

import pytest

from adaserve_jax import SLO, SamplingParams
from adaserve_jax.errors import RequestError
from adaserve_jax.types import Limits


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (0, -1, 1.0, True, "5", 2**31)),
        ("temperature", (-0.1, 100.1, math.nan, math.inf, None, "hot")),
        ("top_p", (0, 1.1, math.nan, None)),
        ("top_k", (-1, 1.0, None)),
        ("min_p", (-0.1, 1.1, math.nan)),
        ("seed", (-1, 2**64, 1.0, True)),
        ("n", (0, 65, 10**9)),
        ("stop", (5, [5], [""], b"bytes", ["a"] * 17, "x" * 1025)),
        ("stop_token_ids", (5, "ab", [-1], [2**31], [1.0], [True])),
        ("ignore_eos", (1, "yes", None)),
        ("repetition_penalty", (0, 0.009, 10.1, math.nan, None)),
    ],
)
def test_bad_sampling_parameters(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{field} must be ") as caught:
            SamplingParams(**{field: value})
        assert (caught.value.param, caught.value.code) == (field, "invalid_value")


def test_of_what_came_the_beginning_is_told() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(bad_words=("x" * 1_000_000,))
    assert str(caught.value).endswith(f"texts of 1 to 128 characters, got ('{'x' * 198}")


def test_stop_takes_one_string_or_several() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]  # JSON's null


@pytest.mark.parametrize("field", ["tpot_ms", "ttft_ms", "relative"])
def test_bad_targets(field: str) -> None:
    for value in (0, -1, math.nan, math.inf, "fast", True):
        with pytest.raises(RequestError, match=f"slo_{field} must be a finite number above 0, got"):
            SLO(**{field: value})


def test_targets_in_seconds() -> None:
    assert SLO(tpot_ms=40, ttft_ms=2000).tpot_s(0.01) == 0.04
    assert SLO(ttft_ms=2000).ttft_s == 2.0
    assert SLO(relative=1.5).tpot_s(0.01) == pytest.approx(0.015)
    assert SLO().tpot_s(0.01) is None
    with pytest.raises(RequestError, match="slo_relative must be absent when slo_tpot_ms is given"):
        SLO(tpot_ms=40, relative=2)


def test_the_smallest_bucket_that_holds_a_step() -> None:
    limits = Limits(4, (1, 4, 16), 8, 100, 8, 20, 2, 2)
    assert [limits.bucket(tokens) for tokens in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    with pytest.raises(ValueError, match="17 tokens do not fit the largest bucket 16"):
        limits.bucket(17)
