"""ASGI layers around every route: request ids and the exception boundary, the API key, the cap on bodies."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve_jax.server.errors import ApiError

REQUEST_ID = b"x-request-id"
OPEN_ROUTES = ("/health",)
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_log = logging.getLogger(__name__)


def _header(scope: Scope, name: bytes) -> bytes | None:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


class Boundary:
    """Echoes x-request-id (a fresh one when it is missing or unfit) and turns any unexpected exception into a 500."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, REQUEST_ID) or b""
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s failed", request_id.decode())
            if started:
                raise
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
            await error.response()(scope, receive, send_with_id)


class ApiKey:
    """Asks for `Authorization: Bearer KEY` on every route but the open ones; compares in constant time."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._expected = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            given = _header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401,
                    "expected the header 'Authorization: Bearer KEY' with this server's API key",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above `max_bytes`, by their declared length or, where none is declared, as they come."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            await self._error().response()(scope, receive, send)
            return
        taken = 0

        async def receive_counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the body must be at most {self._max_bytes} bytes; shorten it or start the server with a larger cap",
            code="request_too_large",
        )
