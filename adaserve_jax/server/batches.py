"""Work that must not hold up the event loop: what is put in is handed over in batches, on a thread of its own.

Bounded: what finds no room is counted and forgotten. Knows nothing of what is put in.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Batches(Generic[T]):
    """Calls work(items) every `every_s` seconds, with none too; it returns those that it wants to be given again.

    put: from one thread. dropped(count): items that were never worked off, called from either thread. limit: items that
    wait or are worked on. A `work` that raises loses its batch, and the thread goes on.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[T]], list[T]],
        dropped: Callable[[int], None],
        *,
        every_s: float,
        limit: int,
    ):
        self._work = work
        self._dropped = dropped
        self._every_s = every_s
        self._limit = limit
        self._waiting: deque[T] = deque()
        self._taken: list[T] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Returns at once, within microseconds."""
        if self._closing.is_set() or len(self._waiting) + len(self._taken) >= self._limit:
            self._dropped(1)
        else:
            self._waiting.append(item)

    def close(self, timeout_s: float) -> bool:
        """Work off what waits; what is wanted again then counts as dropped. Returns whether that ended in time."""
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._turn()
        self._turn()
        left = len(self._taken) + len(self._waiting)
        if left:
            self._dropped(left)

    def _turn(self) -> None:
        taken = self._taken + [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._taken = taken
        try:
            self._taken = self._work(taken)
        except Exception:
            _log.exception("%s failed on %d items", self._thread.name, len(taken))
            self._dropped(len(taken))
            self._taken = []
