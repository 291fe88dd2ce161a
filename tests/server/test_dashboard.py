"""The dashboard over HTTP: off by default, guarded by the key, sealed by its policy, small, and with true numbers."""

from __future__ import annotations

import base64
import re
from dataclasses import fields
from pathlib import Path

import pytest

from adaserve_jax.server.dashboard.live import DashboardSnapshot, LastRequest
from adaserve_jax.server.dashboard.routes import FOLDER, HEADERS, bearer
from adaserve_jax.server.dashboard.series import EngineSeries
from adaserve_jax.server.settings import ServerSettings
from tests.waiting import wait_until

FILES = ("dashboard.html", "dashboard.css", "dashboard.js", "panels.js", "charts.js")
GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "dashboard.md"


@pytest.fixture(scope="module")
def board(start_server):
    with start_server(ServerSettings(dashboard=True)) as server:
        yield server


def test_it_is_off_unless_asked_for(server):
    answer = server.http.get("/dashboard")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.json()["error"]["message"] == "the dashboard is off; start the server with --dashboard"
    assert server.http.get("/dashboard/data").status_code == 404
    assert server.state.observers == []


def test_every_file_is_served_with_its_kind_and_a_policy_that_forbids_the_rest(board):
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    for name in FILES:
        response = board.http.get("/dashboard" if name == "dashboard.html" else f"/dashboard/{name}")
        assert response.status_code == 200 and response.content == (FOLDER / name).read_bytes()
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rsplit(".")[-1]]
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = response.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'" and {"script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert not any("unsafe" in part or "*" in part or "http" in part for part in policy)
        assert "nosniff" in response.headers["x-content-type-options"]
    data = board.http.get("/dashboard/data").headers
    assert data["cache-control"] == "no-store" and data["content-security-policy"] == HEADERS["content-security-policy"]
    assert board.http.get("/dashboard/../settings.py").status_code == 404
    assert board.http.get("/dashboard/nothing.js").status_code == 404


def test_a_slash_behind_its_path_leads_to_it(board):
    answer = board.http.get("/dashboard/", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, "/dashboard")


def test_the_files_are_small_and_ask_nobody_else():
    texts = {name: (FOLDER / name).read_text() for name in FILES}
    assert sum(len(text.encode()) for text in texts.values()) < 60_000
    addresses = {a for text in texts.values() for a in re.findall(r"https?://[^'\" ]+", text)}
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name of SVG, which nobody asks for
    assert not re.search(r"\son\w+=|<script(?! type=\"module\" src)|<style|\sstyle=", texts["dashboard.html"])
    for name in FILES:
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", texts[name])


def test_the_data_count_what_was_served(board):
    def data() -> dict:
        return board.http.get("/dashboard/data").json()

    before = data()
    board.post(prompt="count me", max_tokens=9, slo_class="chat", n=2, user="secret-user")
    board.post(prompt="late-full", slo_class="batch", slo_ttft_ms=50)
    board.post(prompt="no target", max_tokens=6)
    wait_until(lambda: sum(each["requests"] for each in data()["windows"][0]["ended"]["attainment"]) >= 8)
    response = board.http.get("/dashboard/data", params={"since": before["seq"]})
    after = response.json()
    assert set(after) == {field.name for field in fields(DashboardSnapshot)}
    assert set(after["series"]) == {field.name for field in fields(EngineSeries)}
    minute = after["windows"][0]["ended"]
    classes = {each["slo_class"]: each for each in minute["attainment"]}
    assert (classes["chat"]["requests"], classes["chat"]["met"], classes["chat"]["attainment"]) == (2, 2, 1.0)
    assert (classes["batch"]["with_target"], classes["batch"]["met"], classes["batch"]["attainment"]) == (1, 0, 0.0)
    assert (classes["all"]["requests"], classes["all"]["with_target"]) == (4, 3)
    assert minute["causes"] == {"rejected": 1} and sum(minute["over_target"]) == 2
    assert minute["goodput_tps"] == pytest.approx(18 / minute["covered_s"], rel=2e-3)
    assert [request["slo_class"] for request in after["last_requests"]] == ["default", "batch", "chat", "chat"]
    assert after["ended_requests"] == 4 and after["in_flight"] == 0
    assert "count me" not in response.text and "secret-user" not in response.text
    assert after["seq"] > before["seq"] and after["series"]["seq"][0] == before["seq"] + 1
    assert len(response.content) < 8_000


def test_a_wrong_since_is_refused(board):
    for since in ("-1", "x"):
        response = board.http.get("/dashboard/data", params={"since": since})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "since")


def basic(user: str, password: str) -> dict[str, bytes]:
    return {"authorization": b"Basic " + base64.b64encode(f"{user}:{password}".encode())}


def test_the_key_guards_it_and_a_browser_can_show_the_key(start_server):
    with start_server(ServerSettings(dashboard=True, api_key="sesame:ä")) as server:
        for path in ("/dashboard", "/dashboard/data", "/dashboard/charts.js"):
            refused = server.http.get(path)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers.get_list("www-authenticate")[0].startswith("Basic ")
            assert len(refused.headers.get_list("www-authenticate")) == 1
            for bad in (basic("sesame:ä", ""), basic("", "sesame"), {"authorization": "Basic sesame"}):
                assert server.http.get(path, headers=bad).status_code == 401
            for good in (basic("", "sesame:ä"), basic("me", "sesame:ä"), {"authorization": "Bearer sesame:ä".encode()}):
                assert server.http.get(path, headers=good).status_code == 200
        elsewhere = server.http.get("/metrics", headers=basic("", "sesame:ä"))
        assert elsewhere.status_code == 401 and elsewhere.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/dashboards", headers=basic("", "sesame:ä")).status_code == 401


def test_credentials_that_are_not_basic_stay_as_they_are():
    for value in (b"Bearer a:b", b"", b"Basic", b"Basic !!", b"Basic " + base64.b64encode(b"nocolon")):
        assert bearer(value) == value
    assert bearer(b"bAsIc " + base64.b64encode(b"u:p:q")) == b"Bearer p:q"


def test_before_the_engine_is_ready_it_says_so(start_server):
    with start_server(ServerSettings(dashboard=True), ready=False) as server:
        found = server.http.get("/dashboard/data").json()
        assert (found["status"], found["detail"]) == ("starting", "the engine loads and compiles")


def test_the_guide_explains_every_field():
    named = set(re.findall(r"`([a-z0-9_]+)`", GUIDE.read_text()))
    for kind in (DashboardSnapshot, EngineSeries, LastRequest):
        assert {field.name for field in fields(kind)} <= named
