"""Who gets the chunks of which request. Safe in any thread; sinks are called without a lock held."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from adaserve_jax.engine.client import OutputChunk, Sink

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Open:
    """A request some of whose choices, `left`, have not ended."""

    sink: Sink
    left: set[int]
    failed: bool = False


class Sinks:
    """Those of open requests: from `open` until all choices have ended. One thread at a time delivers, or fails, so
    that each sink gets its chunks in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request_id: str, sink: Sink, choices: int) -> None:
        with self._lock:
            self._open[request_id] = _Open(sink, set(range(choices)))

    def deliver(self, chunks: Iterable[OutputChunk]) -> list[str]:
        """Hand each chunk to its request's sink, unless its choice has ended or is nobody's. Returns the requests whose
        sink failed at one: it gets nothing more, and the request is open until its choices have ended."""
        known: list[tuple[_Open, OutputChunk]] = []
        with self._lock:  # once for a whole step
            for chunk in chunks:
                request = self._open.get(chunk.request_id)
                if request is None or chunk.choice not in request.left:
                    continue
                if chunk.finish_reason is not None:
                    request.left.discard(chunk.choice)
                    if not request.left:
                        del self._open[chunk.request_id]
                known.append((request, chunk))
        failed: list[str] = []
        for request, chunk in known:
            if not request.failed and not _call(request.sink, chunk):
                request.failed = True
                failed.append(chunk.request_id)
        return failed

    def fail(self, request_id: str, message: str, code: str | None, param: str | None) -> None:
        """End what is left of a request with finish_reason "error": it was refused before it began, or lost with its
        engine."""
        with self._lock:
            request = self._open.get(request_id)
            left = [] if request is None else sorted(request.left)
        self.deliver([OutputChunk(request_id, choice, "", [], "error", None, message, code, param) for choice in left])

    def fail_all(self, message: str, code: str | None, param: str | None) -> None:
        with self._lock:
            request_ids = list(self._open)
        for request_id in request_ids:
            self.fail(request_id, message, code, param)


def _call(sink: Sink, chunk: OutputChunk) -> bool:
    """Whether the sink took the chunk. A client's failing sink costs its own request only."""
    try:
        sink(chunk)
    except Exception:
        _log.exception("the sink of request %s raised; the request is stopped", chunk.request_id)
        return False
    return True
