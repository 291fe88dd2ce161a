"""Takes the picture of docs/reports.md: the first screen of a report, which `adaserve report -o report.html` wrote.

Needs playwright, Pillow and a Chromium that is installed.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from scripts.dashboard_pictures import BROWSERS, COLOURS, ROOT, browser_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="an HTML report")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "report-light.png")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--size", default="1280x1400", help="pixels, width and height")
    given = parser.parse_args()
    if browser_path() is None:
        sys.exit(f"expected one of {', '.join(BROWSERS)} to be installed, found none; install chromium")
    width, height = map(int, given.size.split("x"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path())
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=given.scheme)
        page.goto(given.report.resolve().as_uri())
        seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    seen.quantize(COLOURS).save(given.out, optimize=True)


if __name__ == "__main__":
    main()
