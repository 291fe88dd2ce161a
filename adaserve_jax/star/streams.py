"""Whose stream is whose: the connections of targets, as the worker sees them. Knows no gRPC and no session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from adaserve_jax.star.messages import LOAD_EVERY_S, FromService, FromTarget, Hello, Load
from adaserve_jax.star.wire import WireError

Frame = Sequence[FromTarget | WireError]
M = TypeVar("M", bound=FromTarget)


class Connection(Protocol):
    """One stream of a target, as the worker sees it. identity: who its peer is, by token or certificate."""

    @property
    def identity(self) -> str: ...

    def send(self, frame: Sequence[FromService]) -> None:
        """Hand a frame over; returns at once, never raises, and drops it where the stream has ended."""
        ...

    def taken(self) -> None:
        """One frame of it has been taken in."""
        ...

    def end(self) -> None:
        """Send what was handed over, then end the stream. Safe to call twice."""
        ...


class Streams:
    """One for each target that has said Hello. load: of the service, as of a time; targets are told it now and then."""

    def __init__(self, load: Callable[[float], Load]) -> None:
        self._load = load
        self._streams: dict[str, Connection] = {}
        self._targets: dict[Connection, str] = {}
        self._load_sent_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def of(self, target_id: str) -> Connection | None:
        return self._streams.get(target_id)

    def target_of(self, stream: Connection) -> str | None:
        return self._targets.get(stream)

    def add(self, target_id: str, stream: Connection) -> None:
        """The target's, which has none."""
        self._streams[target_id] = stream
        self._targets[stream] = target_id

    def remove(self, stream: Connection) -> str | None:
        """Nothing is sent on it any more; returns whose it was."""
        target_id = self._targets.pop(stream, None)
        if target_id is not None:
            del self._streams[target_id]
            self._load_sent_s.pop(target_id, None)
        return target_id

    def send(self, target_id: str, frame: list[FromService], now: float) -> None:
        """Nothing happens where the target has no stream."""
        stream = self._streams.get(target_id)
        if stream is None:
            return
        if now - self._load_sent_s.get(target_id, -math.inf) >= LOAD_EVERY_S:
            self._load_sent_s[target_id] = now
            frame = [*frame, self._load(now)]
        stream.send(frame)

    def end_all(self) -> None:
        for stream in list(self._targets):
            stream.end()


def named(message: M, stream: Connection) -> M:
    """Targets with other credentials are others, whatever they call themselves."""
    if isinstance(message, Hello):
        return replace(message, target_id=f"{stream.identity}/{message.target_id}")
    return message
