"""Open loop: due times are kept whatever the engine does; waiting is bounded; nothing is lost or hung."""

import threading
import time

import pytest

from adaserve_jax.bench.engine import AtPoint, Due, LoopResult, RequestProbe, drive
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.results.records import RequestRecord, violation_cause
from adaserve_jax.types import SLO, SamplingParams
from tests.waiting import PATIENCE_S, wait_until


def requests(count: int, gap_s: float, *, slo_class: str = "chat", tokens: int = 4) -> list[Due]:
    return [
        Due(
            i * gap_s,
            GenerateRequest(
                f"r{i}", [1, 2, 3], SamplingParams(max_tokens=tokens), SLO(tpot_ms=50), slo_class=slo_class
            ),
        )
        for i in range(count)
    ]


def records(loop: LoopResult) -> list[RequestRecord]:
    settings = {
        "run_id": "r",
        "point": "p",
        "policy": "ar",
        "rate_rps": 1.0,
        "start_s": loop.start_s,
        "baseline_s": 0.004,
    }
    return [probe.record(AtPoint(**settings)) for probe in loop.probes]


class Clock:
    """Stands still but for sleeping and what a test says; in place of `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr("adaserve_jax.bench.engine.time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class AtOnce:
    """Answers within `submit`, which takes so long."""

    def __init__(self, clock: Clock, submit_s: float):
        self.clock, self.submit_s, self.submit_times = clock, submit_s, []

    def submit(self, request, sink) -> None:
        self.submit_times.append(self.clock.now_s)
        self.clock.now_s += self.submit_s
        sink(OutputChunk(request.request_id, 0, "", [1], "length"))

    def is_alive(self) -> bool:
        return True


def test_submissions_do_not_wait_for_a_slow_engine(make_engine):
    """It answers nothing until it has all requests."""
    engine = make_engine(hang=("chat",))
    real_submit = engine.submit

    def submit(request, sink) -> None:
        real_submit(request, sink)
        if len(engine.submitted) == 6:
            for each in engine.submitted:
                engine._schedule(each)

    engine.submit = submit
    loop = drive(engine, requests(6, 0.02), drain_s=30)
    offsets = [t - loop.start_s for t in engine.submit_times]
    assert all(offset >= 0.02 * i for i, offset in enumerate(offsets)), "none before it is due"
    assert [r.status for r in records(loop)] == ["finished"] * 6
    assert loop.wall_s == max(probe.ended_at_s for probe in loop.probes) - loop.start_s


def test_submissions_are_on_time(monkeypatch):
    clock = Clock(monkeypatch)
    engine = AtOnce(clock, 0.0)
    loop = drive(engine, requests(6, 0.02), drain_s=5)
    assert engine.submit_times == pytest.approx([100.0 + 0.02 * i for i in range(6)], abs=1e-9)
    assert (loop.start_s, loop.wall_s) == (100.0, pytest.approx(0.1)) and loop.late_max_s < 1e-9


def test_tokens_carry_the_times_the_client_saw(make_engine):
    engine = make_engine(tpot_s=0.02)
    around = []

    def timed(action):
        def run(*arguments) -> None:
            before_s = time.monotonic()
            action(*arguments)
            around.append((before_s, time.monotonic()))

        return run

    engine._send, engine._finish = timed(engine._send), timed(engine._finish)
    loop = drive(engine, requests(1, 0, tokens=4), drain_s=30)
    (record,) = records(loop)
    (probe,) = loop.probes
    assert record.output_tokens == len(record.token_offsets_s) == 4
    wait_until(lambda: len(around) == 4)  # the last one is noted a moment after the client was told
    assert all(before <= t <= after for t, (before, after) in zip(probe.token_times_s, around, strict=True))
    first_s = probe.token_times_s[0]
    assert record.token_offsets_s == pytest.approx([t - first_s for t in probe.token_times_s], abs=1e-6)
    assert record.tpot_s == pytest.approx(0.02)


def test_waiting_for_stragglers_is_bounded_and_leaves_the_engine_idle(make_engine):
    engine = make_engine(hang=("chat",))
    started = time.monotonic()
    loop = drive(engine, requests(3, 0.0), drain_s=0.1, settle_s=2 * PATIENCE_S)  # it is not waited for, or too long
    assert 0.1 <= loop.wall_s <= time.monotonic() - started
    assert [(r.status, r.slo_met) for r in records(loop)] == [("unfinished", False)] * 3
    assert not engine.in_flight


def test_refusals_and_failures_are_records_not_exceptions(make_engine):
    mixed = [*requests(2, 0.0), *requests(1, 0.0, slo_class="long"), *requests(1, 0.0, slo_class="bad")]
    mixed = [Due(0.0, GenerateRequest(f"q{i}", [1], r.prepared.sampling, r.prepared.slo, 0, r.prepared.slo_class))
             for i, r in enumerate(mixed)]  # fmt: skip
    loop = drive(make_engine(capacity=1, refuse=("long",), fail=("bad",), ttft_s=0.5), mixed, drain_s=30)
    outcomes = [(r.status, r.error_code) for r in records(loop)]
    assert outcomes == [
        ("finished", None),
        ("rejected", "queue_full"),
        ("rejected", "context_length_exceeded"),
        ("rejected", "queue_full"),
    ]
    failed = drive(make_engine(fail=("bad",)), requests(1, 0.0, slo_class="bad"), drain_s=2)
    assert [(r.status, r.error_code, r.slo_met) for r in records(failed)] == [("failed", "engine_error", False)]


def test_a_dead_engine_ends_the_run(make_engine):
    loop = drive(make_engine(dies_after=2), requests(5, 0.0), drain_s=2)
    assert loop.engine_died
    assert [(r.status, r.error_code) for r in records(loop)][2:] == [("failed", "engine_dead")]


def test_lateness_of_the_client_is_measured(monkeypatch):
    clock = Clock(monkeypatch)
    loop = drive(AtOnce(clock, 0.03), requests(5, 0.0), drain_s=2)
    assert [r.late_s for r in records(loop)] == pytest.approx([0.0, 0.03, 0.06, 0.09, 0.12], abs=1e-6)
    assert (loop.late_max_s, loop.late_p99_s) == (pytest.approx(0.12), pytest.approx(0.12 - 0.04 * 0.03))
    partly = drive(AtOnce(clock, 0.03), requests(5, 0.02), drain_s=2)
    assert [r.late_s for r in records(partly)] == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04], abs=1e-6)


def test_ctrl_c_keeps_what_is_done(make_engine):
    engine, ends = make_engine(), threading.Semaphore(0)
    real_submit = engine.submit

    def interrupted_submit(request, sink):
        def noted(chunk: OutputChunk) -> None:
            sink(chunk)
            if chunk.finish_reason is not None:
                ends.release()

        if request.request_id == "r3":
            assert all(ends.acquire(timeout=30) for _ in range(3)), "those before it have ended"
            raise KeyboardInterrupt
        real_submit(request, noted)

    engine.submit = interrupted_submit
    loop = drive(engine, requests(9, 0.01), drain_s=2)
    assert loop.interrupted
    assert [r.status for r in records(loop)] == ["finished", "finished", "finished", "unfinished"]


def test_a_target_out_of_reach_is_a_rejection_whenever_the_engine_says_so():
    """The engine judges when it comes to the request: after `submit` has returned."""
    ends = []
    probe = RequestProbe(requests(1, 0.0)[0].prepared, 10.0, lambda: ends.append(1))
    probe(OutputChunk("r0", 0, "", [], "error", None, "too fast", "slo_infeasible", "slo_tpot_ms"))
    record = probe.record(AtPoint("r", "p", "ar", 1.0, start_s=10.0, baseline_s=0.004))
    assert ends == [1]
    assert (record.status, record.error_code, record.slo_met) == ("rejected", "slo_infeasible", False)
    assert (record.slo_feasible, violation_cause(record, acceptance_rate=0.5)) == (False, "infeasible")


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("queue_full", "rejected", "queue_full"),
        ("engine_dead", "failed", "engine_dead"),
        (None, "failed", "engine_error"),
    ],
)
def test_a_request_that_ends_in_an_error_says_which(code: str | None, status: str, told: str):
    probe = RequestProbe(requests(1, 0.0)[0].prepared, 10.0, lambda: None)
    probe(OutputChunk("r0", 0, "", [], "error", None, "gone", code))
    record = probe.record(AtPoint("r", "p", "ar", 1.0, start_s=10.0, baseline_s=0.004))
    assert (record.status, record.error_code, record.slo_met) == (status, told, False)
