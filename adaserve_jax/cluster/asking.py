"""One small HTTP request to a process of the cluster, in a thread: health, and orders to the router."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from adaserve_jax.errors import AdaServeError


def _opener(certificate: str | None) -> urllib.request.OpenerDirector:
    """Never through a proxy: members are called by their own addresses. The certificate may name the cluster's public
    host only, and is known by itself: it must be the one in that file, or signed by it. None: whoever answers will do,
    who is told nothing. Raises OSError."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    if certificate is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_ANYBODY = _opener(None)


class NoAnswer(AdaServeError):
    """A process of the cluster did not answer."""


def ask_now(
    url: str, *, body: Any = None, token: str = "", certificate: str | None = None, timeout_s: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none; POST with a body, else GET. certificate: file of the one
    that https is to be spoken with, without which no token is sent over it. Raises NoAnswer."""
    if token and certificate is None and url.startswith("https:"):
        raise NoAnswer(f"{url} is not asked: whose certificate it has is not known, and a token would be told")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {**headers, "content-type": "application/json"})
    try:
        opener = _ANYBODY if certificate is None else _opener(certificate)  # anew: the file may be replaced
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, _object(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read())
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


async def ask(
    url: str, *, body: Any = None, token: str = "", certificate: str | None = None, timeout_s: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """`ask_now` beside the event loop."""
    return await asyncio.to_thread(ask_now, url, body=body, token=token, certificate=certificate, timeout_s=timeout_s)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
