"""Figures and tables of the sections, against values worked out by hand from made requests and samples."""

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.compare import headline
from adaserve_jax.report.document import Figure, Table, Text
from adaserve_jax.report.sections import (
    NO_SAMPLES,
    acceptance,
    curves,
    generation_rates,
    latency,
    over_time,
    pareto,
    phases,
    violations,
)
from tests.report.made import PROVENANCE, point, request, samples_over, view_of


def figures_of(section) -> dict[str, Figure]:
    return {item.key: item for item in section.items if isinstance(item, Figure)}


def requests(missed: int, of: int = 10, **changes):
    return [request(i, tpot=0.5 if i < missed else 0.125, **changes) for i in range(of)]


def test_attainment_and_goodput_against_rate_by_policy_and_class():
    mixed = requests(4, slo_class="chat") + requests(0, slo_class="code")
    view = view_of(
        point(mixed, policy="a", rate=2.0), point(requests(2), policy="a", rate=1.0), point(requests(1), policy="b"),
    )  # fmt: skip
    figures = figures_of(curves(view))
    assert set(figures) == {"attainment-by-rate", "goodput-by-rate", "throughput-by-rate"}
    attainment = figures["attainment-by-rate"]
    assert [panel.title for panel in attainment.panels] == ["all", "chat", "code"]
    every, chat, code = attainment.panels
    assert [(s.name, s.x, s.y) for s in every.series] == [("a", (1.0, 2.0), (0.8, 0.8)), ("b", (1.0,), (0.9,))]
    assert [(s.name, s.x, s.y) for s in chat.series] == [("a", (1.0, 2.0), (0.8, 0.6)), ("b", (1.0,), (0.9,))]
    assert [(s.name, s.y) for s in code.series] == [("a", (None, 1.0))]
    assert [s.colour for s in every.series] == [0, 1]
    assert every.series[0].low[0] < 0.8 < every.series[0].high[0]
    goodput = figures["goodput-by-rate"].panels[0].series[0]
    assert goodput.y == (4.0, 8.0)  # 8 and 16 requests of 5 tokens in 10 s


def test_tpot_only_is_drawn_where_it_differs():
    late = [request(i, ttft=0.5, ttft_slo=0.25) for i in range(4)]
    figures = figures_of(curves(view_of(point(late, policy="a"), point(late, policy="a", rate=2.0))))
    assert figures["attainment-by-rate"].panels[0].series[0].y == (0.0, 0.0)
    assert figures["attainment-tpot-by-rate"].panels[0].series[0].y == (1.0, 1.0)
    assert figures["goodput-tpot-by-rate"].panels[0].series[0].y == (2.0, 2.0)


def test_each_axis_that_varies_has_its_figures_and_says_what_is_held():
    points = [
        point(requests(1), rate=rate, urgent_share=share, slo_scale=scale)
        for rate in (1.0, 2.0) for share in (0.3, 0.6) for scale in (0.8, 1.2)
    ]  # fmt: skip
    figures = figures_of(curves(view_of(*points)))
    titles = [figure.title for key, figure in figures.items() if key.startswith("attainment-by-urgent-share")]
    assert titles == [
        "Attainment, joint against urgent share, at 1/s, target scale 0.8",
        "Attainment, joint against urgent share, at 2/s, target scale 0.8",
        "Attainment, joint against urgent share, at 2/s, target scale 1.2",
    ]
    assert figures["attainment-by-slo-scale"].panels[0].series[0].x == (0.8, 1.2)


def test_a_single_setting_has_bars_by_class():
    mixed = requests(5, slo_class="chat") + requests(0, slo_class="code")
    figures = figures_of(curves(view_of(point(mixed, policy="a"))))
    (panel,) = figures["attainment-by-class"].panels
    assert (figures["attainment-by-class"].kind, panel.series[0].x) == ("bars", ("all", "chat", "code"))
    assert panel.series[0].y == (0.75, 0.5, 1.0)
    assert figures["attainment-by-class"].caption.endswith("Whiskers: 95% intervals.")
    throughput = figures["throughput-by-class"]
    assert throughput.title == "Throughput" and throughput.panels[0].series[0].x == ("all",)
    assert "Whiskers" not in throughput.caption


def test_percentiles_by_hand():
    timed = [request(i, ttft=0.1 * (i + 1), tpot_slo=0.25 if i < 8 else None) for i in range(11)]
    section = latency(view_of(point(timed)))
    (table,) = (item for item in section.items if isinstance(item, Table))
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == {"all", "chat", "with a target", "without a target"}
    assert (rows["all"]["number"], rows["all"]["TTFT p50"], rows["all"]["TTFT p90"]) == ("11", "600.0", "1,000.0")
    assert (rows["with a target"]["number"], rows["without a target"]["TTFT p50"]) == ("8", "1,000.0")
    assert rows["all"]["TPOT p99"] == "125.0"


