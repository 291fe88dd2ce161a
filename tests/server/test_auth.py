"""Ways around the API key: every route by every method, odd paths, odd headers, what is no HTTP request."""

from __future__ import annotations

import asyncio
import base64
import socket

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.server.app import create_app
from adaserve_jax.server.middleware import OPEN_ROUTES, OPERATOR_ROUTES
from adaserve_jax.server.serve import listen, warn_if_open
from adaserve_jax.server.settings import KeySettings, ServerSettings
from tests.server.routes import paths_of

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")
KEY = "sesame"


@pytest.fixture(scope="module")
def guarded(start_server):
    with start_server(ServerSettings(api_key=KEY)) as server:
        yield server


def raw(server, request: bytes) -> bytes:
    """The answer to bytes as they are; no client tidies them up."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer[9:12])


def test_no_route_by_any_method_goes_without_the_key(guarded):
    paths = paths_of(create_app(guarded.engine, None, ServerSettings()).routes)
    assert {"/v1/completions", "/metrics", "/docs", "/openapi.json"} < paths
    for path in (*paths - set(OPEN_ROUTES), "/nowhere", "/docs/oauth2-redirect", "/redoc", "/v1/models/x"):
        for method in METHODS:
            response = guarded.http.request(method, path)
            assert response.status_code == 401, (method, path)
            assert method == "HEAD" or response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


def test_the_open_routes_are_open_and_tell_nothing_more(guarded):
    assert OPEN_ROUTES == ("/", "/health", "/ping")
    assert guarded.http.get("/ping").content == b""
    page = guarded.http.get("/")
    assert page.status_code == 200 and "scripted" not in page.text and KEY not in page.text
    told = {
        "status": "ok",
        "detail": "requests are served",
        "restarts": 0,
        "last_crash": None,
        "last_crash_unix_s": None,
    }
    assert guarded.http.get("/health").json() == told
    for path in OPEN_ROUTES:
        for method in METHODS[2:]:
            assert guarded.http.request(method, path).status_code == (204 if method == "OPTIONS" else 405)


TARGETS = [
    b"//health", b"/health/", b"/HEALTH", b"/Health", b"/health/../v1/models", b"/./health", b"/health;x",
    b"/health%00",
    b"/health%2f", b"/%2e/health", b"/health%20", b"/x/../health", b"http://h/v1/models", b"http://h/metrics", b"*",
    b"/v1/models?/health", b"/v1/models#/health", b"//v1/models", b"/v1/models%3f/health", b"/health\\", b"/v1//models",
    b"/%76%31/models", b"/openapi.json/", b"/%6fpenapi.json", b"/docs/", b"health", b"?/health", b"/health%252e",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.decode())
def test_no_spelling_of_a_path_gets_around_it(guarded, target):
    answer = raw(guarded, b"GET " + target + b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert status_of(answer) in (400, 401), answer
    assert b"requests are served" not in answer and b"adaserve_" not in answer and b"scripted" not in answer


def test_another_spelling_of_the_open_route_is_that_route(guarded):
    answer = raw(guarded, b"GET /he%61lth?x=1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert status_of(answer) == 200 and b"requests are served" in answer


def headers_status(server, *lines: bytes) -> int:
    head = b"\r\n".join((b"GET /v1/models HTTP/1.1", b"Host: h", b"Connection: close", *lines))
    return status_of(raw(server, head + b"\r\n\r\n"))


@pytest.mark.parametrize(
    "lines",
    [
        [b"Authorization: Bearer sesame"],
        [b"authorization: bearer sesame"],
        [b"AUTHORIZATION: BEARER   sesame  "],
    ],
)
def test_names_and_schemes_have_no_case(guarded, lines):
    assert headers_status(guarded, *lines) == 200


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"Authorization:"],
        [b"Authorization: sesame"],
        [b"Authorization: Bearer"],
        [b"Authorization: Bearer "],
        [b"Authorization: Bearersesame"],
        [b"Authorization: Bearer sesame sesame"],
        [b"Authorization: Bearer sesamE"],
        [b"Authorization: Bearer sesam"],
        [b"Authorization: Bearer sesame, Bearer sesame"],
        [b"Authorization: Bearer \"sesame\""],
        [b"Authorization: Bearer\tsesame"],
        [b"Authorization: Basic c2VzYW1l"],
        [b"Authorization: Basic sesame"],
        [b"Authorization: Bearer sesame", b"Authorization: Bearer sesame"],
        [b"Authorization: Bearer wrong", b"Authorization: Bearer sesame"],
        [b"Authorization: Bearer sesame", b"authorization: Basic x"],
        [b"Proxy-Authorization: Bearer sesame"],
        [b"X-Api-Key: sesame"],
        [b"Cookie: Authorization=Bearer sesame"],
        [b"X-Original-URL: /health"],
        [b"X-Forwarded-Prefix: /health", b"X-Rewrite-URL: /health"],
        [b"X-HTTP-Method-Override: OPTIONS"],
        [b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: eA=="],
        [b"Origin: http://evil", b"Access-Control-Request-Method: GET"],
    ],
)  # fmt: skip
def test_nothing_but_the_one_header_is_the_key(guarded, lines):
    assert headers_status(guarded, *lines) == 401


def test_a_preflight_is_a_request_like_any_other_without_cors(guarded):
    asked = {"origin": "http://evil", "access-control-request-method": "POST"}
    response = guarded.http.options("/v1/completions", headers=asked)
    assert response.status_code == 401 and "access-control-allow-origin" not in response.headers


def test_a_request_hidden_in_anothers_body_is_judged_by_itself(guarded):
    inner = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    outer = b"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n" + inner
    answers = raw(guarded, outer)
    assert answers.count(b"HTTP/1.1 200") == 1 and answers.count(b"HTTP/1.1 401") == 1
    both = (
        b"POST /health HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner
    )
    assert b"scripted" not in raw(guarded, both)


def called(app, scope: dict) -> list[dict]:
    sent = []

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app({"headers": [(b"authorization", b"Bearer sesame")], **scope}, receive, send))
    return sent


def test_websockets_are_closed(guarded):
    app = create_app(guarded.engine, None, ServerSettings(api_key=KEY))
    for path in ("/v1/completions", "/health"):
        assert called(app, {"type": "websocket", "path": path}) == [{"type": "websocket.close", "code": 1008}]


def test_lifespan_events_pass(guarded):
    app = create_app(guarded.engine, None, ServerSettings(api_key=KEY))
    events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent = []

    async def receive() -> dict:
        return next(events)

    async def send(message: dict) -> None:
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan", "headers": []}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("host", "api_key", "warned"),
    [("127.0.0.1", None, False), ("::1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", KEY, False)],
)
def test_a_server_that_is_open_to_others_says_so(guarded, caplog, host, api_key, warned):
    settings = ServerSettings(host=host, port=0, api_key=api_key)
    try:
        listener = listen(settings)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        warn_if_open(create_app(guarded.engine, None, settings).state.server, listener)
    assert [message.endswith("may use this server: it asks for no API key") for message in caplog.messages] == [
        True
    ] * warned


OPERATORS = ["/metrics", "/dashboard", "/dashboard/data", "/dashboard/charts.js"]


@pytest.fixture(scope="module")
def tenants(start_server):
    """An operator by --api-key, one by the file, and a tenant."""
    keys = (KeySettings("tenant", "tenant"), KeySettings("watcher", "watcher", operator=True))
    with start_server(ServerSettings(api_key=KEY, keys=keys, dashboard=True)) as server:
        yield server


def get(server, path: str, secret: str, method: str = "GET"):
    url = f"{server.url}{path}"  # a client takes what is behind // alone for a host
    return server.http.request(method, url, headers={"authorization": f"Bearer {secret}"})


@pytest.mark.parametrize("path", OPERATORS)
def test_what_all_clients_do_is_for_operators(tenants, path):
    for secret in (KEY, "watcher"):
        assert get(tenants, path, secret).status_code == 200
    refused = get(tenants, path, "tenant")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    for method in ("HEAD", "OPTIONS", "POST"):
        assert get(tenants, path, "tenant", method).status_code == 403
    basic = base64.b64encode(b"any:tenant")
    expected = 401 if path == "/metrics" else 403
    assert tenants.http.get(path, headers={"authorization": b"Basic " + basic}).status_code == expected


@pytest.mark.parametrize("path", OPERATOR_ROUTES)
def test_a_line_feed_behind_its_path_opens_no_operators_route(tenants, path):
    for method in ("GET", "POST"):
        for ending in ("%0A", "%0a", "/%0A", "%0D%0A"):
            refused = get(tenants, path + ending, "tenant", method)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
            assert "the path must have printable characters only" in refused.json()["error"]["message"]


def test_no_route_is_spelled_with_a_line_feed(guarded):
    for path in paths_of(create_app(guarded.engine, None, ServerSettings()).routes):
        assert get(guarded, f"{path}%0A", KEY).status_code == guarded.http.get(f"{path}%0A").status_code == 400


def test_a_tenant_sees_everything_else(tenants):
    for path in ("/v1/models", "/ready", "/version", "/openapi.json", "/docs"):
        assert get(tenants, path, "tenant").status_code == 200
    for path in ("/metrics/", "/dashboard/nothing"):
        assert get(tenants, path, "tenant").status_code == 403
    for path in ("//metrics", "/Metrics", "/metrics%2f", "/./dashboard", "/dashboards"):
        assert get(tenants, path, "tenant").status_code in (403, 404)


def test_the_openapi_document_says_which_routes_ask_for_a_key(guarded, tenants):
    """Read it where there is one key, and where a file has more."""
    for server, secret in ((guarded, KEY), (tenants, "tenant")):
        schema = get(server, "/openapi.json", secret).json()
        assert schema["security"] == [{"key": []}] and schema["paths"]["/health"]["get"]["security"] == []


def test_the_dashboard_names_no_key(tenants):
    body = {"prompt": "x", "max_tokens": 2}
    tenants.http.post("/v1/completions", json=body, headers={"authorization": "Bearer tenant"})
    assert "tenant" not in get(tenants, "/dashboard/data", KEY).text
