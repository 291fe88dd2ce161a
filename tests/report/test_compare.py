"""The headline, one policy against the others, and a run against an earlier one, with differences by hand."""

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.report.build import build
from adaserve_jax.report.compare import comparison, headline, verdict, versus
from adaserve_jax.report.document import Table, Text
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT
from adaserve_jax.report.points import measured
from adaserve_jax.report.view import View
from adaserve_jax.results.schema import SERVED
from tests.report.made import PROVENANCE, folder, point, request, view_of


def requests(missed: int, of: int = 40, **changes):
    return [request(i, tpot=0.5 if i < missed else 0.125, **changes) for i in range(of)]


def compare(now: list, then: list):
    section = comparison(View.of(measured([folder(*now, path="now")])), measured([folder(*then, path="then")]))
    tables = [item for item in section.items if isinstance(item, Table)]
    return section, tables[0] if tables else None, [item.text for item in section.items if isinstance(item, Text)]


def test_differences_by_hand():
    section, table, texts = compare([point(requests(4))], [point(requests(20))])
    assert section.title == "Compared with then"
    assert table.columns == (
        "policy", "requests", "attainment, joint, points", "attainment, TPOT only, points", "goodput, tokens/s",
        "TPOT p50, ms", "TTFT p99, ms", "violations, then / now",
    )  # fmt: skip
    (row,) = table.rows
    assert row[:2] == ("ar", "all")
    assert row[2].startswith("+40.0 better (+2")
    assert row[4].startswith("+8.0 better (")  # 36 and 20 times 5 tokens in 10 s
    assert row[5].startswith("-187.5 (")  # a median of 125 ms against one between 125 and 500
    assert row[6] == "+0.0"  # fewer than 100 requests tell nothing about the slowest of 100
    assert row[7].startswith("5.00 (")  # half of them against a tenth
    assert {(0, 2), (0, 4)} <= table.strong and (0, 6) not in table.strong
    assert texts == [
        "Attainment, joint: better at 1 of 1 points (by 40.0 percentage points), worse at 0, and at 0 not told apart.",
        "Goodput: better at 1 of 1 points (by 8.0 tokens/s), worse at 0, and at 0 not told apart.",
        "Points were measured once: intervals hold which requests happened to come, and not what differs from run to "
        "run, for which it takes 5 repeats.",
    ]


def test_worse_is_said_and_never_strong():
    _, table, texts = compare([point(requests(20))], [point(requests(4))])
    assert table.rows[0][2].startswith("-40.0 worse (-")
    assert (0, 2) not in table.strong
    assert texts[0].startswith("Attainment, joint: better at 0 of 1 points, worse at 1")


def test_unmatched_points_are_listed():
    _, table, texts = compare(
        [point(requests(0)), point(requests(0), rate=2.0)], [point(requests(0)), point(requests(0), policy="adaserve")]
    )
    assert len(table.rows) == 1
    assert texts[-2:] == [
        "Not compared, being only in this run: ar 2/s.", "Not compared, being only in then: adaserve 1/s."
    ]  # fmt: skip


def test_a_point_that_is_invalid_then_is_not_said_to_be_only_in_this_run():
    late = point(requests(0), rate=2.0, valid=False, invalid_reason="client was late")
    _, _, texts = compare([point(requests(0)), point(requests(0), rate=2.0)], [point(requests(0)), late])
    assert not any("only in" in text for text in texts)


def test_nothing_in_common():
    _, table, texts = compare([point(requests(0))], [point(requests(0), rate=2.0)])
    assert table is None
    assert texts[0] == "No point of this run has one of the same policy and setting in then."


def test_other_conditions_are_warned_of():
    other = replace(PROVENANCE, commit="fedcba9876543210", machine="b machine", baseline_s=0.06)
    _, _, texts = compare([point(requests(0))], [point(requests(0), provenance=other)])
    assert texts[:3] == [
        "The machine differs: a machine, 2 cores now, b machine in then.",
        "The commit differs: 0123456789ab now, fedcba987654 in then.",
        "One token alone took 50 ms now and 60 ms in then: targets that are multiples of it differ as much.",
    ]
    near, same = (
        compare([point(requests(0))], [point(requests(0), provenance=replace(PROVENANCE, baseline_s=baseline_s))])[2]
        for baseline_s in (0.0513, 0.0502)
    )
    assert near[0].startswith("One token alone took 50 ms now and 51.3 ms in then: ")
    assert not any("differ" in text for text in same[:1])


