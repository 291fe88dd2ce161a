"""The signals that end a cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def stop_on_signals(kill: Callable[[], object]) -> asyncio.Event:
    """Set by the first SIGINT, SIGTERM or SIGHUP; each one after that calls `kill`. In the main thread, on its loop."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
