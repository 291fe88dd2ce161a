"""ASGI layers around every route: request ids and the exception boundary, the API key, caps on headers and bodies."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve_jax.server.auth import Account, Keyring, RateLimited
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.metrics import ServerMetrics

REQUEST_ID = b"x-request-id"
OPEN_ROUTES = ("/health",)
OPERATOR_ROUTES = ("/metrics", "/dashboard")
"""Show what all clients do: for operators' keys only, with all that is below them."""
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
"""On every response that has not its own: no guessing of types, no frames around it, no address of it to others."""
POLICY_VIOLATION = 1008
HEADER_EXTRA = len(b": \r\n")
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_log = logging.getLogger(__name__)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next(iter(_headers(scope, name)), None)


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value for key, value in headers if key == name]


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
                headers = [*message.get("headers", ()), (REQUEST_ID, request_id)]
                own = {name for name, _ in headers}
                message["headers"] = [*headers, *(pair for pair in SECURITY_HEADERS if pair[0] not in own)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request %s failed", request_id.decode())
            if started:
                raise
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
            await error.response()(scope, receive, send_with_id)


class ApiKeys:
    """Asks for `Authorization: Bearer KEY` on every route but the open ones, an operator's on some, and counts the
    requests of each key.

    What is no HTTP request is refused too. A request that passes has its account in `state.account` and the key's name
    in `state.key`.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, metrics: ServerMetrics):
        self._app = app
        self._keyring = keyring
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_ROUTES):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            refusal = self._admit(scope)
            await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _admit(self, scope: Scope) -> ApiError | None:
        """Why the request may not go on; None when it may."""
        account = self._account(scope)
        if account is None:
            return ApiError(
                401,
                "expected the header 'Authorization: Bearer KEY' with an API key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not account.is_operator and any(_is_at(scope["path"], route) for route in OPERATOR_ROUTES):
            return ApiError(403, "this route needs an API key of an operator of this server", code="not_allowed")
        scope.setdefault("state", {}).update(account=account, key=account.name)
        if scope["method"] == "POST":
            try:
                account.begin_request()
            except RateLimited as error:
                self._metrics.observe_rate_limited(error.limit)
                return error
        return None

    def _account(self, scope: Scope) -> Account | None:
        """The account of the one Authorization header; its scheme's case does not matter, more than one is none."""
        given = _headers(scope, b"authorization")
        scheme, _, secret = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        account = self._keyring.find(secret.strip(b" "))
        return account if scheme.lower() == b"bearer" else None


def _is_at(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


class HeadLimit:
    """Refuses a first line and headers above `max_bytes` together. uvicorn refuses those that come in pieces, but takes
    what comes in one."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > self._max_bytes:
            error = ApiError(
                431,
                f"the first line and the headers must be at most {self._max_bytes} bytes together; send less",
                code="headers_too_large",
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    """Bytes of a request's first line and headers, as they came but for a few."""
    first = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    return first + sum(len(name) + len(value) + HEADER_EXTRA for name, value in scope["headers"])


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


# HEAD and OPTIONS on every route, as an ASGI layer: the routes themselves only know what they are for.

_ALLOW = b"allow"


class Methods:
    """HEAD is answered as GET is, without the body, which the HTTP server leaves out. OPTIONS is answered with the
    methods of the route in the header Allow, and with 404 where there is none."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = False

        async def send_complete(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                message["headers"] = [_completed(*pair) for pair in message.get("headers", ())]
                refused = method == "OPTIONS" and message["status"] == 405
                if refused:
                    kept = [pair for pair in message["headers"] if pair[0] == _ALLOW]
                    message = {**message, "status": 204, "headers": kept}
            elif refused and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"} if method == "HEAD" else scope, receive, send_complete)


def _completed(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The header Allow with the methods that are answered here; any other as it is."""
    if name != _ALLOW:
        return name, value
    head = [b"HEAD"] if b"GET" in value and b"HEAD" not in value else []
    return name, b", ".join([value, *head, b"OPTIONS"])
