"""A router in a thread of this process, over targets that are servers of other test folders."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from adaserve_jax.cluster.router import RouterApp
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.server.connection import http_config
from adaserve_jax.server.serve import listen
from tests.bench.fake_server import Act, Asked, answer, stream, token
from tests.waiting import wait_until

TOKEN = "a-token-of-the-cluster"
HEALTHY = answer("200 OK", b'{"status":"ok","detail":""}')
BODY = {"prompt": "def add(a, b):", "max_tokens": 8}


@dataclass
class Routed:
    """A running router: its URL, a client, itself, and its loop."""

    url: str
    router: RouterApp
    http: httpx.Client
    loop: asyncio.AbstractEventLoop

    def post(self, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return self.http.post(path, json=BODY | more)

    def order(self, path: str, token: str = TOKEN, **fields: Any) -> httpx.Response:
        return self.http.post(f"/cluster/{path}", json=fields, headers={"authorization": f"Bearer {token}"})

    def states(self) -> dict[str, str]:
        """By URL: up, down or drained."""
        return {each["url"]: each["state"] for each in self.router.status()["targets"]}

    def up(self, count: int) -> None:
        """Wait until so many targets get requests."""
        wait_until(lambda: list(self.states().values()).count("up") == count)


@contextlib.contextmanager
def routed(*urls: str, wait: int | None = None, **settings: Any) -> Iterator[Routed]:
    """wait: for so many targets; left out: all."""
    chosen = RouterSettings(targets=urls, port=0, **({"poll_every": 0.05} | settings))
    listener = listen(chosen.server)
    found: dict[str, Any] = {}

    async def serve() -> None:
        router = RouterApp(chosen)
        await router.start()
        quiet = http_config(router.app(), router.settings, lifespan="off")
        found.update(loop=asyncio.get_running_loop(), router=router, server=uvicorn.Server(quiet))
        await found["server"].serve(sockets=[listener])
        await router.close()
        for _ in range(50):  # turns of the loop, for transports that end
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    wait_until(lambda: "server" in found and found["server"].started)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=60) as http:
        running = Routed(url, found["router"], http, found["loop"])
        running.up(len(urls) if wait is None else wait)
        yield running
    found["server"].should_exit = True
    thread.join()
    listener.close()


def target(generate: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    """A script that is healthy, and does to requests that generate what `generate` says."""

    def script(asked: Asked) -> Any:
        if asked.route == "/health":
            return HEALTHY
        return generate(asked) if asked.route.startswith("/v1/c") else answer("404 Not Found", b"{}")

    return script


def error(status: str, code: str) -> list[Act]:
    return answer(status, b'{"error":{"message":"m","type":"t","param":null,"code":"%s"}}' % code.encode())


def whole(text: str = "x") -> list[Act]:
    return answer("200 OK", b'{"choices":[{"index":0,"text":"%s"}]}' % text.encode())


def events(*texts: str) -> list[Act]:
    return stream(*(token(text) for text in texts), b"data: [DONE]\n\n")
