"""Orders to a running cluster, through a socket in its folder: one line asks, lines answer, the last one says how it
went."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from adaserve_jax.errors import AdaServeError, ConfigError

Restarting = Callable[[str], AsyncIterator[str]]
REPLACED = ("targets", "drafts", "all")
ORDERS = (*(f"restart {what}" for what in REPLACED), "down")
_log = logging.getLogger(__name__)


class OrderServer:
    """Takes orders while it is entered. down: sets `stop`; restart: `restarting(one of REPLACED)` yields what is
    done."""

    def __init__(self, path: Path, restarting: Restarting, stop: asyncio.Event):
        self._path = path
        self._restarting = restarting
        self._stop = stop
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> OrderServer:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer((await reader.readline()).decode(errors="replace").strip(), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # whoever asked is gone, or the cluster ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, order: str, writer: asyncio.StreamWriter) -> None:
        """An order goes on when whoever asked goes away: half a replacement is worse."""
        try:
            if order == "down":
                self._stop.set()
            elif order in ORDERS:
                async for line in self._restarting(order.partition(" ")[2]):
                    writer.write(json.dumps({"line": line}).encode() + b"\n")
            else:
                raise ConfigError(f"an order must be one of {', '.join(ORDERS)}, got {order[:40]!r}")
            writer.write(b'{"done": true}\n')
        except Exception as error:
            if not isinstance(error, AdaServeError):
                _log.exception("the order %r failed", order)
            writer.write(json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n")


def give_order(path: Path, order: str) -> Iterator[str]:
    """What the cluster says while it carries out the order. Raises ConfigError when none runs there, AdaServeError when
    it cannot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise ConfigError(f"no cluster takes orders at {path}: {error.strerror}") from error
        connection.sendall(order.encode() + b"\n")
        for line in connection.makefile("rb"):
            answer = json.loads(line)
            if "error" in answer:
                raise AdaServeError(answer["error"])
            if "done" in answer:
                return
            yield answer["line"]
    raise AdaServeError("the cluster ended before the order was carried out")
