"""HTTP client of the cluster's own processes: health checks, and orders to the router."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from adaserve_jax.errors import AdaServeError


class NoAnswer(AdaServeError):
    """A process of the cluster did not answer."""


def _opener(certificate: str | None) -> urllib.request.OpenerDirector:
    """Build an opener that uses no proxy and checks the server against one certificate file.

    The certificate may name only the cluster's public host, so the host name is not checked; the server's certificate
    must be the one in the file or signed by it. With None any certificate passes, and the caller sends no secret.
    Raises OSError.
    """
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    if certificate is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_UNVERIFIED = _opener(None)


def request_json(
    url: str, *, body: Any = None, token: str = "", certificate: str | None = None, timeout_s: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """Send one request and return its status and JSON object ({} if the answer is not one).

    body: sent as JSON by POST; None means GET. token: sent as a bearer token; over https only together with
    `certificate`, a file with the server's certificate, which is read for each request, as it may be renewed. Raises
    NoAnswer.
    """
    if token and certificate is None and url.startswith("https:"):
        raise NoAnswer(f"{url} is not asked: whose certificate it has is not known, and a token would be told")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {**headers, "content-type": "application/json"})
    try:
        opener = _UNVERIFIED if certificate is None else _opener(certificate)
        try:
            answer: Any = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            return answer.status, json_object(answer.read()) or {}
    except (OSError, ValueError, HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def json_object(body: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None if the body is not one."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class RouterClient:
    """Client of a running router's /cluster routes. Every method raises NoAnswer, also when the router refuses."""

    def __init__(self, url: str, token: str, certificate: str | None):
        self.url = url
        self._token = token
        self._certificate = certificate

    async def status(self) -> dict[str, Any]:
        return await self._request("/cluster", None)

    async def drain(self, target: str) -> None:
        await self._request("/cluster/drain", {"target": target})

    async def resume(self, target: str) -> None:
        await self._request("/cluster/resume", {"target": target})

    async def set_targets(self, targets: list[str]) -> None:
        await self._request("/cluster/targets", {"targets": targets})

    async def target_status(self, target: str) -> dict[str, Any]:
        """Return the router's view of one target; {} if the router does not know it."""
        status = await self.status()
        return next((each for each in status["targets"] if each["url"] == target), {})

    async def _request(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        status, answer = await asyncio.to_thread(
            request_json, self.url + path, body=body, token=self._token, certificate=self._certificate
        )
        if status != 200:
            raise NoAnswer(f"the router refused {path} with status {status}: {answer.get('error', answer)}")
        return answer
