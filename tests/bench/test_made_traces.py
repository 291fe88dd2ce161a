"""Traces made from traces, and the generated one: rates, mixes, targets and peaks are what was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.bench.simulate import Varied
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads import traces
from adaserve_jax.workloads.items import Lengths, Workload, WorkloadItem
from adaserve_jax.workloads.reshaping import Reshaping, at_rate, reshape, with_mix, with_requests, with_slo_scale
from adaserve_jax.workloads.traces import (
    DURATION_S,
    FLAT_SHARE,
    PEAKS,
    Trace,
    TraceRequest,
    adjusted,
    fluctuating_trace,
    intensity_rps,
    load_trace,
    save_trace,
)

CODE, CHAT = SLO(relative=1.2, ttft_ms=4000.0), SLO(tpot_ms=50.0, ttft_ms=4000.0)


def trace_of(*requests: tuple[float, str, int]) -> Trace:
    """By time, class and prompt."""
    made = (TraceRequest(at, prompt, 9, CODE if kind == "code" else CHAT, kind) for at, kind, prompt in requests)
    return Trace("t", "hash", tuple(made))


FOUR = trace_of((1.0, "code", 10), (2.0, "chat", 20), (4.0, "chat", 30), (8.0, "code", 40))


def test_a_fluctuating_trace_is_cut_to_the_machines_context():
    """At 8/s, README's own, one prompt is longer than the context of the simulated machines."""
    drawn, cut = (fluctuating_trace(seed=0, rate_rps=8.0, max_context=most) for most in (None, 4096))
    assert max(one.prompt_tokens for one in drawn.requests) > 4096 and drawn.notes == ()
    assert [one.prompt_tokens for one in cut.requests] == [min(one.prompt_tokens, 3840) for one in drawn.requests]
    assert [one.due_s for one in cut.requests] == [one.due_s for one in drawn.requests]
    assert cut.sha256 != drawn.sha256 and "drawn prompts were cut to 3840 tokens" in cut.notes[0]
    with pytest.raises(ConfigError, match="needs a context of more than 256 tokens, got 256; choose another machine"):
        fluctuating_trace(seed=0, max_context=256)
    fits = fluctuating_trace(seed=0, rate_rps=2.0, max_context=4096)
    assert fits.sha256 == fluctuating_trace(seed=0, rate_rps=2.0).sha256 and fits.notes == ()


def test_a_load_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="a fluctuating trace at 1e-09 requests/s has no request; raise the rate"):
        fluctuating_trace(rate_rps=1e-9, seed=0)


def test_the_urgent_share_of_a_mix_is_that_of_the_tightest_target() -> None:
    """Of a baseline of 20 ms code has 24 ms a token, of 50 ms 60; chat has 50 whatever the baseline is."""
    reshaping = Reshaping(mix={"code": 3.0, "chat": 1.0})
    assert [Varied.of(FOUR, reshaping, baseline_s).urgent_share for baseline_s in (0.02, 0.05)] == [0.75, 0.25]
    assert Varied.of(FOUR, Reshaping(mix={"code": 1.0}), 0.05).urgent_share == 0.0
    assert Varied.of(FOUR, Reshaping(), 0.02).urgent_share is None
    free = Trace("t", "hash", tuple(replace(each, slo=SLO()) for each in FOUR.requests))
    assert Varied.of(free, reshaping, 0.02).urgent_share is None


def test_a_rate_moves_times_and_nothing_else() -> None:
    moved = at_rate(FOUR, 1.0)  # 4 requests in 8 s are 0.5 / s
    assert [request.due_s for request in moved.requests] == [0.5, 1.0, 2.0, 4.0]
    assert moved.rate_rps == 1.0
    assert [request.prompt_tokens for request in moved.requests] == [10, 20, 30, 40]
    assert moved.name == "t at 1/s"
    assert moved.sha256 == at_rate(FOUR, 1.0).sha256 != at_rate(FOUR, 1.5).sha256
    with pytest.raises(ConfigError, match="has all requests at time 0, so its rate cannot be changed"):
        at_rate(trace_of((0.0, "code", 1)), 2.0)


def test_a_trace_that_begins_late_has_the_rate_at_which_its_requests_come() -> None:
    items = tuple(
        WorkloadItem(None, (), 8, "chat", CHAT, 1.0, None, 300.0 + at, lengths=Lengths(10, 9)) for at in range(61)
    )
    made = traces.trace_of(Workload("w", "0" * 64, items))
    assert [each.due_s for each in made.requests] == [float(at) for at in range(61)]
    assert at_rate(made, 2.0).duration_s == pytest.approx(61 / 2)


