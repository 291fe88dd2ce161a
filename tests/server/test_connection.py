"""Connections: headers and first lines that are too large, clients that are too slow, idle ones; the server goes on."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time

import pytest

from adaserve_jax.server.settings import ServerSettings

PATIENCE_S = 0.2


@pytest.fixture(scope="module")
def impatient(start_server):
    settings = ServerSettings(receive_timeout=PATIENCE_S, keep_alive_timeout=PATIENCE_S / 2, max_header_bytes=4096)
    with start_server(settings) as server:
        yield server


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10)


def rest_of(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def goes_on(server) -> None:
    assert server.post(prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert server.state.slots.used == 0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /health?" + b"a=1&" * 30_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"A" * 100_000,
        b"GET /health HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + b"a" * 100_000,
    ],
    ids=["header", "headers", "path", "query", "method", "unended"],
)
def test_heads_over_the_limit_are_refused_while_they_come(impatient, head):
    with connect(impatient) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
        answer = rest_of(connection)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    goes_on(impatient)


def test_a_large_head_that_comes_at_once_is_an_error_like_any_other(impatient):
    response = impatient.http.get("/health", headers={"x": "a" * 5000})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
    assert "must be at most 4096 bytes together" in response.json()["error"]["message"]


def test_a_large_head_that_fits_is_taken(impatient):
    assert impatient.http.get("/health", headers={"x": "a" * 3000}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: h\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b'POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    ],
    ids=["nothing", "line", "headers", "body", "chunks"],
)
def test_clients_that_send_too_slowly_are_left(impatient, sent):
    with connect(impatient) as connection:
        connection.sendall(sent)
        begin = time.monotonic()
        assert b"200 OK" not in rest_of(connection)
        assert time.monotonic() - begin >= 0.5 * PATIENCE_S
    goes_on(impatient)


def test_a_byte_now_and_then_does_not_help(impatient):
    """Each byte comes well within the limit, all of them do not."""
    with connect(impatient) as connection:
        connection.settimeout(PATIENCE_S / 6)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        closed = False
        for _ in range(60):
            try:
                connection.sendall(b"a")
                closed = connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
            if closed:
                break
    assert closed


def test_a_request_that_takes_longer_than_the_limit_to_answer_is_answered(impatient):
    """The limits are on what the client sends: 8 steps of 50 ms are twice as long."""
    response = impatient.post(prompt="slow", max_tokens=24)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 24


def test_a_client_that_reads_nothing_of_a_large_answer_is_left(impatient):
    body = json.dumps({"tokens": [44] * 200_000}).encode()
    asked = b"POST /detokenize HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", int(impatient.url.rsplit(":", 1)[1])))
        poll = select.poll()
        poll.register(connection, 0)  # told of the end alone
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(60):  # more than the kernel holds of the answers
                connection.sendall(asked % (len(body), body))
        assert poll.poll(30_000), "the server ends it"
    goes_on(impatient)


def test_connections_are_kept_for_a_while_and_then_closed(impatient):
    ask = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    with connect(impatient) as connection:
        for _ in range(3):
            connection.sendall(ask)
            answer = b""
            while not answer.endswith(b"}"):  # head and body may come apart
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 OK")
        assert rest_of(connection) == b"", "the server closed it"


def test_requests_in_a_row_are_all_answered(impatient):
    ask = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    with connect(impatient) as connection:
        connection.sendall(ask * 3 + last)
        assert rest_of(connection).count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize(
    "lengths",
    [(b"Content-Length: 4", b"Transfer-Encoding: chunked"), (b"transfer-encoding: chunked", b"content-length: 60")],
)
def test_a_request_hidden_in_a_body_of_two_lengths_is_not_served(server, lengths):
    hidden = b"GET /version HTTP/1.1\r\nHost: h\r\n\r\n"
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n" + b"\r\n".join(lengths) + b"\r\n\r\n0\r\n\r\n" + hidden
    with connect(server) as connection:
        connection.sendall(ask)
        answer = rest_of(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head.lower()
    assert answer.count(b"HTTP/1.1 ") == 1 and b"adaserve" not in body
    error = json.loads(body)["error"]
    assert error["code"] == "ambiguous_length"
    assert "one length, got Content-Length beside Transfer-Encoding" in error["message"]
    goes_on(server)


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        (b"http://h/v1/models", b"200 OK", b'"scripted"'),
        (b"HTTPS://h:8000/v1/models/scripted?x=1", b"200 OK", b'"scripted"'),
        (b"http://h/v1/models/a%20b", b"404 Not Found", b"'a b'"),
        (b"http://h", b"200 OK", b"<!doctype html>"),
        (b"http://h?x=http://i/health", b"200 OK", b"<!doctype html>"),
        (b"ftp://h/health", b"404 Not Found", b"not_found"),
    ],
)
def test_a_target_in_absolute_form_is_its_path(server, target, status, said):
    with connect(server) as connection:
        connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 " + status) and said in answer, answer


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server(impatient, caplog):
    for path in (b"/v1/completions", b"/v1/chat/completions", b"/tokenize"):
        with connect(impatient) as connection:
            connection.sendall(
                b"POST "
                + path
                + b" HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
            )
    goes_on(impatient)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
