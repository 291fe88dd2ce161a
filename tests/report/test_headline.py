"""The first table and its words: who is ahead, where, by how much, and where nobody is."""

from adaserve_jax.report.compare import headline, verdict
from adaserve_jax.report.document import Text
from adaserve_jax.report.measures import ATTAINMENT, GOODPUT
from adaserve_jax.report.points import measured
from adaserve_jax.report.view import View
from tests.report.made import folder, point, request


def requests(missed: int, of: int = 40):
    return [request(i, tpot=0.5 if i < missed else 0.125) for i in range(of)]


def view_of(*points) -> View:
    return View.of(measured([folder(*points)]))


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


def test_being_ahead_of_one_of_two_is_not_enough():
    view = view_of(
        point(requests(4), policy="a"), point(requests(5)[::-1], policy="b"), point(requests(30), policy="c")
    )
    assert "no policy is ahead" in verdict(view, ATTAINMENT, view.measured.settings)


def test_one_policy_alone_has_nothing_to_be_ahead_of():
    view = view_of(point(requests(4)))
    assert "nothing to compare" in verdict(view, ATTAINMENT, view.measured.settings)


def test_table_by_hand():
    quick = [request(i, tpot=0.125, spec=(2, 8, 3)) for i in range(39)] + [request(39, tpot_slo=None)]
    view = view_of(point(requests(20), policy="ar"), point(quick, policy="ours"))
    table = headline(view).items[-1]
    assert table.columns[:5] == ("policy", "requests", "with a target", "attainment, joint", "attainment, TPOT only")
    slow_cells, quick_cells = table.rows
    assert slow_cells[:3] == ("ar", "40", "40") and quick_cells[:3] == ("ours", "40", "39")
    assert slow_cells[3].startswith("50.0% (3") and quick_cells[3].startswith("100.0% (9")
    assert [cells[5].split(" ")[0] for cells in table.rows] == ["10.0", "19.5"]  # 20 and 39 times 5 tokens in 10 s
    assert [cells[6].split(" ")[0] for cells in table.rows] == ["20.0", "20.0"]
    assert [cells[7].split(" ")[0] for cells in table.rows] == ["312.5", "125.0"]  # half of them 125 ms, half 500
    assert [cells[9].split(" ")[0] for cells in table.rows] == ["500.0", "500.0"]
    assert [cells[10].split(" ")[0] for cells in table.rows] == ["-", "1.50"]  # 3 of 2 verifications
    assert {row for row, _ in table.strong} == {1} and {column for _, column in table.strong} >= {3, 4, 5}
    assert 6 not in {column for _, column in table.strong}  # throughput is the same


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