def test_a_mix_draws_requests_of_each_class_and_keeps_the_times() -> None:
    long = with_requests(FOUR, 4000, 0)
    mixed = with_mix(long, {"code": 3.0, "chat": 1.0}, 7)
    assert [r.due_s for r in mixed.requests] == [r.due_s for r in long.requests]
    counts = Counter(request.slo_class for request in mixed.requests)
    assert counts["code"] / 4000 == pytest.approx(0.75, abs=0.03)
    prompts = {kind: {r.prompt_tokens for r in mixed.requests if r.slo_class == kind} for kind in ("code", "chat")}
    assert prompts == {"code": {10, 40}, "chat": {20, 30}}
    assert {r.slo for r in mixed.requests if r.slo_class == "code"} == {CODE}
    assert with_mix(long, {"chat": 1.0}, 7).classes == ["chat"]
    assert mixed.requests == with_mix(long, {"code": 3.0, "chat": 1.0}, 7).requests
    with pytest.raises(ConfigError, match="trace t has no class 'maths'; it has chat, code"):
        with_mix(FOUR, {"maths": 1.0}, 0)
    with pytest.raises(ConfigError, match="shares must not be below 0, and one above"):
        with_mix(FOUR, {"code": 0.0}, 0)


def test_a_scale_changes_relative_targets_only() -> None:
    scaled = with_slo_scale(FOUR, 0.6)
    assert [r.slo for r in scaled.requests] == [SLO(relative=0.6, ttft_ms=4000.0), CHAT, CHAT, scaled.requests[0].slo]
    with pytest.raises(ConfigError, match="no request whose target is relative"):
        with_slo_scale(trace_of((0.0, "chat", 1)), 0.6)


def test_more_requests_than_there_are_repeat_the_times_and_keep_the_rate() -> None:
    first = with_requests(FOUR, 3, 0)
    assert first.requests == FOUR.requests[:3]
    longer = with_requests(FOUR, 10, 0)
    period = 7.0 * 4 / 3  # from the first to the last, and one mean gap
    assert [r.due_s for r in longer.requests] == pytest.approx(
        [1, 2, 4, 8, *(period + np.array([1, 2, 4, 8])), *(2 * period + np.array([1, 2]))]
    )
    assert sorted(r.prompt_tokens for r in longer.requests[4:8]) == [10, 20, 30, 40]
    with pytest.raises(ConfigError, match="has all requests at one time, so it cannot be repeated"):
        with_requests(trace_of((2.0, "code", 1)), 5, 0)


def test_a_reshaping_does_all_of_it() -> None:
    made = reshape(FOUR, Reshaping(rate_rps=2.0, mix={"code": 1.0}, slo_scale=0.8, requests=100), 0)
    assert (len(made.requests), made.classes) == (100, ["code"])
    assert made.rate_rps == pytest.approx(2.0)
    assert {request.slo.relative for request in made.requests} == {0.8}
    assert reshape(FOUR, Reshaping(), 0) is FOUR


def test_a_ttft_target_is_that_of_every_request_or_of_those_without_and_the_hash_says_so() -> None:
    own, free = SLO(tpot_ms=50.0, ttft_ms=500.0), SLO(relative=1.2)
    one, other = TraceRequest(0.0, 5, 9, own, "chat"), TraceRequest(1.0, 6, 9, free, "code")
    mixed, whole, bare = (Trace("t", "hash", requests) for requests in ((one, other), (one,), (other,)))
    every, kept = (adjusted(mixed, ttft_slo_s=2.0, keeps_own=keeps_own) for keeps_own in (False, True))
    assert [each.slo for each in every.requests] == [replace(own, ttft_ms=2000.0), replace(free, ttft_ms=2000.0)]
    assert [each.slo for each in kept.requests] == [own, replace(free, ttft_ms=2000.0)]
    assert [each.prompt_tokens for each in kept.requests] == [5, 6] and kept.name == "t"
    assert len({mixed.sha256, every.sha256, kept.sha256, adjusted(mixed, ttft_slo_s=3.0).sha256}) == 4
    assert adjusted(whole, ttft_slo_s=2.0, keeps_own=True) is whole and adjusted(mixed) is mixed
    assert adjusted(bare, ttft_slo_s=2.0, keeps_own=True) == adjusted(bare, ttft_slo_s=2.0), "none to keep"


def test_a_time_scale_moves_times_and_is_in_name_and_hash() -> None:
    slower = adjusted(FOUR, time_scale=2.0)
    assert slower.requests == tuple(replace(each, due_s=2 * each.due_s) for each in FOUR.requests)
    assert slower.name == "t times x 2" and adjusted(FOUR, time_scale=1.0) is FOUR
    assert len({FOUR.sha256, slower.sha256, adjusted(FOUR, time_scale=3.0).sha256}) == 3
    both = adjusted(FOUR, time_scale=2.0, ttft_slo_s=2.0)
    assert both.sha256 not in {slower.sha256, adjusted(FOUR, ttft_slo_s=2.0).sha256}


def test_one_request_without_lengths_is_refused() -> None:
    known = WorkloadItem("p", (), 8, "chat", CHAT, 1.0, None, 0.0, lengths=Lengths(10, 9))
    with pytest.raises(ConfigError, match="workload w has texts and not the lengths that a simulation needs"):
        traces.trace_of(Workload("w", "hash", (known, replace(known, lengths=None))))


