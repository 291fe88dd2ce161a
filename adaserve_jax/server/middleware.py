"""ASGI middleware around every route: request ids and unexpected errors, API keys, limits of headers and bodies."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve_jax.server.auth import Account, Keyring, RateLimited
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.metrics import ServerMetrics

REQUEST_ID = "x-request-id"
OPEN_ROUTES = ("/", "/health", "/ping")
"""Routes that need no API key: they say nothing of what is served."""
OPERATOR_ROUTES = ("/metrics", "/dashboard", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes that show the requests of all clients, or change what is served; they and the paths below them need an
operator's key."""
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer"}
"""Headers of every response that does not set its own."""
WEBSOCKET_POLICY_VIOLATION = 1008
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_log = logging.getLogger(__name__)


def is_at(path: str, route: str) -> bool:
    """Return whether `path` is `route` or below it."""
    return path == route or path.startswith(f"{route}/")


class RequestBoundaryMiddleware:
    """Give each response a request id, refuse unprintable paths and turn an unexpected exception into a 500.

    The id is the request's x-request-id, or a new one where that is missing or not a valid id. It is also in
    `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID, "")
        if not _VALID_REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.append(REQUEST_ID, request_id)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if not scope["path"].isprintable():  # Starlette's routes also match before a last line feed, `is_at` does not
            error = ApiError(400, "the path must have printable characters only", code="invalid_request")
            await error.response()(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:  # while its body was read: nobody is left to answer
            return
        except Exception:
            _log.exception("request %s failed", request_id)
            if started:
                raise
            error = ApiError(500, "the server failed on this request and goes on", code="internal_error")
            await error.response()(scope, receive, send_with_headers)


class ApiKeyMiddleware:
    """Ask for `Authorization: Bearer KEY` and count the POST requests of each key.

    OPEN_ROUTES need no key, OPERATOR_ROUTES need an operator's. Websockets are refused. A request that passes has its
    account in `request.state.account`.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, metrics: ServerMetrics):
        self.app = app
        self.keyring = keyring
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_ROUTES):
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": WEBSOCKET_POLICY_VIOLATION})
            return
        try:
            self._authorize(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _authorize(self, scope: Scope) -> None:
        """Note the request's account in its state. Raises ApiError: no key, not an operator's, or over its rate."""
        account = self._account(scope)
        if account is None:
            raise ApiError(
                401,
                "expected the header 'Authorization: Bearer KEY' with an API key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not account.is_operator and any(is_at(scope["path"], route) for route in OPERATOR_ROUTES):
            raise ApiError(403, "this route needs an API key of an operator of this server", code="not_allowed")
        scope.setdefault("state", {}).update(account=account)
        if scope["method"] == "POST":
            try:
                account.begin_request()
            except RateLimited as error:
                self.metrics.observe_rate_limited(error.limit)
                raise

    def _account(self, scope: Scope) -> Account | None:
        """Return the account of the Authorization header; None where the key is unknown or the header is repeated."""
        values = Headers(scope=scope).getlist("authorization")
        scheme, _, secret = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        account = self.keyring.find(secret.strip(" ").encode("latin-1"))
        return account if scheme.lower() == "bearer" else None


class HeaderLimitMiddleware:
    """Refuse a first line and headers of more than `max_bytes` together.

    uvicorn refuses such a head only when it arrives in pieces.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._size(scope) > self.max_bytes:
            error = ApiError(
                431,
                f"the first line and the headers must be at most {self.max_bytes} bytes together; send less",
                code="headers_too_large",
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    @staticmethod
    def _size(scope: Scope) -> int:
        """Return the bytes of the first line and the headers as they were sent, but for a few of the first line."""
        first = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
        return first + sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])


class BodyLimitMiddleware:
    """Refuse bodies of more than `max_bytes`, by their declared length or, where none is declared, as they arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = ApiError(
            413,
            f"the body must be at most {self.max_bytes} bytes; shorten it or start the server with a larger cap",
            code="request_too_large",
        )
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.max_bytes):
            await too_large.response()(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise too_large
            return message

        await self.app(scope, receive_counted, send)


class MethodsMiddleware:
    """Answer HEAD and OPTIONS on every route.

    HEAD is answered as GET is, and the HTTP server leaves the body out. OPTIONS is answered with the methods of the
    route in the header Allow, and with 404 where there is no such route.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        refused = False

        async def send_allow(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if "allow" in headers:
                    headers["allow"] = self._allow(headers["allow"])
                refused = method == "OPTIONS" and message["status"] == 405
                if refused:
                    message["status"] = 204
                    message["headers"] = [pair for pair in headers.raw if pair[0] == b"allow"]
            elif refused and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"} if method == "HEAD" else scope, receive, send_allow)

    @staticmethod
    def _allow(value: str) -> str:
        """Return the methods of a route with those that are answered here."""
        head = ["HEAD"] if "GET" in value and "HEAD" not in value else []
        return ", ".join([value, *head, "OPTIONS"])
