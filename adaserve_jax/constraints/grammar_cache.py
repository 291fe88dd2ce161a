"""JSON schemas, each prepared once, in threads of their own: nobody who asks for one waits here. Imports no jax."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaserve_jax.constraints.contained import contained
from adaserve_jax.constraints.grammar_vocabulary import Vocabulary
from adaserve_jax.errors import QueueFullError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_SCHEMAS = 64
MAX_PREPARING = 32


@dataclass(frozen=True, eq=False)
class Start:
    """A prepared schema. matcher: before the first token; copy it for each text."""

    schema: str
    matcher: LLMatcher


class GrammarCache:
    """Prepared schemas by their texts, and refusals. Safe in any thread. max_schemas: so many of either are kept, the
    least recently used goes first."""

    def __init__(self, vocabulary: Vocabulary, max_schemas: int):
        self._vocabulary = vocabulary
        self._max_schemas = max_schemas
        self._pool = ThreadPoolExecutor(MAX_PREPARING, "schemas")
        self._lock = threading.Lock()  # guards the rest
        self._prepared: OrderedDict[str, Start] = OrderedDict()
        self._refused: OrderedDict[str, RequestError] = OrderedDict()
        self._running: dict[str, Future[Start]] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def prepare(self, schema: str) -> Future[Start]:
        """`schema`, as soon as it is prepared; who asks meanwhile gets the same future. It may raise RequestError (code
        invalid_schema): the schema cannot be enforced; QueueFullError: too many others are being prepared."""
        known: Future[Start] = Future()
        with self._lock:
            if (start := self._prepared.get(schema)) is not None:
                self._prepared.move_to_end(schema)
                known.set_result(start)
            elif (error := self._refused.get(schema)) is not None:
                self._refused.move_to_end(schema)
                known.set_exception(_again(error))
            elif (running := self._running.get(schema)) is not None:
                known = running
            elif len(self._running) >= MAX_PREPARING:
                known.set_exception(QueueFullError("too many schemas are being prepared; retry later"))
            else:
                known = self._running[schema] = self._pool.submit(self._prepare, schema)
        return known

    def forget(self, schema: str) -> None:
        """Whoever asks for it next gets it prepared anew."""
        with self._lock:
            self._prepared.pop(schema, None)

    def _prepare(self, schema: str) -> Start:
        try:
            with contained("response_format"):
                return self._vocabulary.compile(schema, lambda matcher: self._keep(Start(schema, matcher)))
        except RequestError as error:
            return self._refuse(schema, error)
        finally:
            with self._lock:
                del self._running[schema]

    def _keep(self, start: Start) -> Start:
        """Also of one that comes too late for who asked for it."""
        with self._lock:
            self._refused.pop(start.schema, None)
            self._prepared[start.schema] = start
            if len(self._prepared) > self._max_schemas:
                self._prepared.popitem(last=False)
        return start

    def _refuse(self, schema: str, error: RequestError) -> Start:
        """Raises the error, unless the schema came after all."""
        with self._lock:
            if (late := self._prepared.get(schema)) is not None:
                return late
            self._refused[schema] = _again(error)
            if len(self._refused) > self._max_schemas:
                self._refused.popitem(last=False)
        raise error


def _again(error: RequestError) -> RequestError:
    """The error without what it collected where it was raised."""
    return RequestError(str(error), param=error.param, code=error.code)
