"""A request as it passes through a router: what came, what is sent on, and what may be sent back of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from adaserve_jax.cluster.exchange import OF_ONE_HOP, request_bytes
from adaserve_jax.cluster.requests import Wanted
from adaserve_jax.cluster.targets import Target
from adaserve_jax.server.errors import RETRY_AFTER_S, ApiError

NOT_SENT_ON = frozenset({b"host", b"content-length", b"expect", b"x-request-id"}) | {n.encode() for n in OF_ONE_HOP}
NOT_SENT_BACK = frozenset({"content-length", "date", "server", "x-request-id"})
"""The router has its own; an id is the same as the target's, which it was told."""
BUSY_CODES = frozenset({"queue_full", "overloaded"})
"""Of a 429 that says something of the target alone: another one may have room."""
UNFIT_CODES = frozenset({"not_ready", "engine_restarting", "engine_dead", "engine_stalled", "shutting_down", "aborted"})
"""Of a 503 after which a target gets nothing until it says that it is well."""


@dataclass(frozen=True)
class Passing:
    """One request, whole. wanted: None when it generates nothing."""

    method: str
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    wanted: Wanted | None

    def message_for(self, target: Target) -> bytes:
        """As it goes to a target: unchanged but for what is between neighbours."""
        own = ((b"host", target.name.encode()), (b"x-request-id", self.request_id.encode()))
        kept = ((name, value) for name, value in self.headers if name not in NOT_SENT_ON)
        return request_bytes(self.method, self.path, (*own, *kept), self.body)


def path_of(scope: Scope) -> bytes:
    """Path and query, as they came."""
    query: bytes = scope["query_string"]
    return scope["raw_path"] + (b"?" + query if query else b"")


async def whole_body(receive: Receive) -> bytes | None:
    """None: the client went away first. Raises ApiError above the limit."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def headers_back(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Those of an answer that go on to the client."""
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items() if k not in NOT_SENT_BACK]


@dataclass(frozen=True)
class Whole:
    """An answer that was read to its end before any of it was sent on."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The error's; "" where there is none."""
        if self.status < 400:
            return ""
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (KeyError, TypeError, ValueError):
            return ""

    @property
    def elsewhere(self) -> bool:
        """Whether another target may answer better."""
        return (self.status == 429 and self.code in BUSY_CODES) or self.is_unfit

    @property
    def is_unfit(self) -> bool:
        return self.status == 503 and self.code in UNFIT_CODES

    def messages(self) -> list[dict[str, Any]]:
        """As ASGI has them."""
        headers = [*headers_back(self.headers), (b"content-length", b"%d" % len(self.body))]
        return [
            {"type": "http.response.start", "status": self.status, "headers": headers},
            {"type": "http.response.body", "body": self.body},
        ]


def unavailable(message: str, code: str, retry_after_s: float = RETRY_AFTER_S) -> ApiError:
    """503 with Retry-After."""
    return ApiError(503, message, code=code, headers={"retry-after": str(max(1, round(retry_after_s)))})


def no_target() -> ApiError:
    return unavailable("no server of the cluster can take requests now; retry as Retry-After says", "no_target", 5.0)


def target_lost() -> ApiError:
    return unavailable(
        "the server that worked on this request ended or was cut off, and what it had is lost; send it again",
        "target_lost",
    )


def cut_event() -> bytes:
    """The end of a stream whose target did not end it."""
    return b"data: " + json.dumps(target_lost().body()).encode() + b"\n\ndata: [DONE]\n\n"
