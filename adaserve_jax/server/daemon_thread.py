"""Run work that may wait for a hung engine: unlike asyncio's threads, these do not delay the end of the program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a daemon thread of this name. Return its result as a future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on a caller who gives up leaves the thread alone

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return asyncio.wrap_future(future)
