"""Who gets the chunks of which request. Safe in any thread; sinks are called without a lock held."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from adaserve_jax.engine.client import OutputChunk, Sink, failed_chunks
from adaserve_jax.errors import AdaServeError

_log = logging.getLogger(__name__)


class Sinks:
    """Those of open requests: from `open` until all choices have ended, or the sink has failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Sink, set[int]]] = {}  # with the choices that have not ended

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request_id: str, sink: Sink, choices: int) -> None:
        with self._lock:
            self._open[request_id] = (sink, set(range(choices)))

    def deliver(self, chunk: OutputChunk) -> bool:
        """False: the sink failed, and gets nothing any more. True also where nobody waits for the chunk."""
        with self._lock:
            sink, left = self._open.get(chunk.request_id, (None, set()))
            if chunk.finish_reason is not None:
                left.discard(chunk.choice)
                if not left:
                    self._open.pop(chunk.request_id, None)
        if sink is None or _call(sink, chunk):
            return True
        with self._lock:
            self._open.pop(chunk.request_id, None)
        return False

    def fail_all(self, error: AdaServeError) -> None:
        """Tell every one, of every choice that has not ended."""
        with self._lock:
            left, self._open = self._open, {}
        for request_id, (sink, choices) in left.items():
            for chunk in failed(request_id, choices, error):
                _call(sink, chunk)


def failed(request_id: str, choices: Iterable[int], error: AdaServeError) -> list[OutputChunk]:
    return failed_chunks(request_id, choices, str(error), error.code, error.param)


def _call(sink: Sink, chunk: OutputChunk) -> bool:
    """Whether the sink took the chunk. A client's failing sink costs its own request only."""
    try:
        sink(chunk)
    except Exception:
        _log.exception("a sink failed on a chunk of request %s", chunk.request_id)
        return False
    return True
