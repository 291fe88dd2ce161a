"""Limits the damage of native code on untrusted input: its stack, its time, and its errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from adaserve_jax.errors import AdaServeError, QueueFullError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BoundedWork:
    """Runs each piece of work in a thread of its own with a large stack and a time limit.

    A thread cannot be stopped: one that is late goes on, and keeps its place until it ends.
    """

    def __init__(self, *, stack_bytes: int, limit_s: float, at_once: int):
        """Set the limits of each piece of work. at_once: most threads at a time."""
        self._stack_bytes = stack_bytes
        self._limit_s = limit_s
        self._places = threading.BoundedSemaphore(at_once)
        self._starting = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` does. Raises TimeoutError: it is late; QueueFullError: no thread is free."""
        if not self._places.acquire(timeout=self._limit_s):
            raise QueueFullError("too many schemas are being prepared; retry later")
        piece = _Piece(work, self._places)
        try:
            thread = self._start(piece.run)
        except BaseException:
            self._places.release()
            raise
        thread.join(self._limit_s)
        if thread.is_alive():
            raise TimeoutError
        return piece.result()

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="bounded-work", daemon=True)
        with self._starting:
            before = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return thread


class _Piece(Generic[T]):
    def __init__(self, work: Callable[[], T], places: threading.BoundedSemaphore):
        self._work = work
        self._places = places
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._places.release()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


@contextmanager
def contained(field: str) -> Iterator[None]:
    """Log any foreign error raised inside and raise AdaServeError (engine_error), which ends one request only.

    field: the request's field that the code works on, for the message. A panic of native code is a BaseException.
    """
    try:
        yield
    except (AdaServeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _log.exception("the engine failed on a request's %s", field)
        raise AdaServeError(f"the engine failed on this request's {field}; it goes on with the others") from error