def test_tpot_over_target_is_marked_at_the_target():
    section = latency(view_of(point(requests(3))))
    figure = figures_of(section)["tpot-over-target"]
    series = figure.panels[0].series[0]
    at = dict(zip(series.x, series.y, strict=True))
    assert (at[0.48], at[0.5], at[1.0], at[1.98], at[2.0]) == (0.0, 0.7, 0.7, 0.7, 1.0)  # 7 at half of it, 3 at twice
    assert figure.marks == ((1.0, "target"),)
    assert latency(view_of(point([request(0, tpot_slo=None)]))).items[1:] == ()


def test_a_cancelled_request_is_counted_and_not_judged():
    plain, gone = requests(3), request(20, status="cancelled", tokens=2, tpot=9.0)
    without, beside = view_of(point(plain)), view_of(point([*plain, gone]))
    table, figure = latency(beside).items
    assert isinstance(table, Table) and dict(zip(table.columns, table.rows[0], strict=True))["cancelled"] == "1"
    assert {row[1] for row in table.rows} == {row[1] for row in latency(without).items[0].rows}  # it had a target
    assert figure.panels == latency(without).items[1].panels
    group, same = (next(iter(view.measured.groups.values())) for view in (without, beside))
    row, judged = group.points[0].rows["all"], same.points[0].rows["all"]
    assert (judged.requests_with_slo, judged.attainment) == (row.requests_with_slo, row.attainment) == (10, 0.7)
    assert "cancelled" not in latency(without).items[0].columns


def test_pareto_places_settings_and_names_the_front():
    section = pareto(view_of(
        point(requests(0), policy="a"), point(requests(0) * 2, policy="a", rate=2.0), point(requests(10), policy="b"),
    ))  # fmt: skip
    (panel,) = figures_of(section)["pareto"].panels
    assert [(s.name, s.x, s.y, s.labels) for s in panel.series] == [
        ("a", (5.0, 10.0), (8.0, 8.0), ("1/s", "2/s")), ("b", (5.0,), (2.0,), ("1/s",))
    ]  # fmt: skip
    assert section.items[1] == Text("No other setting gives both more to each user and more in all than a 2/s.")


def test_accepted_tokens_of_those_who_verified():
    drafts = [request(i, slo_class="chat" if i else "code", spec=(2, 8, i)) for i in range(4)]
    section = acceptance(view_of(point(drafts, policy="a"), point(requests(0), policy="b")))
    (figure,) = figures_of(section).values()
    assert [(s.name, s.x, s.y) for s in figure.panels[0].series] == [("a", ("all", "chat", "code"), (0.75, 1.0, 0.0))]
    (table,) = (item for item in section.items if isinstance(item, Table))
    assert [row[:5] for row in table.rows] == [("a", "8", "32", "6", "18.8%")]
    assert acceptance(view_of(point(requests(0)))) is None


def test_causes_stack_to_the_violations():
    records = [
        request(0, status="rejected", tokens=0), request(1, tpot=0.5), request(2, ttft=0.5, ttft_slo=0.25, queue=0.4),
        request(3), request(4, tpot_slo=None),
    ]  # fmt: skip
    view = view_of(point(records, policy="a"), point([request(0)], policy="b"))
    (panel,) = figures_of(violations(view))["causes"].panels
    assert {s.name: s.y for s in panel.series} == {
        "rejected": (0.25, 0.0), "queueing": (0.25, 0.0), "budget": (0.25, 0.0)
    }  # fmt: skip
    assert panel.series[0].x == ("a", "b")
    assert violations(view_of(point([request(0)]))).items == (Text("Every request met every target that it carries."),)
    assert violations(view_of(point([request(0, tpot_slo=None)]))) is None


def test_phases_are_those_of_the_last_sample():
    view = view_of(
        point(requests(0), policy="a", samples=samples_over(4)),
        point(requests(0), policy="a", repeat=1, samples=samples_over(2)),
        point(requests(0), policy="away"),
    )  # fmt: skip
    section = phases(view)
    (panel,) = figures_of(section)["phases"].panels
    assert {s.name: s.y for s in panel.series} == {
        "plan": pytest.approx((1.0,)), "draft": pytest.approx((2.0,)), "select": pytest.approx((3.0,)),
        "verify": pytest.approx((4.0,)), "commit": pytest.approx((5.0,)),
    }  # fmt: skip
    (table,) = (item for item in section.items if isinstance(item, Table))
    # 40 + 20 steps of 15 ms, 3 of them waiting, in 4 + 2 s
    assert table.rows == (("a", "60", "50.0%", "15.0", "20.0%", "15.0%", "2", "4"),)
    assert section.items[-1] == Text("Without samples, and so without phases, at some setting or all: away.")
    assert phases(view_of(point(requests(0)))).items == (Text(NO_SAMPLES),)