def test_classes_have_rows_of_their_own():
    mixed = requests(4, slo_class="chat") + requests(0, slo_class="code")
    _, table, _ = compare([point(mixed)], [point(mixed)])
    assert [row[1] for row in table.rows] == ["all", "chat", "code"]
    assert table.rows[1][2] == "+0.0 (+0.0 to +0.0)"


def test_one_policy_against_each_of_the_others():
    view = View.of(measured([folder(
        point(requests(20), policy="ar"), point(requests(4), policy="adaserve"), point(requests(4), policy="spec:4"),
        point(requests(30), policy="adaserve", rate=2.0), point(requests(0), policy="spec:4", rate=2.0),
    )]))  # fmt: skip
    section = versus(view)
    assert section.title == "adaserve against the others"
    first, second, table = section.items
    assert first.text == (
        "adaserve against ar. Attainment, joint: better at 1 of 1 points (by 40.0 percentage points), worse at 0, and "
        "at 0 not told apart. Goodput: better at 1 of 1 points (by 8.0 tokens/s), worse at 0, and at 0 not told apart."
    )
    assert second.text.startswith(
        "adaserve against spec:4. Attainment, joint: better at 0 of 2 points, worse at 1 (by 75.0 percentage points), "
        "and at 1 not told apart."
    )
    assert [(row[0], row[1], row[2].split(" ")[0], row[-1].split(" ")[0]) for row in table.rows] == [
        ("ar", "1/s", "+40.0", "5.00"), ("spec:4", "1/s", "+0.0", "1.00"), ("spec:4", "2/s", "-75.0", "0.00")
    ]  # fmt: skip
    assert versus(view_of(point(requests(0)))) is None
    ours = versus(view, "spec:4")
    assert ours.title == "spec:4 against the others" and ours.items[0].text.startswith("spec:4 against ar. ")
    with pytest.raises(ConfigError, match=r"--subject must be a policy that was measured \(.*\), got 'spec:5'"):
        versus(view, "spec:5")


def test_rows_from_before_burstiness_was_noted_are_matched():
    _, table, _ = compare([point(requests(0), burstiness=1.0)], [point(requests(0))])
    assert len(table.rows) == 1


def test_a_policy_of_two_folders_is_there_more_than_once():
    now = measured([folder(point(requests(0)), path="a"), folder(point(requests(0)), path="b")])
    section = comparison(View.of(now), measured([folder(point(requests(0)), path="then")]))
    texts = [item.text for item in section.items if isinstance(item, Text)]
    assert texts[-1] == "Not compared, being in this run more than once: a: ar 1/s and b: ar 1/s."


def test_settings_of_the_engine_that_differ_are_told_where_they_were_noted():
    now, then = (replace(PROVENANCE, engine_hash=each * 32, max_prefill_tokens=8) for each in ("ab", "cd"))
    _, _, texts = compare([point(requests(0), provenance=now)], [point(requests(0), provenance=then)])
    assert texts[0] == "The hash of the engine's settings differs: abababababab now, cdcdcdcdcdcd in then."
    old = replace(PROVENANCE, max_prefill_tokens=8)
    _, _, texts = compare([point(requests(0), provenance=now)], [point(requests(0), provenance=old)])
    assert not any(" differs: " in text for text in texts)
    fewer = replace(PROVENANCE, num_pages=64, extension_pages=0, elastic="auto")
    _, _, texts = compare([point(requests(0), provenance=fewer)], [point(requests(0))])
    assert texts[0] == "The number of KV pages differs: 64 now, not noted in then."


def test_versions_of_a_policys_file_are_compared_and_said_to_differ():
    now, then = ([point(requests(0), policy="mine.py", policy_hash=each * 32)] for each in ("ab", "cd"))
    _, table, texts = compare(now, then)
    expected = "The policy's file differs: mine.py (sha256 abababababab) now, mine.py (sha256 cdcdcdcdcdcd) in then."
    assert texts[0] == expected and table is not None
    assert not any(" differs: " in text for text in compare(now, now)[2])


