"""The report in a real browser: no error, no other address, both colours, a telephone, paper."""

from __future__ import annotations

import contextlib
import re
import zlib
from base64 import b64decode
from pathlib import Path

import pytest

from adaserve_jax.report.document import Document, Figure
from adaserve_jax.report.html import render_html
from adaserve_jax.report.palette import COLOURS
from tests.browser import browser as browser
from tests.browser import see as see
from tests.report import made_document as made

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

SHOWN = "each => getComputedStyle(each).display !== 'none'"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(made.document()), encoding="utf-8")
    return path


def shade(name: str, *, dark: bool) -> tuple[int, ...]:
    return tuple(bytes.fromhex(COLOURS[name][dark][1:]))


def figures(document: Document) -> list[Figure]:
    return [item for section in document.sections for item in section.items if isinstance(item, Figure)]


def test_it_asks_nobody_and_its_console_is_quiet(path, see):
    seen = see(path.as_uri(), viewport=DESK)
    seen.page.wait_for_timeout(300)
    assert seen.faults == []
    assert {url for url in seen.asked if not url.startswith("data:")} == {path.as_uri()}
    count = sum(len(figure.panels) for figure in figures(made.document()))
    assert seen.page.locator("img.plot.light").count() == seen.page.locator("img.plot.dark").count() == count
    assert seen.page.evaluate("[...document.images].every(each => each.complete && each.naturalWidth > 0)")
    assert seen.page.evaluate("window.alerted === undefined && document.scripts.length === 0")


def test_its_policy_stops_what_would_get_in(path, see, tmp_path):
    broken = tmp_path / "broken.html"
    inside = '<script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
    broken.write_text(path.read_text(encoding="utf-8").replace("<main", inside + "<main", 1), encoding="utf-8")
    seen = see(broken.as_uri())
    seen.page.wait_for_timeout(200)
    assert seen.page.title() != "run"
    assert len([fault for fault in seen.faults if "Content Security Policy" in fault]) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colours_by_the_system_and_by_the_switch(path, see, scheme):
    dark = scheme == "dark"
    seen = see(path.as_uri(), color_scheme=scheme)
    other = "light" if dark else "dark"
    for chosen, is_dark in (("auto", dark), (other, not dark), (scheme, dark), ("auto", dark)):
        seen.page.locator(f"label:has(#scheme-{chosen})").click()
        assert seen.colour("body", "backgroundColor") == shade("page", dark=is_dark), chosen
        shown = seen.page.evaluate(f"[...document.images].filter({SHOWN}).map(each => each.classList[1])")
        assert set(shown) == {"dark" if is_dark else "light"} and 2 * len(shown) == seen.page.evaluate(
            "document.images.length"
        )


@pytest.mark.parametrize("width", [320, 390, 768, 1100, 1440])
def test_the_page_never_scrolls_sideways(path, see, width):
    seen = see(path.as_uri(), viewport={"width": width, "height": 800})
    seen.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 390:
        scroll = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"
        assert seen.page.evaluate(scroll) >= 1  # the wide table does, in itself
    wide = "[...document.querySelectorAll('img.plot')].filter(each => each.getBoundingClientRect().right > innerWidth)"
    assert seen.page.evaluate(f"{wide}.length") == 0


@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_letters_in_figures_can_be_read_and_stay_inside(path, see, viewport):
    seen = see(path.as_uri(), viewport=viewport)
    sizes = seen.page.evaluate(
        f"""[...document.querySelectorAll('img.plot')].filter({SHOWN}).map(plot =>
             plot.getBoundingClientRect().width / (plot.naturalWidth * 0.75) * 10.5)"""
    )
    assert min(sizes) >= 8 and max(sizes) <= 16  # CSS pixels of the smallest letters
    sources = seen.page.evaluate(
        "[...document.querySelectorAll('figure:not([id^=odd]) img.plot.light')].map(plot => plot.src)"
    )
    inside = seen.context.new_page()
    drawn = [b64decode(source.partition(",")[2]).decode() for source in sources]
    inside.set_content("".join(svg[svg.index("<svg") :] for svg in drawn))
    outside = inside.evaluate(
        """[...document.querySelectorAll('svg')].flatMap(plot => {
             const frame = plot.getBoundingClientRect();
             return [...plot.querySelectorAll('text')].filter(text => {
               const box = text.getBoundingClientRect();
               return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
             }).map(text => text.textContent.slice(0, 20));
           })"""
    )
    assert drawn and outside == []


def test_it_is_read_with_the_keyboard_and_contents_lead_to_figures(path, see):
    seen = see(path.as_uri(), viewport=DESK)
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.className") == "skip"
    seen.page.locator("nav a[href='#pareto']").click()
    top = seen.page.evaluate("document.getElementById('pareto').getBoundingClientRect().top")
    assert 0 <= top < 900
    assert seen.page.locator("nav").bounding_box()["y"] >= 0  # the contents stay in sight
    seen.page.locator("#pareto summary").press("Enter")
    assert seen.page.locator("#pareto tbody tr").count() == 20


def test_on_paper_every_figure_is_whole(path, see):
    seen = see(path.as_uri(), color_scheme="dark")
    pdf = seen.page.pdf(prefer_css_page_size=True, print_background=False)
    pages = [float(x) for x in re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+)", pdf)]
    assert pages and all(abs(width - 595) < 2 for width in pages)  # A4
    assert 3 <= len(pages) <= 16
    drawn = streams(pdf)
    for colour in ("s0", "s1", "s2", "s3"):
        assert stroked(colour, dark=False) in drawn and stroked(colour, dark=True) not in drawn, colour
    seen.page.emulate_media(media="print")
    seen.page.set_viewport_size({"width": 703, "height": 1017})  # A4 less its margins
    heights = seen.page.evaluate(
        "[...document.querySelectorAll('figure')].map(each => each.getBoundingClientRect().height)"
    )
    assert len(heights) == len(figures(made.document())) and max(heights) < 1017
    assert not seen.page.locator("nav").is_visible() and not seen.page.locator("details").first.is_visible()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 703


def streams(pdf: bytes) -> bytes:
    """What is drawn on all pages."""
    drawn = []
    for found in re.finditer(rb"stream\r?\n", pdf):
        with contextlib.suppress(zlib.error):
            drawn.append(zlib.decompressobj().decompress(pdf[found.end() :]))
    return b"".join(drawn)


def stroked(colour: str, *, dark: bool) -> bytes:
    """How a PDF of Chromium sets a colour for lines."""
    return (
        " ".join(
            f"{part / 255:.4f}".rstrip("0").rstrip(".").removeprefix("0") or "0" for part in shade(colour, dark=dark)
        ).encode()
        + b" RG"
    )