def test_timeline_is_of_the_first_policy_that_drafts_at_the_middle_rate():
    view = view_of(
        point(requests(0), policy="ar", rate=2.0, samples=[]), point(requests(0), policy="a", samples=samples_over(3)),
        point(requests(0), policy="a", rate=2.0, samples=samples_over(3)),
        point(requests(0), policy="a", rate=3.0, samples=samples_over(3)),
    )  # fmt: skip
    (figure,) = over_time(view, None).items
    assert figure.title == "a@2/s over time"
    panels = {panel.title: panel for panel in figure.panels}
    assert [(s.name, s.x, s.y) for s in panels["Draft"].series] == [
        ("depth", (1.0, 2.0, 3.0), (1.0, 2.0, 3.0)), ("width", (1.0, 2.0, 3.0), (2.0, 2.0, 2.0))
    ]  # fmt: skip
    assert [s.name for s in panels["KV pages"].series] == ["used", "all"]  # there was no extension
    assert panels["Draft in device memory"].series[0].y == (0.0, 1.0, 0.0)
    assert panels["Tokens"].series[0].y == (40.0, 40.0, None)
    assert over_time(view, "a@3/s").items[0].title == "a@3/s over time"
    assert over_time(view, "ar@2/s").items == (Text("ar@2/s has no samples, and so no course over time.", True),)
    assert over_time(view_of(point(requests(0))), None) is None
    with pytest.raises(ConfigError, match="expected one of the points 'ar@2/s', 'a@1/s'"):
        over_time(view, "b@1/s")


def test_rates_are_of_a_second_or_more():
    two = samples_over(2)
    assert generation_rates(two) == ((1.0, 2.0), (40.0, None))
    assert generation_rates([two[0], two[0]]) == ((1.0,), (None,))
    between = replace(two[0], t_s=1.5, generation_tokens=41)
    assert generation_rates([two[0], between, two[1]]) == ((1.0, 2.0), (40.0, None))


def test_a_chosen_rate_moves_the_focus():
    points = [point(requests(0), rate=rate) for rate in (1.0, 2.0, 4.0)]
    assert view_of(*points).focus.rate_rps == 2.0
    assert [view_of(*points, rate=rate).focus.rate_rps for rate in (4.0, 4.12, 1.96)] == [4.0, 4.0, 2.0]
    traced = [point(requests(0), rate=rate) for rate in (1.2345678, 3.0)]
    assert [view_of(*traced, rate=rate).focus.rate_rps for rate in (1.23457, 1.235)] == [1.2345678] * 2
    with pytest.raises(ConfigError, match=r"expected a rate that was measured \(1, 2, 4 requests per second\), got 3"):
        view_of(*points, rate=3.0)


def test_a_workload_that_varies_has_no_curve_and_rows_of_its_own():
    other = replace(PROVENANCE, workload="other", workload_hash="cd" * 32)
    view = view_of(
        point(requests(1), policy="a"), point(requests(2), policy="b"),
        point(requests(3), policy="a", repeat=1, provenance=other),
        point(requests(4), policy="b", repeat=1, provenance=other),
    )  # fmt: skip
    assert all(figure.kind == "bars" for figure in figures_of(curves(view)).values())
    (table,) = (item for item in headline(view).items if isinstance(item, Table))
    assert [(row[0], row[1], row[4].split(" ")[0]) for row in table.rows] == [
        ("a", "mixed", "90.0%"), ("b", "mixed", "80.0%"), ("a", "other", "70.0%"), ("b", "other", "60.0%")
    ]  # fmt: skip


def test_violations_of_settings_beside_the_line_are_not_denied():
    points = [
        point(requests(4 if share == 0.3 and rate == 1.0 else 0), rate=rate, urgent_share=share)
        for rate in (1.0, 2.0) for share in (0.3, 0.6, 0.9)
    ]  # fmt: skip
    view = view_of(*points)
    assert not any(setting.urgent_share == 0.3 for setting in view.line)
    (panel,) = figures_of(violations(view))["causes"].panels
    assert panel.title == "1/s, urgent share 30%"


def test_settings_with_violations_beyond_those_shown_are_counted():
    (figure,) = figures_of(violations(view_of(*(point(requests(4), rate=float(r)) for r in range(1, 10))))).values()
    assert len(figure.panels) == 6 and "3 more settings with violations are not shown." in figure.caption


def test_an_invalid_point_over_time_is_said_to_be_one():
    late = point(requests(0), rate=2.0, samples=samples_over(3), valid=False, invalid_reason="client was late")
    view = view_of(point(requests(0)), late)
    said, figure = over_time(view, "ar@2/s").items
    assert said == Text("ar@2/s is invalid: client was late. No other figure uses it.", warns=True)
    assert figure.title == "ar@2/s over time"
