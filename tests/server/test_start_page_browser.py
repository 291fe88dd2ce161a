"""The start page in a real browser: its policy lets its script run, it tries a request, with and without a key."""

from __future__ import annotations

import pytest

from adaserve_jax.server.settings import ServerSettings
from tests.browser import browser as browser

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("key", ["", "sesame"])
def test_it_tries_a_request_without_an_error(start_server, browser, key):
    faults: list[str] = []
    with start_server(ServerSettings(api_key=key or None)) as server:
        page = browser.new_page(viewport={"width": 380, "height": 800})
        page.on("console", lambda message: message.type in ("error", "warning") and faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.url)
        assert page.locator("#key").is_visible() == bool(key)
        if key:
            page.locator("#facts", has_text="Give the API key").wait_for()
            page.fill("#key", key)
            page.press("#key", "Tab")
        page.locator("#facts", has_text="scripted").wait_for()
        widths = page.evaluate("[...document.querySelectorAll('dd')].map((said) => said.clientWidth)")
        assert min(widths) > 250, "values have the width of a telephone"
        page.click("#send")
        page.locator("#told", has_text="of 40.0 ms, met").wait_for()
        assert page.locator("#text").inner_text().startswith("def add(a, b):def add")
        assert page.locator("#state").inner_text() == "ok: requests are served"
        assert page.evaluate("document.documentElement.scrollWidth") == 380, "it fits a telephone"
        page.close()
    assert faults == []