def test_the_violation_ratio_where_ours_are_none_is_more_than_a_number():
    _, table, _ = compare([point(requests(0))], [point(requests(20))])
    assert table.rows[0][-1].startswith("more than ") and float(table.rows[0][-1].split()[-1]) > 3
    _, table, _ = compare([point(requests(2))], [point(requests(20))])
    assert table.rows[0][-1].startswith("10.00 (more than ")


def test_differences_of_independent_samples_are_not_called_paired():
    moved = [replace(each, due_s=each.due_s + 0.5) for each in requests(4)]
    view = View.of(measured([folder(point(requests(4), policy="adaserve"), point(moved, policy="ar"))]))
    said = "1 of 1 comparisons are not of the same requests at the same times"
    assert any(item.text.startswith(said) for item in versus(view).items if isinstance(item, Text))
    texts = [item.text for item in headline(view).items if isinstance(item, Text)]
    assert texts[0].endswith("(95% interval of differences, not all paired).")
    assert any(text.startswith(said) for text in texts)


def test_where_one_setting_of_two_is_not_paired_the_intervals_are_not_called_paired():
    moved = [replace(each, due_s=each.due_s + 0.5) for each in requests(4)]
    paired = [point(requests(4), policy=policy) for policy in "ab"]
    unpaired = [point(each, policy=policy, rate=2.0) for each, policy in ((requests(4), "a"), (moved, "b"))]
    for points, differences in (
        ([*paired, *unpaired], "differences, not all paired"),
        ([*paired, *(point(requests(4), policy=policy, rate=2.0) for policy in "ab")], "paired differences"),
    ):
        view = view_of(*points)
        assert verdict(view, ATTAINMENT, view.measured.settings) == (
            "Attainment, joint: at none of 2 settings is one policy ahead of every other beyond chance (95% intervals "
            f"of {differences})."
        )


def test_ahead_at_one_rate_and_not_at_the_other():
    view = view_of(
        point(requests(4), policy="ours", rate=2.0), point(requests(20), policy="theirs", rate=2.0),
        point(requests(0), policy="ours"), point(requests(0), policy="theirs"),
    )  # fmt: skip
    assert verdict(view, ATTAINMENT, view.measured.settings) == (
        "Attainment, joint: ours is ahead of every other policy at 2/s (1 of 2 settings), of the next one by 40.0 "
        "percentage points. At 1/s no policy is ahead of every other beyond chance."
    )
    # at 2/s: 36 x 5 tokens against 20 x 5, in 10 s
    assert "at 2/s (1 of 2 settings), of the next one by 8.0 tokens/s" in verdict(view, GOODPUT, view.measured.settings)


def test_different_winners_are_all_named_with_the_span_of_their_lead():
    view = view_of(
        point(requests(0), policy="a"), point(requests(20), policy="b"), point(requests(30), policy="c"),
        point(requests(0), policy="a", rate=2.0), point(requests(10), policy="b", rate=2.0),
        point(requests(30), policy="a", rate=3.0), point(requests(0), policy="b", rate=3.0),
    )  # fmt: skip
    assert verdict(view, ATTAINMENT, view.measured.settings) == (
        "Attainment, joint: a is ahead of every other policy at 1/s and 2/s (2 of 3 settings), of the next one by 25.0 "
        "to 50.0 percentage points; b is ahead of every other policy at 3/s (1 of 3 settings), of the next one by 75.0 "
        "percentage points."
    )


def test_a_difference_within_chance_wins_nothing():
    view = view_of(point(requests(4), policy="a"), point(requests(5)[::-1], policy="b"))
    assert verdict(view, ATTAINMENT, view.measured.settings) == (
        "Attainment, joint: no policy is ahead of every other beyond chance (95% interval of paired differences)."
    )
    assert headline(view).items[-1].strong == frozenset()


@pytest.mark.parametrize("order", ["abc", "acb", "cba"])
def test_being_ahead_of_one_of_two_is_not_enough(order: str):
    served = {"a": requests(4), "b": requests(5)[::-1], "c": requests(30)}
    view = view_of(*(point(served[policy], policy=policy) for policy in order))
    assert "no policy is ahead" in verdict(view, ATTAINMENT, view.measured.settings)


