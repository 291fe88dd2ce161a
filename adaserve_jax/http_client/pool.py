"""Connections held ready, so that a request's times are the server's and not those of connecting."""

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
"""A server that closes idle connections sooner gets no other ones until a request needs them."""


SILENCE_S = 10
"""Of a connection after which its other end's machine is asked whether it is there, every third of this."""
UNANSWERED_S = 30
"""After which it is taken to be gone, and the connection ends."""


def _notice_a_lost_peer(connection: socket.socket) -> None:
    """Have the kernel end it when the machine at its other end vanishes (RFC 1122, 4.2.3.6; RFC 5482)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S), ("TCP_KEEPINTVL", SILENCE_S // 3), ("TCP_KEEPCNT", UNANSWERED_S // SILENCE_S),
        ("TCP_USER_TIMEOUT", UNANSWERED_S * 1000),
    ):  # fmt: skip
        if hasattr(socket, name):  # not of every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ConnectionPool:
    """Hands out idle connections, the last used first, and opens others ahead while fewer than `spare` are idle.

    Everything runs on the event loop that it was made on.
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
        """Open spare connections and wait for them; those that cannot be opened are left out."""
        self._refill()
        while self._refilling:
            await asyncio.wait(self._tasks)

    def acquire(self, on_ready: OnReady, on_failed: OnFailed, *, fresh: bool = False) -> bool:
        """Call `on_ready` with a connection, at once where one is idle; True: it has to be opened first, as it always
        is when it must be `fresh`. on_failed: told connection_refused, connect_timeout or connect_failed."""
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
        """Whether the server takes a connection now."""
        try:
            connection = await self._open()
        except OSError:
            return False
        self._keep(connection)
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
            self._keep(await self._open())
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
        """Raises OSError, TimeoutError being one."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: HttpConnection(self._keep, self._drop), settings.host, settings.port, ssl=self._tls
                )
            _notice_a_lost_peer(connection.socket)
        except UnicodeError as error:  # a name that cannot be looked up
            raise OSError(str(error)) from error
        self._all.add(connection)
        return connection

    def _keep(self, connection: HttpConnection) -> None:
        if self._spare and connection.is_open:
            connection.was_idle = True
            self._idle.append(connection)
        else:
            connection.close()

    def _drop(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
            if time.monotonic() - connection.opened_s > MIN_LIFE_S:
                self._refill()

    def _start(self, work: object) -> None:
        task = self._loop.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
