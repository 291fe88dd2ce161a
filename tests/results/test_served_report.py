"""Reports on a made file, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax.results.aggregate import ServedReport, report_of
from tests.results.made import OTHER_RUN, RUN, records_file


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
