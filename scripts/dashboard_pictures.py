"""Takes the pictures of docs/dashboard.md: the embedded pair under load of three classes, in light and dark colours.

Needs playwright, Pillow and a Chromium that is installed. Load comes and goes in waves, for the charts.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import async_playwright

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROMPTS = (
    "def add(a, b):", "class Stack:\n    def push(self, item):", "import os\n\ndef walk(path):",
    "Question: Tom has 3 apples and buys 4 more. How many has he?\nAnswer:",
)  # fmt: skip
CLASSES = {"interactive": 3, "chat": 4, "batch": 2}
TARGETS = "interactive=30:1000,chat=60,batch="
SERVE = (
    "--num-pages 48 --page-size 16 --max-context 512 --max-requests 16 --max-depth 4 --max-width 3 "
    "--max-tree-tokens 64 --token-edges 16,64 --row-edges 16"
)
"""Few programs, and so few pages that the draft's memory becomes pages at times."""
WAVE_S = 90.0
COLOURS = 128


def browser_path() -> str | None:
    """Return the path of the first browser that is installed; None without one."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


async def load(http: httpx.AsyncClient, rate_rps: float, seconds: float) -> None:
    """Open-loop requests whose rate swings between a fifth of `rate_rps` and all of it."""
    draw, loop = random.Random(0), asyncio.get_running_loop()
    start, sent = loop.time(), set()
    while (elapsed := loop.time() - start) < seconds:
        swing = 0.6 + 0.4 * math.sin(2 * math.pi * elapsed / WAVE_S)
        await asyncio.sleep(draw.expovariate(rate_rps * swing))
        body = {
            "prompt": draw.choice(PROMPTS), "max_tokens": draw.randrange(24, 160), "seed": draw.randrange(10**6),
            "slo_class": draw.choices(list(CLASSES), list(CLASSES.values()))[0], "ignore_eos": True,
        }  # fmt: skip
        task = asyncio.ensure_future(http.post("/v1/completions", json=body))
        sent.add(task)
        task.add_done_callback(sent.discard)
    await asyncio.gather(*sent)


async def picture(playwright, url: str, out: Path, scheme: str) -> None:
    browser = await playwright.chromium.launch(executable_path=browser_path())
    page = await browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    await page.goto(f"{url}/dashboard")
    await page.wait_for_selector('#status[data-status="ok"]')
    await page.wait_for_timeout(1500)
    seen = Image.open(io.BytesIO(await page.screenshot(full_page=True))).convert("RGB")
    seen.quantize(COLOURS).save(out / f"dashboard-{scheme}.png", optimize=True)
    await browser.close()


async def take(url: str, out: Path, rate_rps: float, seconds: float) -> None:
    """Pictures at 3/4 of the load and at its end."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http, async_playwright() as playwright:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.5)
        loading = asyncio.ensure_future(load(http, rate_rps, seconds))
        await asyncio.sleep(0.75 * seconds)
        await picture(playwright, url, out, "light")
        await asyncio.sleep(0.2 * seconds)
        await picture(playwright, url, out, "dark")
        await loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--rate", type=float, default=4.5, help="most requests per second")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--serve", default=SERVE, help="more options of adaserve serve, in one text")
    given = parser.parse_args()
    if browser_path() is None:
        sys.exit(f"expected one of {', '.join(BROWSERS)} to be installed, found none; install chromium")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "adaserve_jax.cli", "serve", "--dashboard", "--port", str(port)]
    command += ["--slo-classes", TARGETS, *given.serve.split()]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until_open(port, server)
        asyncio.run(take(f"http://127.0.0.1:{port}", given.out, given.rate, given.seconds))
    finally:
        server.terminate()
        server.wait(60)


def wait_until_open(port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)  # a closed port refuses at once
    sys.exit("the server ended; its message is above")


if __name__ == "__main__":
    main()
