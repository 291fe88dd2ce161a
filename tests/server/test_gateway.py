"""Targets in a gateway's headers: read where it is trusted, after those of the body; refused when they are none."""

from __future__ import annotations

import pytest

from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.streaming import WARNING_HEADER

NEW_TPOT, OLD_TPOT, NEW_TTFT, OLD_TTFT = (
    "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms",
)  # fmt: skip


@pytest.fixture(scope="module")
def behind(start_server):
    with start_server(ServerSettings(trust_gateway=True, min_slo_tpot_ms=5)) as server:
        yield server


def ask(server, headers, path: str = "/v1/completions", **body):
    body = {"prompt": "abc"} | body if path.endswith("/completions") and "messages" not in body else body
    return server.http.post(path, json=body, headers=headers)


def targets(response) -> tuple[float | None, float | None]:
    slo = response.json()["metrics"]["slo"]
    return slo["tpot_target_ms"], slo["ttft_target_ms"]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({NEW_TPOT: "30"}, {}, (30.0, None)),
        ({OLD_TPOT: "30.5", OLD_TTFT: "200"}, {}, (30.5, 200.0)),
        ({NEW_TPOT: "30", OLD_TPOT: "40", NEW_TTFT: "100", OLD_TTFT: "200"}, {}, (30.0, 100.0)),
        ({NEW_TPOT: "30", NEW_TTFT: "100"}, {"slo_tpot_ms": 20}, (20.0, 100.0)),
        ({NEW_TPOT: "30"}, {"slo_relative": 3}, (30.0, None)),
        ({NEW_TPOT: "40"}, {"slo_relative": 3}, (30.0, None)),
        ({NEW_TTFT: "100"}, {"slo_ttft_ms": 50, "slo_class": "chat"}, (100.0, 50.0)),
        ({NEW_TPOT: "30"}, {"slo_class": "chat"}, (30.0, None)),
        ({NEW_TPOT: "1"}, {}, (5.0, None)),
        ({}, {}, (None, None)),
    ],
)
def test_headers_stand_in_for_what_the_body_leaves_out(behind, headers, body, expected):
    response = ask(behind, headers, **body)
    assert targets(response) == expected
    moved = "slo_tpot_ms 1 is served as 5" if headers == {NEW_TPOT: "1"} else None
    assert response.headers.get(WARNING_HEADER) == moved


def test_chat_and_streams_have_them_too(behind):
    chat = ask(behind, {NEW_TPOT: "30"}, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert targets(chat) == (30.0, None)
    assert targets(ask(behind, {NEW_TPOT: "30"}, "/v1/responses", input="a")) == (30.0, None)
    assert '"tpot_target_ms":30.0' in ask(behind, {NEW_TPOT: "30"}, stream=True).text


@pytest.mark.parametrize(
    "value", ["0", "-3", "nan", "inf", "-inf", "fast", "", "3 ms", "1e999", "0x10", "30, 40", "٣٠".encode()]
)
@pytest.mark.parametrize("name", [NEW_TPOT, OLD_TTFT])
def test_what_is_no_target_is_refused_by_name(behind, name, value):
    for body in ({}, {"slo_tpot_ms": 20, "slo_ttft_ms": 20}):
        error = ask(behind, {name: value}, **body)
        assert error.status_code == 400
        assert (error.json()["error"]["code"], error.json()["error"]["param"]) == ("invalid_slo", name)
        assert f"the header {name} must be a finite number above 0, got " in error.json()["error"]["message"]


def test_a_header_given_twice_is_refused(behind):
    error = ask(behind, [(NEW_TPOT, "30"), (NEW_TPOT, "40")])
    assert (error.status_code, error.json()["error"]["code"]) == (400, "invalid_slo")
    assert "must be given once, got 2 of them" in error.json()["error"]["message"]


def test_without_trust_they_are_ignored_and_said_to_be(server):
    response = ask(server, {NEW_TPOT: "30", OLD_TTFT: "nonsense"}, colour=1)
    assert targets(response) == (None, None)
    assert response.headers[WARNING_HEADER] == (
        f"ignored fields: colour; ignored headers of an untrusted gateway: {NEW_TPOT}, {OLD_TTFT}"
    )
    stream = ask(server, {OLD_TPOT: "30"}, stream=True)
    assert stream.headers[WARNING_HEADER] == f"ignored headers of an untrusted gateway: {OLD_TPOT}"
