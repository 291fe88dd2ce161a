"""Summaries, columns of records and reports of a server's file, against values by hand and a plain recomputation."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.aggregate import STATUSES, RecordColumns, ServedReport, report_of, summarize
from adaserve_jax.results.record_store import RecordStore
from adaserve_jax.results.records import RequestRecord, Status, violation_cause
from tests.results.made import OTHER_RUN, RUN, begun, records_file


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


def test_time_with_several_requests_is_busy_once():
    """Two within 0 to 4 s, one from there over its end to 5 s, and one from 7 to 8 s. A late one begins late."""
    records = [
        replace(record(ttft=(end - start) / 2, offsets=(0.0, (end - start) / 2)), due_s=start - late, late_s=late)
        for start, end, late in ((7, 8, 0), (3.5, 5, 1), (1, 2, 0.5), (0, 4, 0), (2.5, 3, 2))
    ]
    assert summarize(records, wall_s=10.0)[0].busy_throughput_tps == pytest.approx(5 * 2 / (5 + 1))


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


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40))
def test_percentiles_agree_with_the_standard_library(ttfts: list[float]):
    total = summarize([record(ttft=t) for t in ttfts], wall_s=1.0)[0]
    values = [(10.0 + t) - 10.0 for t in ttfts]
    expected = statistics.quantiles([*values], n=100, method="inclusive") if len(values) > 1 else values * 99
    assert math.isclose(total.ttft_p50_s or 0, expected[49], rel_tol=1e-9)
    assert math.isclose(total.ttft_p90_s or 0, expected[89], rel_tol=1e-9)
    assert math.isclose(total.ttft_p99_s or 0, expected[98], rel_tol=1e-9)


SECONDS = st.floats(0.0, 100.0)


@st.composite
def any_records(draw: st.DrawFn) -> RequestRecord:
    output = draw(st.integers(0, 5))
    first_s, last_s = sorted([draw(SECONDS), draw(SECONDS)])
    thought = draw(st.integers(0, output))
    metrics = RequestMetrics(
        thinking_tpot_slo_s=draw(st.none() | st.floats(0.01, 50.0)), thinking_tokens=thought,
        thinking_last_s=(first_s + last_s) / 2 if thought else None,
        arrival_s=0.0, first_scheduled_s=draw(st.none() | SECONDS), first_token_s=first_s if output else None,
        last_token_s=last_s if output else None, prompt_tokens=draw(st.integers(1, 9)), output_tokens=output,
        verify_steps=draw(st.integers(0, 9)), drafted_tokens=draw(st.integers(0, 9)),
        accepted_tokens=draw(st.integers(0, 9)), preemptions=draw(st.integers(0, 1)),
        tpot_slo_s=draw(st.none() | st.floats(0.01, 50.0)), ttft_slo_s=draw(st.none() | st.floats(0.01, 50.0)),
        slo_class=draw(st.sampled_from(["a", "b", "c"])), slo_feasible=draw(st.sampled_from([None, True, False])),
    )  # fmt: skip
    offsets = tuple(sorted(draw(st.lists(SECONDS, min_size=output, max_size=output))))
    return RequestRecord.of(
        metrics, run_id="r", policy="p", rate_rps=1.0, request_id="p-1", due_s=draw(SECONDS), late_s=draw(SECONDS),
        status=draw(st.sampled_from(STATUSES)),
        token_offsets_s=draw(st.sampled_from([(), offsets])),
    )  # fmt: skip


@given(st.lists(any_records(), max_size=6))
def test_what_is_kept_comes_back(of: list[RequestRecord]) -> None:
    columns = RecordColumns(of)
    assert len(columns) == len(of)
    nameless = {"run_id": "", "policy": "", "rate_rps": 0.0, "request_id": "", "token_offsets_s": ()}
    assert [columns.record(row) for row in range(len(of))] == [replace(each, **nameless) for each in of]


@given(st.lists(any_records(), max_size=12))
def test_a_summary_counts_what_records_say(of: list[RequestRecord]) -> None:
    """By a plain pass over the records, of what has no test of its own."""
    for summary in summarize(RecordColumns(of), wall_s=10.0):
        mine = [each for each in of if summary.slo_class in ("all", each.slo_class)]
        assert summary.requests == len(mine)
        for name in STATUSES:
            assert getattr(summary, name) == sum(each.status == name for each in mine)
        known = [each.slo_met for each in mine if each.slo_met is not None]
        assert summary.attainment == (sum(known) / len(known) if known else None)
        assert summary.goodput_tps == sum(each.output_tokens for each in mine if each.slo_met) / 10.0
        e2es = [each.e2e_s for each in mine if each.status == "finished" and each.e2e_s is not None]
        assert summary.e2e_mean_s == (pytest.approx(sum(e2es) / len(e2es)) if e2es else None)
        paced = [each for each in mine if each.tpot_slo_s is not None and each.thinking_tpot_slo_s is None]
        total = sum(max(0, len(each.token_offsets_s) - 1) for each in paced)
        late = sum(each.late_tokens for each in paced)
        assert summary.fluidity == ((total - late) / total if total else None)
        causes = [getattr(summary, field.name) for field in fields(summary) if field.name.startswith("cause_")]
        assert sum(causes) == len(known) - sum(known)


def test_more_records_than_there_was_room_for() -> None:
    one = RequestRecord.of(
        RequestMetrics(0.0, output_tokens=1, first_token_s=1.0, last_token_s=1.0), run_id="", policy="", rate_rps=1.0,
        request_id="", status="finished",
    )  # fmt: skip
    columns = RecordColumns(replace(one, due_s=float(number)) for number in range(1000))
    assert [columns.record(row).due_s for row in (0, 255, 256, 999)] == [0.0, 255.0, 256.0, 999.0]
    assert columns.rows["due_s"].sum() == 999 * 500


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return records_file(tmp_path_factory.mktemp("records"))


def report(path: Path, since: float = 0.0, until: float = 1e12, **which: str) -> ServedReport:
    return report_of(path, since_unix_s=since, until_unix_s=until, **which)


def test_all_classes_together(path):
    found = report(path)
    every = found.classes[0]
    summary = every.summary
    assert (found.first_unix_s, found.last_unix_s, found.wall_s) == (1000.0, 1008.0, 8.0)
    assert found.runs == (RUN, OTHER_RUN)
    assert (summary.requests, summary.finished, summary.rejected, summary.failed) == (6, 3, 2, 1)
    assert every.aborted == 1
    assert (summary.prompt_tokens, summary.output_tokens, every.cached_tokens) == (40, 19, 3)
    assert summary.requests_with_slo == 5 and summary.attainment == pytest.approx(1 / 5)  # a met, b c e f did not
    assert summary.attainment_tpot == pytest.approx(1 / 5) and summary.attainment_ttft == 0.0
    assert summary.goodput_tps == 5 / 8 and summary.throughput_tps == 19 / 8
    assert summary.busy_throughput_tps == 19 / 4.75  # 1000-1001, 1001-1003, 1005-1006.25, and from there to 1006.75
    assert (summary.ttft_p50_s, summary.ttft_p90_s) == (0.5, pytest.approx(0.5 + 0.7 * 0.5))  # .25 .5 .5 1
    assert (summary.tpot_p50_s, summary.tpot_mean_s) == (0.1875, 0.25)  # .125 .125 .25 .5
    assert summary.queue_p50_s == 0.125  # 0 0 .25 .75
    assert summary.e2e_mean_s == pytest.approx((1.0 + 2.0 + 1.25) / 3)
    assert (summary.drafted_tokens, summary.accepted_tokens, summary.acceptance_rate) == (20, 8, 0.4)
    assert summary.mean_accepted == 1.0
    causes = (summary.cause_budget, summary.cause_rejected, summary.cause_failed, summary.cause_infeasible)
    assert causes == (1, 1, 1, 1)  # b: 1.8 tokens of .125 s each are less than a step of .5 s
    assert every.errors == (("queue_full", 1), ("slo_infeasible", 1))
    assert (every.tpot.least_s, every.tpot.most_s) == (0.125, 0.125)
    assert every.tpot.over[:2] == (2.0, pytest.approx(2 + 0.8 * 2))  # 1, 2 (aborted), 4
    assert (every.ttft.least_s, every.ttft.over[0]) == (0.25, 2.0)


def test_failed_choices_that_the_server_stopped_are_counted_apart(tmp_path):
    store = RecordStore.open(tmp_path / "endings.sqlite")
    store.add([
        begun(ending, 1000.0, ended=1001.0, ttft=0.5, last=1.0, tokens=2, ending=ending, slo_class=slo_class)
        for ending, slo_class in (
            ("abort", "batch"), ("abort", "chat"), ("error", "chat"), ("cancelled", "chat"), ("stop", "chat"),
        )
    ])  # fmt: skip
    store.close()
    found = report(tmp_path / "endings.sqlite").classes
    assert [(each.summary.failed, each.aborted) for each in found] == [(3, 2), (1, 1), (2, 1)]  # all, batch, chat


def test_each_class_has_its_own_choices_and_the_same_wall_time(path):
    every, batch, chat = report(path).classes
    assert [each.summary.slo_class for each in (every, batch, chat)] == ["all", "batch", "chat"]
    assert (batch.summary.requests, batch.summary.attainment, batch.tpot.least_s) == (1, None, None)
    assert (batch.summary.throughput_tps, batch.summary.goodput_tps) == (9 / 8, 0.0)
    assert (chat.summary.requests, chat.summary.goodput_tps, chat.cached_tokens) == (5, 5 / 8, 0)
    assert report(path, slo_class="chat").classes == (chat,)


def test_one_key(path):
    found = report(path, key="team")
    assert [each.summary.requests for each in found.classes] == [1, 1]
    assert found.runs == (OTHER_RUN,)
    assert found.classes[0].summary.throughput_tps == 9 / 8
    assert len(report(path, key="").classes) == 2


def test_a_part_of_the_time(path):
    found = report(path, 1003.0, 1007.0)
    assert (found.first_unix_s, found.wall_s) == (1001.0, 5.25)
    assert [(each.summary.slo_class, each.summary.requests) for each in found.classes] == [
        ("all", 3), ("batch", 1), ("chat", 2),
    ]  # fmt: skip


def test_nothing_there(path):
    found = report(path, 2000.0)
    assert (found.classes, found.runs, found.wall_s, found.first_unix_s) == ((), (), 0.0, None)
    assert (found.held.choices, found.held.last_unix_s) == (6, 1008.0)
    assert report(path, slo_class="nobody").classes == () and report(path, key="nobody").classes == ()
