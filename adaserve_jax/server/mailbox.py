"""From an engine's thread to the event loop: calls that come together wake the loop once. Knows no engine."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class Mailbox:
    """Calls made on one event loop in the order in which any threads post them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
        """Make `call(*arguments)` on the loop, soon; nothing when the loop is closed."""
        self._calls.append((call, arguments))
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop again, or is seen below
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception:  # one request's bug must not keep the others' tokens
                _log.exception("a chunk could not be delivered")
