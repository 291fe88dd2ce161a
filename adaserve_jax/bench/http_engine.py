"""Any OpenAI-compatible server, by its URL, as a bench run sees it: the client, its event loop and the accounting are
here, the engine is elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from adaserve_jax.bench.engine import Ask, EngineAbout
from adaserve_jax.bench.http_connection import parser_library
from adaserve_jax.bench.http_discovery import Discovered, discover, system_name
from adaserve_jax.bench.http_drive import UrlRun, undisturbed
from adaserve_jax.bench.http_pool import ConnectionPool
from adaserve_jax.bench.http_requests import Prepared, prepare
from adaserve_jax.bench.http_settings import UrlSettings
from adaserve_jax.bench.http_tokens import worst
from adaserve_jax.bench.open_loop import Due, LoopResult
from adaserve_jax.bench.prompt_text import PromptWriter, about_tokens
from adaserve_jax.errors import ConfigError
from adaserve_jax.stats import StepStats

T = TypeVar("T")


class UrlEngine:
    """Implements `BenchEngine` by HTTP, ready when the constructor returns.

    The client's clock counts: a request arrives when it is sent, a token comes when its bytes are read. policy: the
    name of its rows; None: the server's policy where it is of this package, else its system. keep_texts: whether each
    probe keeps what came, with its time. Raises ConfigError: no such server, no such model, an answer not streamed.
    """

    def __init__(self, settings: UrlSettings, *, policy: str | None = None, keep_texts: bool = False):
        parser_library()
        self.settings = settings
        self.token_source = ""
        """How the tokens of the last drive were counted, of its least sure request: `http_tokens.SOURCES`."""
        self.notes: tuple[str, ...] = ()
        """Sentences on what the client had to do in the last drive."""
        self._keep_texts = keep_texts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-url", daemon=True)
        self._thread.start()
        self._pool: ConnectionPool | None = None
        try:
            self._pool = self._wait(self._make_pool())
            self._found = self._wait(discover(self._pool, settings))
        except BaseException:
            self.close()
            raise
        self.about = _about(settings, self._found, policy)

    def prepare(self, ask: Ask) -> Prepared:
        """The bytes of its request. Raises ConfigError when it cannot be asked of a URL."""
        item = ask.item
        written = self._writer.write(item.lengths, ask.seed) if item.by_length and item.lengths else ""
        return prepare(ask, self.settings, self._found.dialect, written)

    @cached_property
    def _writer(self) -> PromptWriter:
        """Of about as many tokens as wanted: nobody here can count those of a server."""
        return PromptWriter(about_tokens)

    def drive(
        self, due: Sequence[Due], *, drain_s: float, on_progress: Callable[[int], None] | None = None
    ) -> LoopResult:
        """Send in order of due_s and on time; what is left drain_s after the last is cut off by closing connections.

        Ctrl-C stops sending and cuts off likewise. on_progress: told how many are in flight, from the client's thread.
        """
        run = UrlRun(self._open_pool, self.settings.silence_timeout_s, on_progress, keep_texts=self._keep_texts)
        with undisturbed():
            future = asyncio.run_coroutine_threadsafe(run.run(due, drain_s), self._loop)
            try:
                result = future.result()
            except KeyboardInterrupt:
                self._loop.call_soon_threadsafe(run.stop)
                result = replace(future.result(), interrupted=True)
        self.token_source = worst([p.token_source for p in run.probes if p.token_source is not None]) or ""
        self.notes = tuple(_notes(run))
        return result

    def set_policy(self, name: str) -> None:
        """Only the one name that its rows have. Raises ConfigError."""
        if name not in (self.about.policies or ()):
            known = ", ".join(self.about.policies or ())
            raise ConfigError(f"a server by its URL keeps its own policy: expected {known}, got {name!r}")

    def stats(self) -> StepStats | None:
        return None

    def compiles_after_ready(self) -> int:
        return 0

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop.is_closed():
            return
        if self._pool is not None:
            self._wait(self._pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def _open_pool(self) -> ConnectionPool:
        assert self._pool is not None
        return self._pool

    async def _make_pool(self) -> ConnectionPool:
        return ConnectionPool(self.settings)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _about(settings: UrlSettings, found: Discovered, policy: str | None) -> EngineAbout:
    engine, system = found.engine, system_name(settings, found)

    def text(name: str, otherwise: str) -> str:
        value = engine.get(name)
        return value if isinstance(value, str) else otherwise

    draft, requests = engine.get("draft"), engine.get("max_requests")
    return EngineAbout(
        system=system,
        device=text("device", "unknown"),
        jax_version=text("jax_version", "unknown"),
        target=text("target", found.dialect.model),
        draft=draft if isinstance(draft, str) else None,
        target_params=None,
        draft_params=None,
        deterministic=engine.get("deterministic") is True,
        max_requests=requests if isinstance(requests, int) else 0,
        max_context=found.max_context,
        baseline_s=found.dialect.baseline_s,
        policies=(policy or text("policy", system),),
    )


def _notes(run: UrlRun) -> list[str]:
    notes, count = [], len(run.probes)
    if run.waited_to_connect:
        notes.append(
            f"{run.waited_to_connect} of {count} requests waited for a new connection, and their times hold it"
        )
    if run.resent:
        notes.append(f"{run.resent} of {count} requests were sent again: the server had closed their idle connection")
    spread = sum(probe.token_source == "usage_spread" for probe in run.probes)
    guessed = sum(probe.token_source == "events" for probe in run.probes)
    if spread:
        notes.append(f"tokens of {spread} of {count} requests were counted at the end and spread over the events")
    if guessed:
        notes.append(f"tokens of {guessed} of {count} requests were counted by events, which is a lower bound")
    return notes
