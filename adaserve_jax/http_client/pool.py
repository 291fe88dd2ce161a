"""Pool of connections opened ahead of requests, so that measured times do not include connecting."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

from adaserve_jax.http_client.connection import HttpConnection
from adaserve_jax.http_client.settings import UrlSettings

OnReady = Callable[[HttpConnection], None]
OnFailed = Callable[[str], None]

MIN_LIFE_S = 1.0
"""A connection that the server closes sooner, while idle, is not replaced until a request needs one."""
KEEPALIVE_S = 10
"""Silence after which the kernel probes the peer; it probes again every third of this."""
PEER_TIMEOUT_S = 30
"""Time without an answer to probes or data after which the connection ends."""


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel end the connection when the peer's machine vanishes (RFC 1122, 4.2.3.6; RFC 5482)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S), ("TCP_KEEPINTVL", KEEPALIVE_S // 3),
        ("TCP_KEEPCNT", PEER_TIMEOUT_S // KEEPALIVE_S), ("TCP_USER_TIMEOUT", PEER_TIMEOUT_S * 1000),
    ):  # fmt: skip
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ConnectionPool:
    """Hands out the most recently used idle connection, and keeps at least `spare_connections` idle ones open.

    Used on the event loop on which it was created.
    """

    def __init__(self, settings: UrlSettings):
        self._settings = settings
        self._spare = settings.spare_connections
        self._loop = asyncio.get_running_loop()
        self._tls = ssl.create_default_context() if settings.tls else None
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling = 0

    async def fill(self) -> None:
        """Open the spare connections and wait for them; failures are ignored."""
        self._refill()
        while self._refilling:
            await asyncio.wait(self._tasks)

    def acquire(self, on_ready: OnReady, on_failed: OnFailed, *, fresh: bool = False) -> bool:
        """Call `on_ready` with a connection: at once if one is idle, else when a new one is open. Return True if new.

        on_failed: called with connection_refused, connect_timeout or connect_failed. fresh: always open a new one.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_open:
                self._refill()
                on_ready(connection)
                return False
        self._refill()
        self._start(self._open_for(on_ready, on_failed))
        return True

    async def reachable(self) -> bool:
        """Return whether the server accepts a connection now."""
        try:
            connection = await self._open()
        except OSError:
            return False
        self._add_idle(connection)
        return True

    def close_busy(self) -> None:
        """Close connections that still carry a request."""
        for connection in self._all - set(self._idle):
            connection.close()

    async def close(self) -> None:
        self._spare = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)  # transports close on the loop's next turn

    def _refill(self) -> None:
        for _ in range(self._spare - len(self._idle) - self._refilling):
            self._refilling += 1
            self._start(self._open_spare())

    async def _open_spare(self) -> None:
        try:
            self._add_idle(await self._open())
        except OSError:
            pass  # a request that needs a connection will say so
        finally:
            self._refilling -= 1

    async def _open_for(self, on_ready: OnReady, on_failed: OnFailed) -> None:
        try:
            connection = await self._open()
        except ConnectionRefusedError:
            on_failed("connection_refused")
        except TimeoutError:
            on_failed("connect_timeout")
        except OSError:
            on_failed("connect_failed")
        else:
            on_ready(connection)

    async def _open(self) -> HttpConnection:
        """Open a connection. Raises OSError (TimeoutError is one)."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: HttpConnection(self._add_idle, self._remove), settings.host, settings.port, ssl=self._tls
                )
            _enable_keepalive(connection.socket)
        except UnicodeError as error:  # a name that cannot be looked up
            raise OSError(str(error)) from error
        self._all.add(connection)
        return connection

    def _add_idle(self, connection: HttpConnection) -> None:
        if self._spare and connection.is_open:
            connection.was_idle = True
            self._idle.append(connection)
        else:
            connection.close()

    def _remove(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            if time.monotonic() - connection.opened_s > MIN_LIFE_S:
                self._refill()

    def _start(self, work: object) -> None:
        task = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
