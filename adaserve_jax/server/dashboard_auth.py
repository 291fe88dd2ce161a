"""Lets a browser, which cannot send a Bearer header when it opens a page, show the API key at the dashboard.

There, and only there, `Authorization: Basic` counts too: its password is the key, its user name does not matter. The
layer that asks for the key stays the one that compares it.
"""

from __future__ import annotations

import base64
import binascii

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CHALLENGE = (b"www-authenticate", b'Basic realm="adaserve dashboard: the API key is the password", charset="UTF-8"')


class BasicAtDashboard:
    """Turns Basic credentials into a Bearer header under `path`, and asks for Basic where those are refused."""

    def __init__(self, app: ASGIApp, path: str):
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._covers(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_challenge(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != _CHALLENGE[0]]
                message = {**message, "headers": [*kept, _CHALLENGE]}
            await send(message)

        headers = [(name, bearer(value) if name == b"authorization" else value) for name, value in scope["headers"]]
        await self._app({**scope, "headers": headers}, receive, send_challenge)

    def _covers(self, path: str) -> bool:
        return path == self._path or path.startswith(f"{self._path}/")


def bearer(value: bytes) -> bytes:
    """`Basic base64(user:password)` as `Bearer password`; anything else as it is."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return value
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return value
    _, found, password = decoded.partition(b":")
    return b"Bearer " + password if found else value
