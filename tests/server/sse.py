"""Reading a stream of server-sent events, with its framing checked."""

from __future__ import annotations

import json
from typing import Any


def sse(server: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> list[dict]:
    """The decoded events of a stream, without the closing `[DONE]`."""
    with server.http.stream("POST", path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    events = raw.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
