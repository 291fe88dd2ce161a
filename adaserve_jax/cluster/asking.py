"""One small HTTP request to a process of the cluster, in a thread: health, and orders to the router."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from adaserve_jax.errors import AdaServeError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never through a proxy: members are called by their own addresses."""


class NoAnswer(AdaServeError):
    """A process of the cluster did not answer."""


def ask_now(url: str, *, body: Any = None, token: str = "", timeout_s: float = 5.0) -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none; POST with a body, else GET. Raises NoAnswer."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {**headers, "content-type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return answer.status, _object(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read())
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


async def ask(url: str, *, body: Any = None, token: str = "", timeout_s: float = 5.0) -> tuple[int, dict[str, Any]]:
    """`ask_now` beside the event loop."""
    return await asyncio.to_thread(ask_now, url, body=body, token=token, timeout_s=timeout_s)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