def test_a_request_without_a_target_is_saved_as_such(tmp_path: Path) -> None:
    made = Trace("t", "hash", tuple(
        TraceRequest(float(at), 5, 9, slo, "late-night")
        for at, slo in enumerate((SLO(), SLO(ttft_ms=9.0), SLO(tpot_ms=50.0), SLO(relative=1.2)))
    ))  # fmt: skip
    save_trace(made, tmp_path / "t.jsonl")
    read = load_trace(tmp_path / "t.jsonl").requests
    assert read == (*(replace(each, slo=SLO()) for each in made.requests[:2]), *made.requests[2:])


@pytest.mark.parametrize("name", ["saved.jsonl", "saved.jsonl.gz"])
def test_a_saved_trace_is_read_as_it_was(tmp_path: Path, name: str) -> None:
    made = fluctuating_trace(seed=3, ttft_slo_s=4.0)
    (tmp_path / name).write_text("old")
    with (tmp_path / name).open() as old:
        save_trace(made, tmp_path / name)
        assert old.read() == "old"  # the file is replaced, never half written
    read = load_trace(tmp_path / name, ttft_slo_s=4.0)
    first_s = made.requests[0].due_s
    assert [r.due_s for r in read.requests] == pytest.approx([r.due_s - first_s for r in made.requests], abs=1e-8)
    bodies = [[(r.prompt_tokens, r.output_tokens, r.slo, r.slo_class) for r in t.requests] for t in (read, made)]
    assert bodies[0] == bodies[1]
    with pytest.raises(ConfigError, match=r"cannot write trace .*choose another folder"):
        save_trace(made, tmp_path / "none" / name)


def test_classes_peak_where_they_should_and_share_the_rate() -> None:
    """Smoothed arrivals of many seeds: highest at the peak, a flat floor far from it."""
    times = {name: [] for name in PEAKS}
    for seed in range(30):
        for request in fluctuating_trace(seed=seed).requests:
            times[request.slo_class].append(request.due_s)
    middles = np.arange(5.0, DURATION_S, 10.0)
    for name, peak in PEAKS.items():
        per_s = np.histogram(times[name], 36, (0.0, DURATION_S))[0] / 30 / 10.0
        smooth = np.convolve(per_s, np.ones(5) / 5, mode="same")
        assert middles[smooth.argmax()] == pytest.approx(peak.at_s, abs=15.0)
        assert len(times[name]) / 30 == pytest.approx(DURATION_S, rel=0.05)  # 1 request/s of each class
        far = np.abs(middles - peak.at_s) > 130
        assert per_s[far].mean() == pytest.approx(FLAT_SHARE, rel=0.15)
        integral = np.trapezoid(intensity_rps(name, np.linspace(0, DURATION_S, 3601)), dx=0.1)
        assert integral == pytest.approx(DURATION_S, rel=1e-4)


def test_lengths_and_targets_come_from_a_trace_where_one_is_given() -> None:
    like = trace_of((0.0, "code", 11), (1.0, "chat", 22), (2.0, "chat", 23), (3.0, "summarization", 33))
    made = fluctuating_trace(seed=1, rate_rps=2.0, like=like)
    assert made.requests == fluctuating_trace(seed=1, rate_rps=2.0, like=like).requests
    assert {(r.slo_class, r.prompt_tokens) for r in made.requests} == {
        ("code", 11), ("chat", 22), ("chat", 23), ("summarization", 33)
    }  # fmt: skip
    assert {r.slo for r in made.requests if r.slo_class == "code"} == {CODE}
    with pytest.raises(ConfigError, match="needs requests of class 'summarization', but t has only chat, code"):
        fluctuating_trace(seed=1, like=FOUR)
    drawn = [r.prompt_tokens for r in fluctuating_trace(seed=1).requests if r.slo_class == "code"]
    assert np.median(drawn) == pytest.approx(118, rel=0.15)


def test_whatever_decides_a_fluctuating_trace_is_in_its_hash() -> None:
    like = trace_of((0.0, "code", 9000), (1.0, "chat", 22), (2.0, "summarization", 33))
    changes = ({}, {"seed": 2}, {"rate_rps": 0.5}, {"ttft_slo_s": 2.0}, {"ttft_slo_s": 4.0}, {"like": like},
               {"like": replace(like, sha256="other")})  # fmt: skip
    made = [fluctuating_trace(**({"seed": 1, "rate_rps": 0.4} | each)) for each in changes]
    assert len({each.sha256 for each in made}) == len(changes)
    assert {each.slo.ttft_s for each in made[3].requests} == {2.0}
    own = fluctuating_trace(seed=1, rate_rps=0.4, like=like, ttft_slo_s=2.0, max_context=512)
    assert own == made[5], "what the trace says holds"
