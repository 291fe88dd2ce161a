"""Sampling parameters and targets refuse what no engine could mean, naming the field."""

from __future__ import annotations

import math

import pytest

from adaserve_jax import SLO, SamplingParams
from adaserve_jax.errors import RequestError
from adaserve_jax.request_metrics import RequestMetrics
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


@pytest.mark.parametrize("field", ["tpot_ms", "ttft_ms", "relative", "thinking_tpot_ms"])
def test_bad_targets(field: str) -> None:
    for value in (0, 1e-322, -1, math.nan, math.inf, -math.inf, 10**400, "fast", True):
        with pytest.raises(RequestError, match=f"slo_{field} must be a finite number above 0, got"):
            SLO(**{field: value})


def test_targets_in_seconds() -> None:
    assert SLO(tpot_ms=40, ttft_ms=2000).tpot_s(0.01) == 0.04
    assert SLO(ttft_ms=2000).ttft_s == 2.0
    assert SLO(relative=1.5).tpot_s(0.01) == pytest.approx(0.015)
    assert SLO(relative=1.5, thinking_tpot_ms=20).thinking_tpot_s == 0.02
    assert SLO(tpot_ms=40).thinking_tpot_s is None
    assert SLO().tpot_s(0.01) is None
    with pytest.raises(RequestError, match="slo_relative must be absent when slo_tpot_ms is given"):
        SLO(tpot_ms=40, relative=2)


def test_the_smallest_bucket_that_holds_a_step() -> None:
    limits = Limits(4, (1, 4, 16), 8, 100, 8, 20, 2, 2)
    assert [limits.bucket(tokens) for tokens in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    with pytest.raises(ValueError, match="17 tokens do not fit the largest bucket 16"):
        limits.bucket(17)


@pytest.mark.parametrize(
    ("thinking_ms", "answer_ms", "met", "thinking_met"),
    [
        (None, None, None, None),
        (None, 200.0, True, None),  # over all tokens: 2 s / 10
        (None, 190.0, False, None),
        (250.0, None, True, True),  # the thinking: 1 s / 4
        (249.0, None, False, False),
        (250.0, 167.0, True, True),  # the answer: 1 s / 6
        (250.0, 166.0, False, True),
        (249.0, 167.0, False, False),
    ],
)
def test_each_part_with_a_target_must_meet_its_own(
    thinking_ms: float | None, answer_ms: float | None, met: bool | None, thinking_met: bool | None
) -> None:
    """Eleven tokens in 2 s; the fifth is the closing mark and came after 1 s."""
    slo = SLO(tpot_ms=answer_ms, thinking_tpot_ms=thinking_ms)
    known = {} if thinking_ms is None else {"thinking_tokens": 5, "thinking_last_s": 2.0}
    metrics = RequestMetrics(
        0.0, first_token_s=1.0, last_token_s=3.0, output_tokens=11, tpot_slo_s=slo.tpot_s(0.01),
        thinking_tpot_slo_s=slo.thinking_tpot_s, **known,
    )  # fmt: skip
    assert (metrics.tpot_met, metrics.slo_met, metrics.thinking_tpot_met) == (met, met, thinking_met)
    assert metrics.tpot_s == 0.2
    parts = (None, None) if thinking_ms is None else (0.25, pytest.approx(1 / 6))
    assert (metrics.thinking_tpot_s, metrics.answer_tpot_s) == parts


@pytest.mark.parametrize(("output", "thought", "met"), [(0, 0, False), (1, 0, True), (1, 1, True), (3, 3, False)])
def test_a_part_without_a_time_per_token_is_met(output: int, thought: int, met: bool) -> None:
    """Nothing came; one token of the answer; one of the thinking; three of a thinking that never ended, too slow."""
    metrics = RequestMetrics(
        0.0, first_token_s=1.0, last_token_s=2.0, output_tokens=output, tpot_slo_s=0.1, thinking_tpot_slo_s=0.1,
        thinking_tokens=thought, thinking_last_s=2.0 if thought else None,
    )  # fmt: skip
    assert (metrics.tpot_met, metrics.answer_tpot_s) == (met, None)
