"""Aggregates against values worked out by hand and against plain-Python recomputation."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.results.aggregate import summarize
from adaserve_jax.results.records import RequestRecord, Status, violation_cause
from adaserve_jax.types import RequestMetrics


def record(
    *,
    slo_class: str = "chat",
    status: Status = "finished",
    queue: float = 0.0,
    ttft: float = 0.5,
    offsets: tuple[float, ...] = (0.0, 0.1, 0.1, 0.3),
    tpot_slo: float | None = 0.1,
    ttft_slo: float | None = None,
    verify: int = 2,
    drafted: int = 6,
    accepted: int = 1,
    preemptions: int = 0,
    feasible: bool | None = None,
) -> RequestRecord:
    metrics = RequestMetrics(
        arrival_s=10.0,
        first_scheduled_s=10.0 + queue,
        first_token_s=10.0 + ttft if offsets else None,
        last_token_s=10.0 + ttft + offsets[-1] if offsets else None,
        prompt_tokens=5,
        output_tokens=len(offsets),
        verify_steps=verify,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        preemptions=preemptions,
        tpot_slo_s=tpot_slo,
        ttft_slo_s=ttft_slo,
        slo_class=slo_class,
        slo_feasible=feasible,
    )
    return RequestRecord.of(
        metrics, run_id="r", policy="ar", rate_rps=1.0, request_id="1", status=status, token_offsets_s=offsets
    )


def test_values_by_hand():
    met = record(tpot_slo=0.11)  # TPOT (0.3 - 0) / 3 = 0.1
    missed = record(slo_class="code", tpot_slo=0.05)
    rejected = record(slo_class="code", status="rejected", offsets=(), verify=0, drafted=0, accepted=0)
    free = record(slo_class="free", tpot_slo=None)
    total, chat, code, free_only = summarize([met, missed, rejected, free], wall_s=2.0)
    assert [s.slo_class for s in (total, chat, code, free_only)] == ["all", "chat", "code", "free"]
    assert (total.requests, total.requests_with_slo, total.finished, total.rejected) == (4, 3, 3, 1)
    assert total.attainment == pytest.approx(1 / 3)
    assert total.violations == pytest.approx(2 / 3)
    assert (chat.attainment, code.attainment, free_only.attainment) == (1.0, 0.0, None)
    assert total.goodput_tps == 4 / 2.0
    assert total.throughput_tps == 12 / 2.0
    assert total.mean_accepted == pytest.approx(3 / 6)
    assert total.acceptance_rate == pytest.approx(3 / 18)
    assert total.tpot_mean_s == pytest.approx(0.1)
    assert total.tpot_paper_mean_s == pytest.approx(0.3 / 4)
    assert total.itl_p50_s == pytest.approx(0.1)
    assert total.ttft_p50_s == pytest.approx(0.5)
    # target 0.11: due at 0.11, 0.22, 0.33, all in time; target 0.05: due at 0.05, 0.10, 0.15, only the second in time
    assert (chat.fluidity, code.fluidity) == (1.0, pytest.approx(1 / 3))


def test_latency_and_concurrency_by_hand():
    """Two requests at 0 s and 0.5 s that last 0.8 s each, one at 4 s that lasts as long, one cut off before a token."""
    records = [replace(record(queue=0.3), due_s=due_s) for due_s in (0.0, 0.5, 4.0)]
    records.append(record(status="unfinished", offsets=(), queue=0.1))
    total = summarize(records, wall_s=5.0)[0]
    assert total.e2e_mean_s == pytest.approx(0.5 + 0.3)
    assert total.running_mean == pytest.approx(3 * (0.8 - 0.3) / 5.0)
    assert total.busy_throughput_tps == pytest.approx(12 / (1.3 + 0.8))
    assert records[-1].e2e_s is None
    assert record(offsets=(0.0,)).e2e_s == 0.5
    nobody = summarize([], wall_s=1.0)[0]
    assert (nobody.e2e_mean_s, nobody.running_mean, nobody.busy_throughput_tps) == (None, 0.0, None)


def test_joint_and_tpot_only_differ_by_the_ttft_target():
    slow_start = record(tpot_slo=0.2, ttft_slo=0.4, ttft=0.5)
    total = summarize([slow_start], wall_s=1.0)[0]
    assert (total.attainment_tpot, total.attainment_ttft, total.attainment) == (1.0, 0.0, 0.0)
    assert (total.goodput_tps, total.goodput_tpot_tps) == (0.0, 4.0)


def test_the_authors_count_is_kinder_than_tpot():
    borderline = record(tpot_slo=0.08)  # 0.3 / 3 = 0.1 misses, 0.3 / 4 = 0.075 meets
    total = summarize([borderline], wall_s=1.0)[0]
    assert (total.attainment_tpot, total.attainment_tpot_paper) == (0.0, 1.0)


def test_single_token_counts_as_met_and_none_as_missed():
    one = record(offsets=(0.0,), verify=0, drafted=0, accepted=0)
    none = record(offsets=(), status="failed", verify=0, drafted=0, accepted=0)
    assert summarize([one], wall_s=1.0)[0].attainment == 1.0
    assert summarize([none], wall_s=1.0)[0].attainment == 0.0


def test_unfinished_requests_meet_nothing_but_their_tokens_count_as_throughput():
    cut = record(tpot_slo=10.0, status="unfinished")
    total = summarize([cut], wall_s=2.0)[0]
    assert (total.attainment, total.goodput_tps, total.throughput_tps) == (0.0, 0.0, 2.0)
    assert (total.unfinished, total.cause_unfinished) == (1, 1)


def test_an_empty_run_has_no_shares_and_no_division_by_zero():
    (total,) = summarize([], wall_s=0.0)
    assert (total.requests, total.attainment, total.throughput_tps, total.fluidity) == (0, None, 0.0, None)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tpot_slo": 0.2}, None),
        ({"status": "rejected"}, "rejected"),
        ({"status": "failed"}, "failed"),
        ({"tpot_slo": 0.001}, "budget"),
        ({"tpot_slo": 0.05, "feasible": True}, "budget"),
        ({"tpot_slo": 0.05, "feasible": False}, "infeasible"),
        ({"tpot_slo": 0.2, "feasible": False}, None),
        ({"tpot_slo": None, "ttft_slo": 0.1, "queue": 0.4, "feasible": False}, "infeasible"),
        ({"status": "rejected", "feasible": False}, "infeasible"),
        ({"status": "failed", "feasible": False}, "failed"),
        ({"status": "unfinished", "feasible": False}, "unfinished"),
        ({"preemptions": 1}, "preemption"),
        ({"tpot_slo": None, "ttft_slo": 0.1, "queue": 0.4}, "queueing"),
        ({"tpot_slo": None, "ttft_slo": 0.1, "queue": 0.1}, "prefill"),
        # a step took 0.3 / 2 = 0.15 s; at the run's acceptance of 0.5, 3 drafted a step give 2.5 tokens in 0.06 s each
        ({"tpot_slo": 0.065}, "low_acceptance"),
        ({"tpot_slo": 0.05}, "budget"),
        ({"tpot_slo": 0.05, "drafted": 0, "accepted": 0}, "budget"),
    ],
)
def test_causes(changes: dict, cause: str | None):
    given_record = record(**({"tpot_slo": 0.09} | changes))
    assert violation_cause(given_record, acceptance_rate=0.5) == cause


def test_every_violation_has_exactly_one_cause():
    records = [record(tpot_slo=0.01 * i, status=s) for i in range(1, 20) for s in ("finished", "rejected", "failed")]
    total = summarize(records, wall_s=1.0)[0]
    causes = [getattr(total, name) for name in type(total).__dataclass_fields__ if name.startswith("cause_")]
    assert sum(causes) == sum(r.slo_met is False for r in records)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40))
def test_percentiles_agree_with_the_standard_library(ttfts: list[float]):
    total = summarize([record(ttft=t) for t in ttfts], wall_s=1.0)[0]
    values = [(10.0 + t) - 10.0 for t in ttfts]
    expected = statistics.quantiles([*values], n=100, method="inclusive") if len(values) > 1 else values * 99
    assert math.isclose(total.ttft_p50_s or 0, expected[49], rel_tol=1e-9)
    assert math.isclose(total.ttft_p90_s or 0, expected[89], rel_tol=1e-9)
    assert math.isclose(total.ttft_p99_s or 0, expected[98], rel_tol=1e-9)
