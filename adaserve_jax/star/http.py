"""`/health` and `/metrics` of a draft service, over plain HTTP and from a port of their own."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, socket
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.settings import host_port

TIMEOUT_S = 5.0
"""Of a connection, from its beginning to its end: one request."""
MOST_CONNECTIONS = 16
"""At once; more are closed unanswered."""
_log = logging.getLogger(__name__)
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """Answers from the moment it is made. health: whether the service is worth keeping, and what to say of it; metrics:
    the exposition, once there is one. Raises ConfigError: the address is not to be had."""

    def __init__(self, address: str, health: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        self.health = health
        self.metrics: Callable[[], bytes] | None = None
        host, port = host_port("http", address)
        kind = type("Server", (_Server,), {})
        if ":" in host:
            kind.address_family = AF_INET6
        try:
            self._server = kind((host, port), type("Handler", (_Handler,), {"status": self}))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}; choose another address with --http, or '' for none"
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="draft-http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few, for a short time."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(TIMEOUT_S, _cut, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # an asker that has left is nobody's fault
            _log.error("/health or /metrics failed: %s", type(error).__name__, exc_info=error)


def _cut(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    status: StatusServer
    server_version = "adaserve"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            well, said = self.status.health()
            self._answer(
                HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(said), "application/json"
            )
        elif path == "/metrics" and self.status.metrics is not None:
            self._answer(HTTPStatus.OK, self.status.metrics(), TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "/health and /metrics\n", TEXT)

    do_HEAD = do_GET

    def _answer(self, code: HTTPStatus, body: str | bytes, kind: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per scrape helps nobody."""
