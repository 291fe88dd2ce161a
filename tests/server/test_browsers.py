"""What browsers are told: whose pages may read answers, what may be framed, pages that load nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from adaserve_jax.server.settings import ServerSettings

PAGE = "https://app.example.org"


@pytest.fixture(scope="module")
def opened(start_server):
    with start_server(ServerSettings(api_key="k", cors_origins=(PAGE, "http://localhost:3000"))) as server:
        yield server


def test_every_answer_forbids_guessing_of_types_and_frames(server, opened):
    answers = [server.http.get(path) for path in ("/health", "/v1/models", "/docs", "/nowhere", "/metrics")]
    answers += [server.post(prompt="x", stream=True), server.post(prompt=""), opened.http.get("/v1/models")]
    assert {answer.status_code for answer in answers} == {200, 400, 401, 404}
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_origin_may_read_anything_by_default(server):
    for response in (
        server.http.get("/health", headers={"origin": PAGE}),
        server.http.options("/v1/completions", headers={"origin": PAGE, "access-control-request-method": "POST"}),
    ):
        assert not [name for name in response.headers if name.startswith("access-control-")]


def test_a_page_cannot_post_without_asking(server):
    """Browsers send only these three types across origins without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
        assert "content-type application/json" in response.json()["error"]["message"]


def test_origins_that_are_named_may_ask_without_a_key_and_read_with_one(opened):
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    leave = opened.http.options("/v1/completions", headers=asked)
    assert leave.status_code == 200
    assert leave.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in leave.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in leave.headers
    with_key = {"origin": PAGE, "authorization": "Bearer k"}
    answer = opened.http.post("/v1/completions", json={"prompt": "x"}, headers=with_key)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert "x-adaserve-warning" in answer.headers["access-control-expose-headers"]
    without_key = opened.http.post("/v1/completions", json={"prompt": "x"}, headers={"origin": PAGE})
    assert without_key.status_code == 401 and without_key.headers["access-control-allow-origin"] == PAGE


def test_a_page_may_read_why_the_server_failed_or_took_no_header(opened):
    """The answers that are made before and after all routes: of a bug, and of headers that are too large."""
    headers = {"origin": PAGE, "authorization": "Bearer k"}
    failed = opened.http.post("/v1/completions", json={"prompt": "bug here"}, headers=headers)
    refused = opened.http.get("/health", headers=headers | {"x-more": "x" * 40_000})
    assert [failed.status_code, refused.status_code] == [500, 431]
    for answer in (failed, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"] and answer.headers["x-request-id"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("origin", ["https://app.example.org.evil", "http://app.example.org", "null", "https://evil"])
def test_other_origins_may_not(opened, origin):
    asked = {"origin": origin, "access-control-request-method": "POST"}
    assert opened.http.options("/v1/completions", headers=asked).status_code == 400
    for response in (
        opened.http.options("/v1/completions", headers=asked),
        opened.http.get("/health", headers={"origin": origin}),
    ):
        assert "access-control-allow-origin" not in response.headers


class Page(HTMLParser):
    """The tags of a page, and every attribute that loads or leads somewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]


def test_no_page_loads_anything_from_elsewhere(server):
    pages = 0
    for path in ("/", "/docs", "/redoc", "/docs/oauth2-redirect", "/nowhere", "/dashboard"):
        response = server.http.get(path)
        if "html" not in response.headers["content-type"]:
            continue
        pages += 1
        page = Page(response.text)
        assert all(not re.match(r"(?i)\s*((?!data:)[a-z][a-z0-9+.-]*:|//)", each) for each in page.addresses), path
        assert not re.search(r"(?i)@import|url\(\s*['\"]?(https?:)?//", response.text), path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy or "default-src 'self'" in policy
    assert pages == 2


def test_the_page_of_the_api_has_every_route_and_field(server):
    response = server.http.get("/docs")
    assert response.headers["content-security-policy"].startswith("default-src 'none'; ")
    document = server.http.get("/openapi.json").json()
    assert not Page(response.text).tags & {"script", "link", "img", "iframe", "object", "form"}
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in response.text
    for name in ("CompletionBody", "ChatBody", "ResponsesBody", "TokenizeBody", "DetokenizeBody"):
        for field in document["components"]["schemas"][name]["properties"]:
            assert f"<td><code>{field}</code>" in response.text
    chat = response.text[response.text.index("id='post-v1-chat-completions'") :]
    fields = re.findall(r"<tr><td><code>(\w+)</code>( \(required\))?</td>", chat)
    assert fields[0] == ("messages", " (required)") and fields[1][0] == "model"
    assert set(re.findall(r"href='#([\w-]+)'", response.text)) == set(re.findall(r"<h2 id='([\w-]+)'", response.text))
