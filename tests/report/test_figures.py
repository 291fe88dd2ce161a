"""Figures as SVG: stable, small, light and dark, and every kind shows what it was given."""

from __future__ import annotations

import re
from base64 import b64decode
from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adaserve_jax.errors import ConfigError
from adaserve_jax.report import figures as svg
from adaserve_jax.report.document import Figure, Panel, Series
from adaserve_jax.report.figures import draw
from adaserve_jax.report.palette import DASHES, shades, styles_of
from tests.report import made_document as made

pytest.importorskip("matplotlib")
KINDS = {
    "line": made.lines, "cdf": made.distribution, "scatter": made.pareto, "bars": made.bars, "stack": made.stack,
    "step": made.steps, "hostile": made.hostile,
}  # fmt: skip
LARGEST = 80_000


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: draw(figure()) for name, figure in KINDS.items()}


def pictures(html: str, css_class: str = "plot light") -> list[str]:
    """SVG texts of the pictures of a class."""
    found = re.findall(rf'<img class="{css_class}"[^>]* src="data:image/svg\+xml;base64,([^"]*)"', html)
    return [b64decode(each).decode() for each in found]


def panels(html: str, css_class: str = "plot light") -> list[ElementTree.Element]:
    """SVGs of a class, which are well-formed XML; styles as attributes, names without their namespaces."""
    roots = [ElementTree.fromstring(text) for text in pictures(html, css_class)]
    for element in (each for root in roots for each in root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        style = dict(part.split(": ", 1) for part in element.attrib.pop("style", "").split("; ") if part)
        element.attrib |= style | {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    return roots


def texts(element: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in element.iter("text")]


def simple(kind="line", *, x=(1.0, 2.0, 4.0), y=(1.0, 2.0, 3.0), percent=False, **options) -> Figure:
    panel = Panel("panel", (Series("one", x, y),), "tokens", y_percent=percent)
    return Figure("f", "title", "caption", kind, "requests/s", (panel,), **options)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_small_and_has_words_for_those_who_do_not_see_it(drawn, name):
    figure = KINDS[name]()
    for shade in ("light", "dark"):
        found = pictures(drawn[name], f"plot {shade}")
        alts = [unescape(alt) for alt in re.findall(rf'<img class="plot {shade}" alt="([^"]*)"', drawn[name])]
        assert len(found) == len(alts) == len(figure.panels)
        assert max(map(len, found)) < LARGEST
        for alt, panel in zip(alts, figure.panels, strict=True):
            assert alt.startswith(f"{panel.title or figure.title}. ")
            assert all(series.name.split("<")[0] in alt for series in panel.series)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_are_of_one_shade_and_nothing_reaches_beyond_the_picture(drawn, name, dark):
    allowed = {*shades(dark=dark).values(), "none"}
    for kind in ("plot", "swatch"):
        for root in panels(drawn[name], f"{kind} {'dark' if dark else 'light'}"):
            assert not {"script", "image", "foreignObject", "a"} & {element.tag for element in root.iter()}
            identifiers = [element.get("id") for element in root.iter() if element.get("id")]
            assert len(identifiers) == len(set(identifiers))
            for element in root.iter():
                for attribute, value in element.attrib.items():
                    if attribute in ("fill", "stroke"):
                        assert value in allowed or re.fullmatch(r"url\(#h\w+\)", value), value
                    if attribute == "href":
                        assert value.startswith("#") and value[1:] in identifiers


@pytest.mark.slow
def test_the_same_figure_gives_the_same_bytes(drawn):
    for name in ("stack", "hostile"):
        assert draw(KINDS[name]()) == drawn[name]


def test_settings_of_the_user_change_nothing(drawn):
    import matplotlib

    with matplotlib.rc_context({"font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path", "axes.grid": True}):
        assert draw(made.bars()) == drawn["bars"]
        assert matplotlib.rcParams["font.size"] == 40


def test_names_from_the_data_are_text(drawn):
    assert "<script" not in drawn["hostile"]
    for root in panels(drawn["hostile"]):
        assert not list(root.iter("script"))
    first, second = panels(drawn["hostile"])
    assert any("$x_1$" in text for text in texts(first))  # not mathematics
    assert "no values" in texts(second)


def test_percent_and_logarithmic_axes():
    (root,) = panels(draw(simple(y=(0.1, 0.5, 1.0), percent=True)))
    assert {"0%", "100%"} <= set(texts(root))
    assert {"1", "2", "4"} <= set(texts(root))  # a tick at every rate
    many = tuple(0.37 * 1.3**i for i in range(40))
    (root,) = panels(draw(simple(x=many, y=many, log_x=True)))
    assert {"1", "10", "100", "1000"} <= set(texts(root))


def test_values_that_a_logarithmic_axis_cannot_show_are_refused():
    with pytest.raises(ValueError, match=r"f: expected every x above 0 on a logarithmic axis, got 0.0"):
        draw(simple(x=(0.0, 1.0, 2.0), log_x=True))


def strokes(root: ElementTree.Element, colour: str = "s0") -> list[str]:
    """Paths of lines in a colour, without markers' definitions and whiskers' ends."""
    return [
        path.get("d", "")
        for path in root.iter("path")
        if path.get("stroke") == shades(dark=False)[colour] and path.get("id") is None and path.get("clip-path")
    ]


def test_a_gap_is_a_gap_in_the_line():
    (whole,) = panels(draw(simple("step", x=(0.0, 1.0, 2.0, 3.0, 4.0), y=(1.0, 2.0, 3.0, 2.0, 1.0))))
    (gapped,) = panels(draw(simple("step", x=(0.0, 1.0, 2.0, 3.0, 4.0), y=(1.0, 2.0, None, 2.0, 1.0))))
    assert [path.count("M") for path in strokes(whole)] == [1]
    assert [path.count("M") for path in strokes(gapped)] == [2]


def test_bars_are_as_long_as_their_values():
    (root,) = panels(draw(simple("bars", x=("a", "b", "c"), y=(1.0, None, 4.0))))
    heights = []
    for path in root.iter("path"):
        if path.get("fill") == shades(dark=False)["s0"]:
            ys = [float(y) for _, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]
            heights.append(max(ys) - min(ys))
    assert len(heights) == 3 and heights[1] == 0
    assert heights[2] == pytest.approx(4 * heights[0], rel=1e-3)


def test_intervals_become_bands_along_lines_and_whiskers_at_points():
    def figure(kind, x):
        n = len(x)
        series = Series("one", x, (2.0,) * n, (1.0,) * n, (3.0,) * n)
        return Figure("f", "t", "", kind, "x", (Panel("", (series,), "y"),))

    (line,) = panels(draw(figure("line", (1.0, 2.0, 3.0))))
    assert len([each for each in line.iter() if each.get("fill-opacity") == "0.15"]) == 1
    for kind, x, count in (("line", (1.0,), 1), ("scatter", (1.0, 2.0), 2), ("bars", ("a", "b"), 2)):
        (root,) = panels(draw(figure(kind, x)))
        ends = list(root.iter("use"))
        bars = [
            p
            for p in root.iter("path")
            if re.fullmatch(r"M [\d.]+ [\d.]+ L [\d.]+ [\d.]+", " ".join(p.get("d", "").split()))
            and p.get("stroke-width") == "1.3"
        ]
        assert len(bars) == count, kind
        assert len(ends) >= 2 * count


def test_long_categories_lie_down():
    (lying,) = panels(draw(made.stack()))
    (standing,) = panels(draw(made.bars()))
    assert float(lying.get("viewBox").split()[3]) > float(standing.get("viewBox").split()[3])
    assert "adaserve @ 8/s" in texts(lying)


def test_many_series_look_different_and_alike_in_all_panels():
    series = tuple(Series(f"policy {i}", (1.0,), (1.0,), colour=i) for i in range(20))
    twins = tuple(Series(f"{s.name}, TPOT only", s.x, s.y, colour=s.colour) for s in series[:6])
    figure = Figure("f", "t", "", "line", "x", (Panel("", series + twins, "y"), Panel("", series[3:4], "y")))
    styles = styles_of(figure)
    looks = [(style.colour, style.marker, style.dash, style.hollow) for style in styles.values()]
    assert len(set(looks)) == len(looks) == 26
    greys = [(style.marker, style.dash, style.hollow) for style in styles.values()]
    assert len(set(greys)) == len(greys)  # in grey too
    assert len(set(DASHES)) == len(DASHES)
    assert draw(figure).count("<li>") == 26
    assert "<li>" not in draw(simple())  # of one, the title says it all


def test_without_matplotlib_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(svg, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install adaserve-jax\[plot\].*or write the report as Markdown"):
        draw(simple())


ODD = st.sampled_from([None, 0.0, 1.0, -1.0, 0.5, 3, 1e-300, 1e12, 1e300, float("nan"), float("inf")])
NAMES = st.sampled_from(["a", "b", "", "a long name of a point @ 2/s urgent=0.6", "<b>", "日本"])


@st.composite
def odd_series(draw_value, names: bool) -> Series:
    size = draw_value(st.sampled_from([0, 1, 2, 5, 450]))
    xs = st.lists(NAMES if names else st.floats(-1e9, 1e9), min_size=min(size, 5), max_size=min(size, 5))
    column = st.lists(ODD, min_size=min(size, 5), max_size=min(size, 5))
    times = max(1, size // 5)
    x, y, low, high = (tuple(draw_value(each)) * times for each in (xs, column, column, column))
    bounds = (low, high) if draw_value(st.booleans()) else ((), ())
    return Series(draw_value(NAMES), x, y, *bounds, colour=draw_value(st.integers(0, 20)))


@settings(max_examples=4, phases=[Phase.generate])
@given(st.data(), st.sampled_from(["line", "step", "scatter", "bars", "stack"]), st.booleans())
@pytest.mark.slow
def test_whatever_the_values_something_is_drawn(data, kind, names):
    series = st.lists(odd_series(names=names), max_size=4).map(tuple)
    made_panels = tuple(Panel(title, data.draw(series), "y") for title in ("", "t" * 70))
    found = panels(draw(Figure("k", "T", "", kind, "x", made_panels, marks=((1.0, "mark"),))))
    assert len(found) == 2
    for root in found:
        assert not [a for e in root.iter() for a in e.attrib.values() if "nan" in a.split() or "inf" in a.split()]


def test_a_range_that_does_not_rise_is_refused():
    with pytest.raises(ValueError, match=r"t: expected a y_range that rises, got \(1, 1\)"):
        Panel("t", (), "y", (1, 1))
