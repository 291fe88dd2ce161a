"""Open-loop load on any OpenAI-compatible server by its URL, as an implementation of `BenchEngine`.

Prepared requests are sent at their due times, whatever the server does; after the last one the client waits a bounded
time for the rest.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, TypeVar, cast

from adaserve_jax.bench.engine import Ask, Due, EngineAbout, LoopResult
from adaserve_jax.bench.http_probe import (
    MAX_ERROR_BYTES,
    USAGE_LADDER,
    PreparedRequest,
    ServerDialect,
    UrlProbe,
    message,
    prepare,
    worst,
)
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.connection import parser_library
from adaserve_jax.http_client.pool import ConnectionPool
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.results.schema import OWN_SYSTEM
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO
from adaserve_jax.workloads.prompt_text import PromptWriter, about_tokens
from adaserve_jax.workloads.workload import WorkloadItem

SPIN_S = 0.0015
"""Time before a due time during which the loop spins: its timers are up to a millisecond late."""
SWITCH_S = 0.0005
"""Interpreter switch interval: bounds the turns of other threads of this process, such as a progress bar."""
SWEEP_S = 0.25
_UNREACHED = ("connection_refused", "connect_timeout", "connect_failed")
PROMPT = "Write down the numbers from one to a hundred:"
BASELINE_TOKENS, BASELINE_REQUESTS, PROBE_TOKENS = 32, 3, 2
FIRST_ANSWER_S = 600.0
"""Limit for the first request, which may load a model."""
_OWNER = "adaserve"
T = TypeVar("T")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable garbage collection and shorten the turns of other threads while times are taken."""
    enabled, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(min(switch_s, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.unfreeze()
        if enabled:
            gc.enable()


class UrlRun:
    """One open-loop run on one event loop. `stop()` ends it early, from the loop's own thread."""

    def __init__(
        self,
        pool: ConnectionPool,
        silence_timeout_s: float,
        on_progress: Callable[[int], None] | None = None,
        *,
        keep_texts: bool = False,
    ):
        self.probes: list[UrlProbe] = []
        self.waited_to_connect = self.resent = 0
        self._pool = pool
        self._silence_timeout_s = silence_timeout_s
        self._on_progress = on_progress or (lambda _: None)
        self._keep_texts = keep_texts
        self._in_flight = 0
        self._none_left = asyncio.Event()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self, due: Sequence[Due], drain_s: float) -> LoopResult:
        """Submit in order of due_s, wait at most drain_s for the rest, then cut it off by closing connections."""
        await self._pool.fill()
        sweeper = asyncio.create_task(self._sweep())
        start_s = time.monotonic()
        for each in due:
            await self._until(start_s + each.due_s)
            if self._stopped.is_set():
                break
            self._submit(cast("PreparedRequest", each.prepared), start_s + each.due_s)
        await self._drained(drain_s)
        sweeper.cancel()
        cut_off_s = time.monotonic()
        await asyncio.sleep(0)  # parse what was read just now
        left = [probe for probe in self.probes if not probe.ended]
        for probe in left:
            probe.cut_off()
        self._pool.close_busy()
        gone = await self._server_gone()
        return LoopResult.of(
            self.probes, start_s, cut_off_s if left else None, interrupted=self._stopped.is_set(), engine_died=gone
        )

    def _submit(self, prepared: PreparedRequest, due_at_s: float) -> None:
        probe = UrlProbe(prepared, due_at_s, self._ended, self._resend, keep_texts=self._keep_texts)
        self.probes.append(probe)
        self._in_flight += 1
        self._none_left.clear()
        probe.submitted_at_s = probe.heard_at_s = time.monotonic()
        self.waited_to_connect += self._pool.acquire(probe.send, probe.fail)
        self._on_progress(self._in_flight)

    def _resend(self, probe: UrlProbe) -> None:
        self.resent += 1
        self._pool.acquire(probe.send, probe.fail, fresh=True)

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._none_left.set()
        self._on_progress(self._in_flight)

    async def _until(self, when_s: float) -> None:
        while (left_s := when_s - time.monotonic()) > 0 and not self._stopped.is_set():
            await asyncio.sleep(min(left_s - SPIN_S, SWEEP_S) if left_s > SPIN_S else 0)

    async def _drained(self, drain_s: float) -> None:
        if not self._in_flight:
            return
        waits = [asyncio.create_task(event.wait()) for event in (self._none_left, self._stopped)]
        await asyncio.wait(waits, timeout=0 if self._stopped.is_set() else drain_s, return_when="FIRST_COMPLETED")
        for wait in waits:
            wait.cancel()

    async def _sweep(self) -> None:
        """Fail requests that have been silent for too long."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._silence_timeout_s / 4))
            oldest_s = time.monotonic() - self._silence_timeout_s
            for probe in [probe for probe in self.probes if not probe.ended and probe.heard_at_s < oldest_s]:
                probe.fail("timeout")

    async def _server_gone(self) -> bool:
        """Return whether requests found no server and still none accepts a connection."""
        missed = any(probe.outcome[1] in _UNREACHED for probe in self.probes)
        return missed and not await self._pool.reachable()


@dataclass(frozen=True)
class DiscoveredServer:
    """Properties of a server that are found before it is measured.

    max_context: 0 if unknown. engine: engine facts of a server of this package.
    """

    dialect: ServerDialect
    max_context: int
    engine: Mapping[str, Any]


class _WholeBody:
    """Response handler that collects a whole answer. ended: error code, or None if it came whole."""

    def __init__(self) -> None:
        self.status, self.content = 0, bytearray()
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def on_body(self, at_s: float, part: bytes) -> None:
        self.content += part[: 16 * MAX_ERROR_BYTES - len(self.content)]

    def on_end(self, at_s: float) -> None:
        self._finish(None)

    def on_lost(self, at_s: float, code: str, heard: bool) -> None:
        self._finish(code)

    def fail(self, code: str) -> None:
        self._finish(code)

    def _finish(self, code: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


async def discover(pool: ConnectionPool, settings: UrlSettings) -> DiscoveredServer:
    """Find the server's model, whether it is of this package, how it counts tokens, and its baseline.

    The baseline is the time per token of one request alone. Raises ConfigError, which says what came instead.
    """
    card = await _model_card(pool, settings)
    own = card.get("owned_by") == _OWNER
    said = _number(card.get("baseline_ms")) if own else None
    baseline_s = settings.baseline_s or (said / 1e3 if said else 0.0)
    plain = ServerDialect(settings.model or str(card["id"]), {}, own, baseline_s)
    dialect = await _accepted(pool, settings, plain)
    if not baseline_s:
        dialect = replace(dialect, baseline_s=await _baseline_s(pool, settings, dialect))
    version = await _get(pool, settings, "version") if own else {}
    engine = version.get("engine")
    context = card.get("max_model_len")
    return DiscoveredServer(
        dialect, context if isinstance(context, int) else 0, engine if isinstance(engine, Mapping) else {}
    )


def system_name(settings: UrlSettings, found: DiscoveredServer) -> str:
    return settings.system or (OWN_SYSTEM if found.dialect.own else settings.authority)


async def _model_card(pool: ConnectionPool, settings: UrlSettings) -> Mapping[str, Any]:
    """Return the wanted model's entry in the server's list, or {} if it is not listed."""
    try:
        body = await _get(pool, settings, "v1/models")
    except _RouteMissing as error:
        if settings.model is None:
            raise ConfigError(f"{error}; name the model") from None
        return {}
    listed = body.get("data")
    cards = [card for card in listed if isinstance(card, Mapping)] if isinstance(listed, list) else []
    named = [card for card in cards if isinstance(card.get("id"), str) and settings.model in (None, card["id"])]
    if not named and settings.model is None:
        raise ConfigError(f"{settings.url} lists no model; name the model")
    return named[0] if named else {}


class _RouteMissing(ConfigError):
    """The server has no such route."""


async def _get(pool: ConnectionPool, settings: UrlSettings, route: str) -> Mapping[str, Any]:
    answer = _WholeBody()
    pool.acquire(lambda connection: connection.send(message(settings, route, None), answer), answer.fail)
    where = f"{settings.url}: GET {settings.route(route)}"
    try:
        lost = await asyncio.wait_for(answer.ended, settings.silence_timeout_s)
    except TimeoutError:
        raise ConfigError(
            f"{where} got no answer in {settings.silence_timeout_s:g} s; is it the right server?"
        ) from None
    if lost is not None:
        raise ConfigError(f"{where} failed ({lost.replace('_', ' ')}); is the server running?")
    if answer.status in (401, 403):
        raise ConfigError(f"{where} answered {answer.status}; give the API key")
    if answer.status != 200:
        raise _RouteMissing(f"{where} answered {answer.status}")
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} must answer with a JSON object; is it an OpenAI-compatible server?")
    return body


async def _accepted(pool: ConnectionPool, settings: UrlSettings, plain: ServerDialect) -> ServerDialect:
    """Return the dialect with the best entry of USAGE_LADDER that the server does not refuse."""
    for usage in USAGE_LADDER:
        dialect = replace(plain, usage=usage)
        probe = await _ask(pool, settings, dialect, PROBE_TOKENS)
        status, code = probe.outcome
        if status == "finished":
            return dialect
        if code not in ("http_400", "http_422") and status != "rejected":
            break
    raise ConfigError(
        f"{settings.url} must answer a request for {PROBE_TOKENS} tokens of model {plain.model!r} with a stream, got "
        f"{code or status}{': ' + probe.error if probe.error else ''}; the endpoint or extra_body may need to change"
    )


async def _baseline_s(pool: ConnectionPool, settings: UrlSettings, dialect: ServerDialect) -> float:
    """Return the median seconds per token of greedy requests, each alone; 0 if none had two tokens."""
    found = []
    for _ in range(BASELINE_REQUESTS):
        times = (await _ask(pool, settings, dialect, BASELINE_TOKENS)).token_times_s
        if len(times) > 1:
            found.append((times[-1] - times[0]) / (len(times) - 1))
    return median(found) if found else 0.0


async def _ask(pool: ConnectionPool, settings: UrlSettings, dialect: ServerDialect, tokens: int) -> UrlProbe:
    item = WorkloadItem(PROMPT, (), tokens, "default", SLO(), 0.0, 0, None)
    prepared = prepare(Ask("probe", item, 0, SLO(), "probe", tokens), settings, dialect)
    run = UrlRun(pool, max(settings.silence_timeout_s, FIRST_ANSWER_S))
    await run.run([Due(0.0, prepared)], FIRST_ANSWER_S)
    return run.probes[0]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


class UrlEngine:
    """`BenchEngine` over HTTP, ready when the constructor returns.

    Times are the client's: a request arrives when it is sent, a token when its bytes are read. policy: name in the
    result rows; None: the policy of a server of this package, else the system. keep_texts: whether each probe keeps
    the received texts with their times. Raises ConfigError: no such server or model, or an answer without a stream.
    """

    def __init__(self, settings: UrlSettings, *, policy: str | None = None, keep_texts: bool = False):
        parser_library()
        self.settings = settings
        self.token_source = ""
        """Least sure source of token times in the last drive: one of http_probe.SOURCES, or ""."""
        self.notes: tuple[str, ...] = ()
        """Remarks on the last drive, for the user."""
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

    def prepare(self, ask: Ask) -> PreparedRequest:
        """Build the bytes of a request. Raises ConfigError if it cannot be sent to a URL."""
        item = ask.item
        written = self._writer.write(item.lengths, ask.seed) if item.by_length and item.lengths else ""
        return prepare(ask, self.settings, self._found.dialect, written)

    @cached_property
    def _writer(self) -> PromptWriter:
        """Writer of prompts with about as many tokens as wanted; the server's tokenizer is unknown."""
        return PromptWriter(about_tokens)

    def drive(
        self, due: Sequence[Due], *, drain_s: float, on_progress: Callable[[int], None] | None = None
    ) -> LoopResult:
        """Send in order of due_s and on time; cut off what is left drain_s after the last by closing connections.

        Ctrl-C stops sending and cuts off likewise. on_progress: called with the number of requests in flight, in the
        client's thread.
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
        """Accept only the one name in its rows: a server keeps its own policy. Raises ConfigError."""
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


def _about(settings: UrlSettings, found: DiscoveredServer, policy: str | None) -> EngineAbout:
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
