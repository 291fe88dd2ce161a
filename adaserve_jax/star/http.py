"""`/health` and `/metrics` of a draft service, over plain HTTP and from a port of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from typing import Any

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.settings import host_port

TIMEOUT_S = 5.0
"""Of a connection that says nothing."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """Answers from the moment it is made. health: whether the service is worth keeping, and what to say of it; metrics:
    the exposition, once there is one. Raises ConfigError: the address is not to be had."""

    def __init__(self, address: str, health: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        self.health = health
        self.metrics: Callable[[], bytes] | None = None
        host, port = host_port("http", address)
        kind = type("Server", (ThreadingHTTPServer,), {"daemon_threads": True})
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


class _Handler(BaseHTTPRequestHandler):
    status: StatusServer
    timeout = TIMEOUT_S
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
