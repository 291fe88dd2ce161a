"""HEAD and OPTIONS on every route, and methods that a route does not have."""

from __future__ import annotations

import pytest

from adaserve_jax.server.settings import ServerSettings

GETS = ["/health", "/ping", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/scripted", "/openapi.json"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_the_body(server, path):
    got, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.headers.get("content-type")) == (got.status_code, got.headers.get("content-type"))
    assert head.content == b"" and head.headers["x-request-id"]
    if path != "/metrics":
        assert head.headers["content-length"] == got.headers["content-length"]


def test_head_tells_what_get_would_fail_with(server, start_server):
    assert server.http.head("/nowhere").status_code == 404
    assert server.http.head("/v1/completions").status_code == 405
    with start_server(ServerSettings(api_key="right")) as keyed:
        assert keyed.http.head("/health").status_code == 200
        assert keyed.http.head("/v1/models").status_code == keyed.http.options("/v1/models").status_code == 401


@pytest.mark.parametrize("path", GETS + POSTS)
def test_options_tells_the_methods(server, path):
    answer = server.http.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    allowed = {method.strip() for method in answer.headers["allow"].split(",")}
    assert allowed == ({"GET", "HEAD", "OPTIONS"} if path in GETS else {"POST", "OPTIONS"})


def test_options_of_nothing(server):
    assert server.http.options("/nowhere").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_other_methods_are_refused_and_told_what_would_do(server, method, path):
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert ("POST" if path in POSTS else "GET") in answer.headers["allow"]
