"""Takes the pictures of docs/reports.md, of a report that `adaserve report -o report.html` wrote.

Its first screen in light colours, and its curves in dark ones. Needs playwright, Pillow and a Chromium.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from scripts.dashboard_pictures import BROWSERS, COLOURS, ROOT, browser_path

WIDTH, HEIGHT = 1280, 1000
PICTURES = {"light": "", "dark": "#curves"}
"""By colours, what of the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="an HTML report")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    given = parser.parse_args()
    if browser_path() is None:
        sys.exit(f"expected one of {', '.join(BROWSERS)} to be installed, found none; install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path())
        for scheme, place in PICTURES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.goto(given.report.resolve().as_uri())
            if place:
                page.evaluate("place => document.querySelector(place).scrollIntoView()", place)
            seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            seen.quantize(COLOURS).save(given.out / f"report-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
