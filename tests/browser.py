"""Pages in a real browser, with what their console said and where they asked. Tests import the fixtures by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="PAGES NOT SEEN: playwright is not installed")
pictures = pytest.importorskip("scripts.dashboard_pictures")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if pictures.browser_path() is None:
        pytest.skip(f"PAGES NOT SEEN: no browser is installed; looked for {', '.join(pictures.BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=pictures.browser_path())
        yield launched
        launched.close()


class Seen:
    """A page. faults: errors and warnings of its console, and exceptions. asked: every address that it loaded."""

    def __init__(self, browser, url: str, **context):
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.asked: set[str] = set()
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.faults.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def colour(self, selector: str, name: str) -> tuple[int, ...]:
        """Return a computed colour of the first such element, as RGB."""
        script = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        return tuple(map(int, re.findall(r"\d+", self.page.evaluate(script, [selector, name]))[:3]))


@pytest.fixture
def see(browser) -> Iterator:
    """see(url, **context): a page that is closed after the test."""
    opened = []

    def open_page(url: str, **context) -> Seen:
        opened.append(Seen(browser, url, **context))
        return opened[-1]

    yield open_page
    for seen in opened:
        seen.context.close()
