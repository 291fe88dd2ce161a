"""Open loop: due times are kept whatever the engine does; waiting is bounded; nothing is lost or hung."""

import time
from itertools import pairwise

import pytest

from adaserve_jax.bench.open_loop import DueRequest, LoopResult, drive
from adaserve_jax.bench.probe import RequestProbe
from adaserve_jax.engine.client import GenerateRequest, OutputChunk
from adaserve_jax.results.causes import violation_cause
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.types import SLO, SamplingParams


def requests(count: int, gap_s: float, *, slo_class: str = "chat", tokens: int = 4) -> list[DueRequest]:
    return [
        DueRequest(
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
    return [probe.record(**settings) for probe in loop.probes]


def test_submissions_do_not_wait_for_a_slow_engine(make_engine):
    engine = make_engine(ttft_s=0.5)
    loop = drive(engine, requests(6, 0.02), drain_s=5)
    offsets = [t - loop.start_s for t in engine.submit_times]
    assert offsets == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1], abs=0.06)
    assert all(offset >= 0.02 * i for i, offset in enumerate(offsets))
    assert [r.status for r in records(loop)] == ["finished"] * 6
    assert loop.wall_s == pytest.approx(0.1 + 0.5 + 3 * 0.002, abs=0.1)


def test_tokens_carry_the_times_the_client_saw(make_engine):
    loop = drive(make_engine(tpot_s=0.02), requests(1, 0, tokens=4), drain_s=5)
    (record,) = records(loop)
    assert record.output_tokens == len(record.token_offsets_s) == 4
    assert record.token_offsets_s[0] == 0
    assert all(b - a == pytest.approx(0.02, abs=0.015) for a, b in pairwise(record.token_offsets_s))
    assert record.tpot_s == pytest.approx(0.02)


def test_waiting_for_stragglers_is_bounded_and_leaves_the_engine_idle(make_engine):
    engine = make_engine(hang=("chat",))
    started = time.monotonic()
    loop = drive(engine, requests(3, 0.0), drain_s=0.1)
    assert time.monotonic() - started < 1.0
    assert loop.wall_s == pytest.approx(0.1, abs=0.08)
    assert [(r.status, r.slo_met) for r in records(loop)] == [("unfinished", False)] * 3
    assert not engine.in_flight


def test_refusals_and_failures_are_records_not_exceptions(make_engine):
    mixed = [*requests(2, 0.0), *requests(1, 0.0, slo_class="long"), *requests(1, 0.0, slo_class="bad")]
    mixed = [DueRequest(0.0, GenerateRequest(f"q{i}", [1], r.request.sampling, r.request.slo, 0, r.request.slo_class))
             for i, r in enumerate(mixed)]  # fmt: skip
    loop = drive(make_engine(capacity=1, refuse=("long",), fail=("bad",), ttft_s=0.05), mixed, drain_s=2)
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


def test_lateness_of_the_client_is_measured(make_engine):
    loop = drive(make_engine(submit_s=0.03), requests(5, 0.0), drain_s=2)
    assert loop.late_max_s >= 0.12
    assert [r.late_s for r in records(loop)] == sorted(r.late_s for r in records(loop))
    punctual = drive(make_engine(), requests(5, 0.01), drain_s=2)
    assert punctual.late_max_s < 0.06


def test_ctrl_c_keeps_what_is_done(make_engine):
    engine = make_engine()
    real_submit = engine.submit

    def interrupted_submit(request, sink):
        if request.request_id == "r3":
            raise KeyboardInterrupt
        real_submit(request, sink)

    engine.submit = interrupted_submit
    loop = drive(engine, requests(9, 0.03), drain_s=2)
    assert loop.interrupted
    assert [r.status for r in records(loop)] == ["finished", "finished", "finished", "unfinished"]


def test_a_target_out_of_reach_is_a_rejection_whenever_the_engine_says_so():
    """The engine judges when it comes to the request: after `submit` has returned."""
    ends = []
    probe = RequestProbe(requests(1, 0.0)[0].request, 10.0, lambda: ends.append(1))
    probe(OutputChunk("r0", 0, "", [], "error", None, "too fast", "slo_infeasible", "slo_tpot_ms"))
    record = probe.record(run_id="r", point="p", policy="ar", rate_rps=1.0, start_s=10.0, baseline_s=0.004)
    assert ends == [1]
    assert (record.status, record.error_code, record.slo_met) == ("rejected", "slo_infeasible", False)
    assert (record.slo_feasible, violation_cause(record, acceptance_rate=0.5)) == (False, "infeasible")
