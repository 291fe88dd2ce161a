"""Connections that cannot be opened: each request hears why, and spare ones are left out."""

from __future__ import annotations

import asyncio
import socket

import pytest

from adaserve_jax.http_client.connection import HttpConnection
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.http_client.settings import UrlSettings


def acquired(settings: UrlSettings) -> tuple[str | None, bool]:
    """What a request is told that needs a connection, and whether the server can be reached."""

    async def acquire() -> tuple[str | None, bool]:
        pool = ConnectionPool(settings)
        await pool.fill()
        outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        assert pool.acquire(lambda _: outcome.set_result(None), outcome.set_result)
        found = await outcome, await pool.reachable()
        await pool.close()
        return found

    return asyncio.run(acquire())


def test_a_port_that_nobody_listens_on_refuses():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert acquired(UrlSettings(f"http://127.0.0.1:{port}", spare_connections=2)) == ("connection_refused", False)


def test_a_name_that_no_host_can_have_is_not_looked_up():
    assert acquired(UrlSettings(f"http://{'a' * 64}.invalid", spare_connections=2)) == ("connect_failed", False)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_host_that_takes_connections_and_says_nothing_is_given_up(spare: int):
    """It is asked for TLS, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert acquired(UrlSettings(url, connect_timeout_s=0.05, spare_connections=spare)) == ("connect_timeout", False)


@pytest.mark.parametrize("absent", ["", "TCP_USER_TIMEOUT"])
def test_an_idle_connection_that_was_closed_is_not_handed_out(absent: str, monkeypatch: pytest.MonkeyPatch):
    """Also on a system that lacks an option of sockets."""
    monkeypatch.delattr(socket, absent, raising=False)

    async def until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def acquired_again(pool: ConnectionPool) -> tuple[HttpConnection, HttpConnection]:
        found: asyncio.Queue[HttpConnection] = asyncio.Queue()
        pool.acquire(found.put_nowait, pytest.fail)
        first = await found.get()
        first.close()
        pool.acquire(found.put_nowait, pytest.fail)
        return first, await found.get()

    async def run() -> None:
        server = await asyncio.start_server(until_it_ends, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = ConnectionPool(UrlSettings(url, spare_connections=1))
        await pool.fill()
        assert await pool.reachable()
        first, second = await acquired_again(pool)
        assert second is not first and second.is_open
        pool.close_busy()
        assert not second.is_open
        await pool.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())
