"""Routes of the dashboard: the page, its script and style, and the data that it asks for once a second.

The page holds no data and loads nothing but its own files; the policy sent with it forbids everything else.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve_jax.server.dashboard.live import DashboardMonitor, DashboardSnapshot
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.middleware import is_at
from adaserve_jax.server.routes_generate import error_responses

PATH = "/dashboard"
FOLDER = Path(__file__).with_name("static")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = "dashboard.html"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_CHALLENGE = (b"www-authenticate", b'Basic realm="adaserve dashboard: the API key is the password", charset="UTF-8"')


def router(monitor: DashboardMonitor) -> APIRouter:
    """Return the routes of the files in `static` and of the snapshots of `monitor`."""
    routes = APIRouter(tags=["dashboard"])
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in KINDS:
            _add_file(routes, path)

    @routes.get(f"{PATH}/", include_in_schema=False)
    async def with_slash() -> RedirectResponse:
        return RedirectResponse(PATH)

    @routes.get(
        f"{PATH}/data", operation_id="dashboard_data", summary="What the dashboard shows, in numbers",
        response_class=Response, responses=error_responses(400, 401, 403) | {200: {"model": DashboardSnapshot}},
    )  # fmt: skip
    async def data(since: int = Query(0, ge=0, description="only the series after this `seq`")) -> Response:
        body = msgspec.json.encode(monitor.snapshot(since))
        return Response(body, media_type="application/json", headers=HEADERS | {"cache-control": "no-store"})

    return routes


def no_dashboard() -> APIRouter:
    """Return the route of a server whose dashboard is off, which says how to turn it on."""
    routes = APIRouter()

    @routes.get(PATH, include_in_schema=False)
    async def off() -> None:
        raise ApiError(404, "the dashboard is off; start the server with --dashboard", code="not_found")

    return routes


def _add_file(routes: APIRouter, path: Path) -> None:
    """Add the route of one file, which is read now."""
    content, kind = path.read_bytes(), KINDS[path.suffix]
    is_page = path.name == PAGE

    @routes.get(
        PATH if is_page else f"{PATH}/{path.name}", operation_id=f"{path.stem}_{path.suffix[1:]}",
        summary="The dashboard, a page for a browser", response_class=Response, include_in_schema=is_page,
        responses=error_responses(401, 403) | {200: {"content": {kind: {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)


class BasicAuthMiddleware:
    """Accept `Authorization: Basic` under `path`, with the API key as the password and any user name.

    A browser cannot send a Bearer header when it opens a page. The credentials become a Bearer header, which
    ApiKeyMiddleware checks; where it refuses, the response asks for Basic.
    """

    def __init__(self, app: ASGIApp, path: str):
        self.app = app
        self.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_at(scope["path"], self.path):
            await self.app(scope, receive, send)
            return

        async def send_challenge(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != _CHALLENGE[0]]
                message = {**message, "headers": [*kept, _CHALLENGE]}
            await send(message)

        headers = [(name, bearer(value) if name == b"authorization" else value) for name, value in scope["headers"]]
        await self.app({**scope, "headers": headers}, receive, send_challenge)


def bearer(value: bytes) -> bytes:
    """Return `Bearer password` for `Basic base64(user:password)`; anything else as it is."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return value
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return value
    _, found, password = decoded.partition(b":")
    return b"Bearer " + password if found else value
