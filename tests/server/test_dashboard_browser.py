"""The dashboard in a real browser: no error, no other address, the data's numbers, both colours, a telephone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats
from adaserve_jax.server.app import create_app
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.stats import LearningStats, StepStats
from tests.browser import Seen
from tests.browser import browser as browser
from tests.browser import see as see
from tests.server.scripted import ByteTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow

UNKNOWN = "\N{EN DASH}"
WORDS = {"rejected": "no room, or refused"}


def tile(seen: Seen, name: str) -> tuple[str, str]:
    """Return value and second line of a tile."""
    div = seen.page.locator(f"#tiles > div:has(dt:text-is('{name}'))")
    return div.locator("dd").nth(0).inner_text(), div.locator("dd").nth(1).inner_text()


@pytest.fixture(scope="module")
def board(start_server):
    with start_server(ServerSettings(dashboard=True)) as server:
        for i in range(6):
            server.post(prompt=f"request {i}", max_tokens=8 + i, slo_class=("chat", "interactive")[i % 2])
        server.post(prompt="late-full", slo_class="batch", slo_ttft_ms=50)
        server.post(prompt="no target", max_tokens=5)
        time.sleep(2.2)
        yield server


def test_drafts_that_learn_have_a_table(start_server, see):
    learning = LearningStats(
        version={"default": 3, "code": 0}, drafted_tokens={"default": 400}, accepted_tokens={"default": 300},
        held_out_acceptance={"default": 0.625}, refused={"default": 2}, rolled_back={"default": 1},
    )  # fmt: skip
    with start_server(ServerSettings(dashboard=True)) as server:
        server.engine.stats = lambda: EngineStats(StepStats(draft_resident=True), learning=learning)
        seen = see(f"{server.url}/dashboard")
        rows = seen.page.locator("table:has(caption:text-is('Drafts that learn')) tbody tr")
        rows.first.wait_for()
        assert [row.split() for row in rows.all_inner_texts()] == [
            ["default", "3", "75%", "62.5%", "3"], ["code", "0", UNKNOWN, UNKNOWN, "0"],
        ]  # fmt: skip
        assert not seen.faults


def test_it_shows_the_data_without_an_error_and_asks_nobody_else(board, see):
    seen = see(f"{board.url}/dashboard", viewport={"width": 1280, "height": 900})
    seen.page.wait_for_selector('#status[data-status="ok"]')
    seen.page.wait_for_timeout(1500)
    data = board.http.get("/dashboard/data").json()
    five = data["windows"][1]["ended"]
    whole = five["attainment"][0]
    assert (whole["met"], whole["with_target"]) == (6, 7)
    assert tile(seen, "Attainment") == ("85.7%", "6 of 7 met their targets")
    assert float(tile(seen, "Time to first token")[0].split()[0]) == pytest.approx(five["ttft_ms"]["p50"], abs=0.01)
    assert tile(seen, "KV pages used") == ("25%", "3 of 12; 0 cached")
    assert tile(seen, "Running")[0] == str(data["series"]["running"][-1]) == "0"
    assert tile(seen, "Draft") == ("resident", "no swaps so far")
    rows = seen.page.locator("#classes tbody tr")
    table = {
        rows.nth(i).locator("th").inner_text(): rows.nth(i).locator("td").nth(2).inner_text()
        for i in range(rows.count())
    }
    assert set(table) == {"all", "default", "interactive", "chat", "batch"}
    assert table["chat"].split() == ["100%", "3", "of", "3"] and table["batch"].split() == ["0%", "0", "of", "1"]
    assert table["default"].split() == ["1", "without", "target"]
    assert seen.page.locator("#causes tbody th").all_inner_texts() == [WORDS["rejected"]]
    assert seen.page.locator("#last tbody tr").count() == len(data["last_requests"]) == 8
    assert seen.page.locator("#last tbody tr").nth(1).locator("td").nth(2).inner_text() == WORDS["rejected"]
    seen.page.locator("#over summary").click()
    bars = [int(text) for text in seen.page.locator("#over td").all_inner_texts()]
    assert bars == five["over_target"]
    assert not seen.page.locator("#banner").is_visible() and not seen.page.locator("#empty").is_visible()
    assert seen.faults == []
    asked = [httpx.URL(url) for url in seen.asked if not url.startswith("data:")]
    assert {url.host for url in asked} == {"127.0.0.1"}
    files = ("data", "dashboard.css", "dashboard.js", "panels.js", "charts.js")
    assert {url.path for url in asked} == {"/dashboard", *(f"/dashboard/{name}" for name in files)}


def test_charts_are_read_with_the_keyboard_and_as_tables(board, see):
    seen = see(f"{board.url}/dashboard")
    seen.page.wait_for_selector('#status[data-status="ok"]')
    seen.page.wait_for_timeout(300)
    plot = seen.page.locator("section:has(#chart-requests) svg.plot")
    assert plot.get_attribute("aria-label").startswith("Requests, last 5 min. Now: running 0, waiting 0.")
    plot.focus()
    plot.press("ArrowLeft")
    said = seen.page.locator("section:has(#chart-requests) [aria-live]")
    assert "running 0, waiting 0" in said.inner_text()
    details = seen.page.locator("section:has(#chart-requests) details")
    details.locator("summary").press("Enter")
    assert details.locator("thead th").all_inner_texts() == ["When", "running", "waiting"]
    assert details.locator("tbody tr").count() >= 1
    seen.page.locator("#spans input[value='60']").focus()
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("ArrowRight")
    assert plot.get_attribute("aria-label").startswith("Requests, last 15 min.")
    unnamed = seen.page.evaluate(
        "[...document.querySelectorAll('svg.plot')].filter(s => !s.getAttribute('aria-label')).length"
    )
    assert unnamed == 0 and seen.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1600])
def test_it_fits_and_follows_the_colours(board, see, scheme, width):
    seen = see(f"{board.url}/dashboard", viewport={"width": width, "height": 740}, color_scheme=scheme)
    seen.page.wait_for_selector('#status[data-status="ok"]')
    seen.page.wait_for_timeout(300)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    shade = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(shade.removeprefix("rgb(").split(",")[0])
    assert red > 200 if scheme == "light" else red < 50
    assert seen.faults == []


def test_without_a_draft_model_it_says_so(serve_engine, see):
    engine = ScriptedEngine(EngineConfig(target="models/scripted", draft=None))
    engine.start()
    with serve_engine(engine, ByteTokenizer(), ServerSettings(dashboard=True)) as server:
        seen = see(f"{server.url}/dashboard")
        seen.page.locator("#engine", has_text="no draft model").wait_for()
    engine.close()


def test_an_empty_server_says_what_to_do(start_server, see):
    with start_server(ServerSettings(dashboard=True)) as server:
        seen = see(f"{server.url}/dashboard")
        seen.page.wait_for_selector("#empty:not([hidden])")
        assert f"curl {server.url}/v1/completions" in seen.text("#example")
        assert "interactive (50 ms per token)" in seen.text("#class-names")
        server.post(prompt="now there is something", max_tokens=3)
        seen.page.wait_for_selector("#empty", state="hidden")
        assert seen.faults == []


@contextlib.contextmanager
def serving_at(port: int) -> Iterator[httpx.Client]:
    """A server of its own at this port."""
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    engine.start()
    app = create_app(engine, ByteTokenizer(), ServerSettings(dashboard=True))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", http="h11", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        while not server.started:
            time.sleep(0.01)
        yield http
    server.should_exit = True
    thread.join()
    engine.close()


def test_a_server_that_goes_and_comes_back(see):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving_at(port) as http:
        seen = see(f"http://127.0.0.1:{port}/dashboard")
        http.post("/v1/completions", json={"prompt": "before", "max_tokens": 4})
        seen.page.wait_for_selector("#last tbody tr")
        assert not seen.page.locator("#banner").is_visible()
    seen.page.wait_for_selector('#status[data-status="lost"]')
    assert seen.text("#banner").startswith("No answer from the server since ")
    assert seen.page.locator("#last tbody tr").count() == 1  # what was known stays
    with serving_at(port):
        seen.page.wait_for_selector('#status[data-status="ok"]')
        seen.page.wait_for_selector("#banner", state="hidden")
        seen.page.wait_for_selector("#empty:not([hidden])")
        assert seen.page.locator("#last tbody tr").count() == 0  # it is another server


def test_a_server_that_ends_says_so(start_server, see):
    with start_server(ServerSettings(dashboard=True)) as server:
        seen = see(f"{server.url}/dashboard")
        seen.page.wait_for_selector('#status[data-status="ok"]')
        server.state.drain()
        seen.page.wait_for_selector('#status[data-status="draining"]')
        assert "finishes what it has" in seen.text("#banner")


def test_the_browser_shows_the_key(start_server, see):
    with start_server(ServerSettings(dashboard=True, api_key="sesame:ä")) as server:
        seen = see(f"{server.url}/dashboard", http_credentials={"username": "", "password": "sesame:ä"})
        seen.page.wait_for_selector('#status[data-status="ok"]')
        assert tile(seen, "Running")[0] == "0"
