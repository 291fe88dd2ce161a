"""The HTTP server's end: on SIGTERM or SIGINT what is in flight finishes within a time limit, nothing new is taken."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import uvicorn

from adaserve_jax.server.settings import ServerSettings

POLL_S = 0.05
ABORT_GRACE_S = 2.0


class Drainable(Protocol):
    """What is served: `ServerState`, or a router's."""

    @property
    def phase(self) -> str:
        """Is "draining" once `drain` was called."""
        ...

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def is_busy(self) -> bool:
        """Whether anything that was taken has not ended."""
        ...

    def drain(self) -> None:
        """Take nothing new."""
        ...

    def abort_all(self) -> None:
        """End what is left."""
        ...


Served = TypeVar("Served", bound=Drainable)


class DrainingServer(uvicorn.Server, Generic[Served]):
    """On the first signal takes nothing new and waits for what is in flight; on the second stops at once."""

    def __init__(self, config: uvicorn.Config, state: Served):
        super().__init__(config)
        self.state = state
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal; the base class would end connections at once and re-raise the signal afterwards."""
        if self._loop is None or self.state.phase == "draining":
            self.should_exit = self.force_exit = True
            return
        self.state.drain()
        self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Take nothing new from now on, and exit when nothing is left to do. Call it on the event loop."""
        self.state.drain()
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Wait until all is answered and sent or the time is up, end what is left, then let the server exit."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.state.settings.shutdown_timeout
        while (self.state.is_busy or self.is_answering()) and loop.time() < end:
            await asyncio.sleep(POLL_S)
        while self.state.is_busy and loop.time() < end + ABORT_GRACE_S:
            self.state.abort_all()  # again and again: a long prompt may be tokenised only now
            await asyncio.sleep(POLL_S)
        self.should_exit = True

    def is_answering(self) -> bool:
        """Whether a response is being made, or a client has not taken all of one."""
        connections: set[Any] = self.server_state.connections
        return bool(self.server_state.tasks) or any(
            each.transport is not None and each.transport.get_write_buffer_size() for each in connections
        )
