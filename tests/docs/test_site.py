"""The site: every page is in its navigation, links work there and in the repository, and nothing is loaded from
elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = ROOT / "docs"
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|href|data)=\"([^\"]+)\""
)
ELSEWHERE = re.compile(r"^(?:https?:)?//")


def pages_of(nav: list[Any]) -> list[str]:
    """Files that the navigation names, in order."""
    entries = [value for item in nav for value in (item.values() if isinstance(item, dict) else [item])]
    return [page for entry in entries for page in (pages_of(entry) if isinstance(entry, list) else [entry])]


@pytest.fixture(scope="module")
def hooks() -> Any:
    """The module that mkdocs.yml names."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make test` installs it")
    from scripts import site_hooks

    return site_hooks


@pytest.fixture(scope="module")
def built(hooks, tmp_path_factory) -> Path:
    """The site, strictly."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_the_navigation_once(hooks):
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(hooks.GUESTS)
    assert sorted(pages_of(CONFIG["nav"])) == sorted(written)


def test_it_warns_of_nothing_silently():
    assert CONFIG["strict"] is True
    assert set(CONFIG["validation"].values()) == {"warn"}


def test_it_asks_for_no_font_and_no_address():
    assert CONFIG["theme"]["font"] is False
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())


def test_files_that_the_site_takes_from_elsewhere_exist(hooks):
    assert [home for home in hooks.GUESTS.values() if not (ROOT / home).is_file()] == []
    assert [name for name in CONFIG["extra"]["polyfills"] if not (DOCS / name).is_file()] == []


@pytest.mark.parametrize(
    ("page", "text", "on_the_site"),
    [
        ("security.md", "[policy](../SECURITY.md)", "[policy](reporting.md)"),
        ("architecture/star.md", "[x](../star.md#a)", "[x](../star.md#a)"),
        ("howto/write-a-policy.md", "[x](../../CONTRIBUTING.md#a-policy)", "[x](../contributing.md#a-policy)"),
        ("about.md", "[x](docs/howto/write-a-policy.md) [y](LICENSE)", "[x](howto/write-a-policy.md) y"),
        ("peers.md", "[x](../../docs/bench.md)", "[x](bench.md)"),
        ("about.md", "![x](docs/figures/peers.svg)", "![x](figures/peers.svg)"),
        ("security.md", "[deploy/](../deploy) `[a](b)` [p](https://a.org)", "deploy/ `[a](b)` [p](https://a.org)"),
        ("security.md", "```\n[x](../deploy)\n```", "```\n[x](../deploy)\n```"),
        ("security.md", "[lost](../nowhere.md)", "[lost](../nowhere.md)"),
        ("reports.md", "![a picture](figures/report-light.png)", "![a picture](figures/report-light.png)"),
    ],
)
def test_links_as_the_site_has_them(hooks, page, text, on_the_site):
    assert hooks.relinked(text, page) == on_the_site


@pytest.mark.slow
def test_it_builds_strictly_and_loads_nothing_from_elsewhere(built):
    pages = [path for path in built.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= len(pages_of(CONFIG["nav"]))
    loaded = {(page.name, address) for page in pages for address in LOADED.findall(page.read_text())}
    assert {each for each in loaded if ELSEWHERE.match(each[1])} == set()
    files = [(page, address) for page in pages for address in LOADED.findall(page.read_text()) if ":" not in address]
    assert [each for each in files if not (each[0].parent / each[1].partition("?")[0].partition("#")[0]).exists()] == []
    styles = "".join(path.read_text() for path in built.rglob("*.css"))
    assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", styles)


@pytest.mark.slow
def test_a_browser_asks_for_nothing_and_finds_what_it_searches_for(built):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; `make test` installs it")
    from scripts.dashboard_pictures import browser_path

    if browser_path() is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        asked, failures = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        for name in ("index.html", "concepts.html", "howto/write-a-policy.html", "results.html"):
            page.goto((built / name).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{name} is wider than a telephone"
        page.goto((built / "http.html").as_uri())
        overflow = "(table) => table.scrollWidth - table.clientWidth"
        assert page.locator(".md-typeset table").first.evaluate(overflow) <= 0, "routes are wider than a telephone"
        page.set_viewport_size({"width": 1280, "height": 900})
        lines = "(paths) => paths.map((path) => path.getClientRects().length)"
        assert set(page.locator("td:first-child:nth-last-child(2) > code:only-child").evaluate_all(lines)) == {1}, (
            "a path is broken in the middle"
        )
        page.click("input[name=query]")
        page.keyboard.type("bandit")
        page.wait_for_selector(".md-search-result__link", timeout=60_000)
        browser.close()
    assert failures == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
