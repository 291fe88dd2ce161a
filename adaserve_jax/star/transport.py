"""How frames travel between a target and a draft service, apart from gRPC: so that tests put faults between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from adaserve_jax.star.messages import FromService, FromTarget, WireError

Received = Callable[[Sequence[FromService | WireError]], None]
"""received(frame): called in a thread of the transport, one frame after another; must return soon and not raise. A
WireError stands where a message made no sense."""
Lost = Callable[[str], None]
"""lost(why): the stream has ended; called once, nothing is received after it. why: for the log, without secrets."""


class Stream(Protocol):
    """One open stream of a target."""

    def send(self, frame: Sequence[FromTarget]) -> None:
        """Hand a frame over; returns at once and never raises: a stream that is broken says so by `lost`."""
        ...

    def close(self) -> None:
        """End it; `lost` is not called any more. Safe to call twice and from any thread."""
        ...


class Transport(Protocol):
    """Opens streams to one service."""

    @property
    def address(self) -> str:
        """host:port, for logs and metrics."""
        ...

    def open(self, received: Received, lost: Lost) -> Stream:
        """Begin to connect; returns at once. What is sent before the connection stands goes once it does."""
        ...
