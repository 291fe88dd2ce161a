"""Numbers of figures: how they are written, tabulated and thinned."""

from __future__ import annotations

import pytest

from adaserve_jax.report.document import Figure, Panel, Series, number, tables_of, thinned


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), ("chat", "chat"), (0.0, "0"), (-0.25, "-0.25"), (3, "3"), (12345.0, "12345"), (0.1 + 0.2, "0.3"),
        (1234.5678, "1235"), (0.000123456, "0.0001235"), (1e-9, "0.000000001"), (1e20, "1" + 20 * "0"),
        (float("inf"), "inf"), (9.9999, "10"), (99.96, "99.96"), (1249.6, "1250"), (1999.7, "2000"), (9999.7, "10000"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_and_no_exponent(value, text):
    assert number(value) == text


def figure(*series: Series, percent: bool = False, kind="line") -> Figure:
    return Figure("k", "Title", "", kind, "rate", (Panel("", series, "share", y_percent=percent),))


def test_series_over_a_common_x_stand_side_by_side():
    a = Series("a", (2.0, 1.0), (0.5, 0.25), (0.4, None), (0.6, None))
    b = Series("b", (1.0, 2.0, 4.0), (1.0, None, 0.125))
    (table,) = tables_of(figure(a, b, percent=True), most_rows=10)
    assert (table.key, table.title, table.caption) == ("k-0", "Title", "share")
    assert table.columns == ("rate", "a", "b")
    assert table.rows == (("1", "25.0%", "100.0%"), ("2", "50.0% (40.0% to 60.0%)", ""), ("4", "", "12.5%"))
    assert table.numeric == {0, 1, 2}


def test_series_over_x_of_their_own_get_a_row_per_point():
    a = Series("a", (1.0, 2.0), (3.0, 4.0), labels=("p", "q"))
    b = Series("b", (1.5,), (5.0,))
    (table,) = tables_of(figure(a, b), most_rows=10)
    assert table.columns == ("series", "rate", "share", "label")
    assert table.rows == (("a", "1", "3", "p"), ("a", "2", "4", "q"), ("b", "1.5", "5", ""))
    twice = Series("a", (1.0, 1.0), (3.0, 4.0))
    assert len(tables_of(figure(twice), most_rows=10)[0].rows) == 2


def test_categories_keep_their_order_and_empty_panels_have_no_table():
    (table,) = tables_of(figure(Series("a", ("chat", "batch"), (1.0, 2.0)), kind="bars"), most_rows=10)
    assert [row[0] for row in table.rows] == ["chat", "batch"] and table.numeric == {1}
    assert tables_of(figure(Series("a", (), ())), most_rows=10) == ()


def test_long_tables_are_cut_evenly_and_say_so():
    x = tuple(map(float, range(1001)))
    (table,) = tables_of(figure(Series("a", x, x)), most_rows=11)
    assert [row[0] for row in table.rows] == [str(100 * i) for i in range(11)]
    assert table.caption == "share; 11 of 1001 points, at even distances"


def test_thinning_keeps_extremes_ends_and_gaps():
    points = [(float(i), 1.0, None, None) for i in range(10_000)]
    points[4321], points[7654], points[5555] = (
        (4321.0, 9.0, None, None),
        (7654.0, -9.0, None, None),
        (5555.0, None, None, None),
    )
    kept = thinned(points, 400)
    assert len(kept) <= 500
    assert {points[0], points[-1], points[4321], points[7654], points[5555]} <= set(kept)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert thinned(points[:300], 400) == points[:300]
