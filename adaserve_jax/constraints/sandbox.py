"""Limits the damage of native code on untrusted input: its stack, the wait for it, and its errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from adaserve_jax.errors import AdaServeError, QueueFullError

T = TypeVar("T")
_log = logging.getLogger(__name__)


_STACK_SIZE = threading.Lock()
"""Held while the size of new threads' stacks, which is the process's, differs from its default."""


class BoundedWork:
    """Runs each piece of work in a thread of its own with a large stack and a limit of the wait for it.

    A thread cannot be stopped: one that is late goes on, and keeps its place until it ends. Work that holds the GIL
    holds the process, which no limit here ends: texts of clients are read in linear time before.
    """

    def __init__(self, *, stack_bytes: int, limit_s: float, at_once: int):
        """Set the limits of each piece of work. at_once: most threads at a time."""
        self._stack_bytes = stack_bytes
        self._limit_s = limit_s
        self._places = threading.BoundedSemaphore(at_once)

    def run(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` does. Raises TimeoutError: it is late; QueueFullError: no thread is free."""
        if not self._places.acquire(timeout=self._limit_s):
            raise QueueFullError("too many schemas are being prepared; retry later")
        done: Future[T] = Future()

        def run_work() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            finally:
                self._places.release()

        try:
            self._start(run_work)
        except BaseException:
            self._places.release()
            raise
        return done.result(self._limit_s)

    def _start(self, run: Callable[[], None]) -> None:
        with _STACK_SIZE:
            before = threading.stack_size(self._stack_bytes)
            try:
                threading.Thread(target=run, name="bounded-work", daemon=True).start()
            finally:
                threading.stack_size(before)


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
