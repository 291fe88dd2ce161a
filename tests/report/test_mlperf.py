"""The highest rate within the targets, by hand, and the percentiles that it is decided by."""

from dataclasses import replace

import numpy as np
import pytest

from adaserve_jax.report.document import Table, Text
from adaserve_jax.report.measures import MeasureColumns
from adaserve_jax.report.mlperf import Tail, mlperf
from adaserve_jax.results.schema import SERVED
from tests.report.made import point, request, view_of


def requests(slow: int, of: int = 200, **changes):
    return [request(i, tpot=0.5 if i < slow else 0.125, ttft=0.25, ttft_slo=0.5, **changes) for i in range(of)]


def test_percentile_counts_those_that_did_not_finish_as_slowest():
    records = [request(i, tpot=0.001 * i) for i in range(1, 101)]
    assert Tail.of(MeasureColumns.of([(records, 1.0)]), "chat").tpot_s == pytest.approx(0.099)  # the 99th of 100
    cut = [*records[:98], *(request(i, status="unfinished", tokens=3) for i in (98, 99))]
    assert Tail.of(MeasureColumns.of([(cut, 1.0)]), "chat").tpot_s == np.inf


def test_highest_rate_and_lowest_missed():
    # one slow request of 200 is beyond the 99th percentile, three are not
    view = view_of(*(point(requests(slow), rate=rate) for slow, rate in ((0, 1.0), (1, 2.0), (3, 4.0), (1, 8.0))))
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    (row,) = table.rows
    assert row == ("ar", "chat", "500", "250", "8/s (missed at 4/s)", "200", "250.0", "125.0", "4/s")


def test_every_class_must_hold_for_all_of_them_to():
    view = view_of(
        point(requests(0) + requests(0, slo_class="code"), rate=1.0),
        point(requests(0) + requests(9, slo_class="code"), rate=2.0),
        point(requests(9) + requests(9, slo_class="code"), rate=4.0),
    )
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    assert [(row[1], row[4], row[8]) for row in table.rows] == [
        ("chat", "2/s", "4/s"), ("code", "1/s", "2/s"), ("every class", "1/s", "2/s")
    ]  # fmt: skip


def test_a_rate_at_which_a_class_has_no_requests_is_neither_met_nor_missed():
    chats = requests(0)
    view = view_of(
        point(chats, rate=1.0), point(chats + requests(0, slo_class="code"), rate=2.0),
        point(chats + requests(9, slo_class="code"), rate=4.0), point(chats, rate=8.0),
    )  # fmt: skip
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    assert [(row[1], row[4], row[8]) for row in table.rows] == [
        ("chat", "8/s", "none"), ("code", "2/s", "4/s"), ("every class", "8/s (missed at 4/s)", "4/s")
    ]  # fmt: skip
    never_met = view_of(point(chats, rate=1.0), point(chats + requests(9, slo_class="code"), rate=2.0))
    (table,) = (item for item in mlperf(never_met).items if isinstance(item, Table))
    assert table.rows[1][4:6] == ("none", "200") and table.rows[1][8] == "2/s"


def test_none_met_shows_the_lowest_rate():
    view = view_of(point([request(i, status="unfinished", tokens=0) for i in range(5)]))
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    slow = "more than 1% did not finish"
    assert table.rows == (("ar", "chat", "-", "250", "none", "5", slow, slow, "1/s"),)


def test_without_targets_there_is_nothing_to_meet():
    assert mlperf(view_of(point([request(0, tpot_slo=None)]))) is None


def test_a_class_of_deadlines_alone_has_no_part_in_it():
    code = [request(i, slo_class="code", tpot_slo=None) for i in range(20)]
    deadlines = [replace(each, e2e_slo_s=1.0, e2e_met=True, slo_met=True) for each in code]
    (table,) = (item for item in mlperf(view_of(point(requests(0) + deadlines))).items if isinstance(item, Table))
    assert [row[1] for row in table.rows] == ["chat"]


def test_other_arrivals_than_poisson_are_said():
    texts = [
        item for item in mlperf(view_of(point(requests(0), arrival_process="trace"))).items if isinstance(item, Text)
    ]
    assert texts[-1] == Text("Arrivals here were not Poisson's, as MLPerf wants them, but: trace.", warns=True)


def test_arrivals_at_a_server_are_as_they_are():
    items = mlperf(view_of(point(requests(0), arrival_process=SERVED))).items
    assert not any(item.warns for item in items if isinstance(item, Text))


def test_of_fewer_than_100_requests_all_must_be_in_time():
    view = view_of(point(requests(1, of=50)), point(requests(0, of=50), rate=0.5))
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    assert (table.rows[0][4], table.rows[0][8]) == ("0.5/s", "1/s")


def test_exactly_99_of_100_are_enough():
    view = view_of(point(requests(1, of=100)), point(requests(2, of=100), rate=2.0))
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    assert (table.rows[0][4], table.rows[0][8]) == ("1/s", "2/s")


def test_rates_whose_points_are_invalid_are_named():
    late = {"valid": False, "invalid_reason": "client was late"}
    view = view_of(
        point(requests(0)), point(requests(0), rate=2.0, **late), point(requests(9), rate=3.0),
        point(requests(0), rate=4.0, **late),
    )  # fmt: skip
    (table,) = (item for item in mlperf(view).items if isinstance(item, Table))
    assert table.rows[0][4] == "1/s (invalid at 2/s and 4/s)"