def test_cancelled_requests_are_counted_apart_from_those_without_a_target():
    records = [request(0), request(1, tpot_slo=None), request(2, status="cancelled", tokens=2)]
    document = build(measured([folder(point(records))]))
    assert dict(document.facts)["requests of valid points"] == (
        "3, of them 1 with a target and 1 without; 1 were cancelled"
    )
    (table,) = (item for item in document.sections[0].items if isinstance(item, Table))
    assert table.rows[0][1] == "3 (1 without target, 1 cancelled)"


def test_one_policy_alone_has_nothing_to_be_ahead_of():
    view = view_of(point(requests(4)))
    assert "nothing to compare" in verdict(view, ATTAINMENT, view.measured.settings)
    (text,) = (item.text for item in headline(view).items if isinstance(item, Text))
    assert text.startswith("Points were measured once: ")


def test_what_a_server_served_is_neither_compared_nor_measured_once():
    items = headline(view_of(point(requests(4), arrival_process=SERVED))).items
    assert not any(isinstance(item, Text) for item in items)
    (table,) = (item for item in items if isinstance(item, Table))
    assert (table.title, table.rows[0][0]) == ("What was measured", "ar")
    assert "Bold" not in table.caption and "paired" not in table.caption


@pytest.mark.parametrize("has_records", [True, False])
def test_policies_without_targets_have_no_goodput_and_are_not_compared_by_it(has_records: bool):
    free = [request(i, tpot_slo=None) for i in range(20)]
    points = [point(free, policy=name) for name in ("a", "b")]
    view = view_of(*(each if has_records else (each[0], [], []) for each in points))
    for measure in (ATTAINMENT, GOODPUT):
        assert verdict(view, measure, view.measured.settings).endswith(
            ": nothing to compare: no setting has two policies with this figure."
        )
    table = headline(view).items[-1]
    assert {row[table.columns.index("goodput, tokens/s")] for row in table.rows} == {"-"}


def test_table_by_hand():
    quick = [request(i, tpot=0.125, spec=(2, 8, 3)) for i in range(39)] + [request(39, tpot_slo=None)]
    view = view_of(point(requests(20), policy="ar"), point(quick, policy="ours"))
    table = headline(view).items[-1]
    assert table.columns == (
        "policy", "requests", "attainment, joint", "attainment, TPOT only", "goodput, tokens/s", "TPOT p50, ms",
        "TTFT p50, ms", "TTFT p99, ms",
    )  # fmt: skip
    slow_cells, quick_cells = table.rows
    assert slow_cells[:2] == ("ar", "40") and quick_cells[:2] == ("ours", "40 (1 without target)")
    assert slow_cells[2].startswith("50.0% (3") and quick_cells[2].startswith("100.0% (9")
    assert [cells[4].split(" ")[0] for cells in table.rows] == ["10.0", "19.5"]  # 20 and 39 times 5 tokens in 10 s
    assert [cells[5].split(" ")[0] for cells in table.rows] == ["312.5", "125.0"]  # half of them 125 ms, half 500
    assert [cells[6].split(" ")[0] for cells in table.rows] == ["500.0", "500.0"]
    assert {row for row, _ in table.strong} == {1} and {column for _, column in table.strong} >= {2, 3, 4}
    assert 6 not in {column for _, column in table.strong}  # TTFT is the same


def test_a_policy_with_invalid_points_only_is_said_not_to_be_compared():
    late = point(requests(0), policy="a", valid=False, invalid_reason="client was late")
    section = headline(view_of(late, point(requests(0), policy="b"), point(requests(0), policy="a", rate=2.0)))
    assert section.items[2] == Text("Not compared, as their points are invalid: a at 1/s.", warns=True)


def test_few_repeats_are_said_to_hide_what_differs_from_run_to_run():
    def texts(repeats: int) -> list[str]:
        points = [point(requests(2), policy=policy, repeat=n) for policy in "ab" for n in range(repeats)]
        return [item.text for item in headline(view_of(*points)).items if isinstance(item, Text)]

    assert texts(1)[-1].startswith("Points were measured once: intervals hold which requests happened to come")
    assert texts(4)[-1].startswith("Points were measured 4 times")
    assert len(texts(5)) == 2


def test_incomplete_records_are_not_used():
    rows, records, _ = point(requests(20), policy="a")
    view = view_of((rows, records[:30], []))
    table = headline(view).items[-1]
    assert table.rows[0][3] == "50.0%"
