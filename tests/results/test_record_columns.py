"""Columns of records: what is kept comes back, and a summary of them is that of the records."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.results.aggregate import RecordColumns, summarize
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.types import RequestMetrics

SECONDS = st.floats(0.0, 100.0)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    output = draw(st.integers(0, 5))
    first_s, last_s = sorted([draw(SECONDS), draw(SECONDS)])
    metrics = RequestMetrics(
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
        status=draw(st.sampled_from(["finished", "rejected", "failed", "unfinished"])),
        token_offsets_s=draw(st.sampled_from([(), offsets])),
    )  # fmt: skip


@given(st.lists(records(), max_size=6))
def test_what_is_kept_comes_back(of: list[RequestRecord]) -> None:
    columns = RecordColumns(of)
    assert len(columns) == len(of)
    nameless = {"run_id": "", "policy": "", "rate_rps": 0.0, "request_id": "", "token_offsets_s": ()}
    assert [columns.record(row) for row in range(len(of))] == [replace(each, **nameless) for each in of]


@given(st.lists(records(), max_size=12))
def test_a_summary_counts_what_records_say(of: list[RequestRecord]) -> None:
    """By a plain pass over the records, of what has no test of its own."""
    for summary in summarize(RecordColumns(of), wall_s=10.0):
        mine = [each for each in of if summary.slo_class in ("all", each.slo_class)]
        assert summary.requests == len(mine)
        for name in ("finished", "rejected", "failed", "unfinished"):
            assert getattr(summary, name) == sum(each.status == name for each in mine)
        known = [each.slo_met for each in mine if each.slo_met is not None]
        assert summary.attainment == (sum(known) / len(known) if known else None)
        assert summary.goodput_tps == sum(each.output_tokens for each in mine if each.slo_met) / 10.0
        e2es = [each.e2e_s for each in mine if each.status == "finished" and each.e2e_s is not None]
        assert summary.e2e_mean_s == (pytest.approx(sum(e2es) / len(e2es)) if e2es else None)
        paced = [each for each in mine if each.tpot_slo_s is not None]
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
