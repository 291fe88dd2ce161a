"""HEAD and OPTIONS on every route, as an ASGI layer: the routes themselves only know what they are for."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
