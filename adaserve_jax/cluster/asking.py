"""One small HTTP request to a process of the cluster, in a thread: health, and orders to the router."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from adaserve_jax.errors import AdaServeError


def _opener() -> urllib.request.OpenerDirector:
    """Never through a proxy: members are called by their own addresses. Without asking whose certificate it is, which
    names the cluster's public host if any: it is that of the router that was started here."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_OPENER = _opener()


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
