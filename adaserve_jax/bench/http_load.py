"""Open-loop load on any OpenAI-compatible server by its URL, as an implementation of `BenchEngine`.

Prepared requests are sent at their due times, whatever the server does; after the last one the client waits a bounded
time for the rest.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any, TypeVar, cast

from adaserve_jax.bench.engine import Ask, Due, EngineAbout, LoopResult
from adaserve_jax.bench.http_probe import (
    USAGE_LADDER,
    PreparedRequest,
    ServerDialect,
    UrlProbe,
    headers_of,
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
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.prompt_text import PromptWriter, about_tokens

SPIN_S = 0.0015
"""Time before a due time during which the loop spins: its timers are up to a millisecond late."""
SWITCH_S = 0.0005
"""Interpreter switch interval: bounds the turns of other threads of this process, such as a progress bar."""
SWEEP_S = 0.25
_MAY_BE_DEAD = ("connection_refused", "connect_timeout", "connect_failed", "disconnected", "truncated")
"""Error codes after which a run asks whether the server is still there."""
MAX_LIST_BYTES = 2**24
"""Most bytes that are read of a list of models, of which a gateway may have thousands."""
PROMPT = "Write down the numbers from one to a hundred:"
BASELINE_TOKENS, BASELINE_REQUESTS, PROBE_TOKENS = 32, 3, 2
NO_SALT = (
    "it is sent no cache salt, so that its prefix cache may know the prompts of earlier points; switch that cache off "
    "(vLLM: --no-enable-prefix-caching)"
)
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
        self.waited_to_connect = 0
        """Requests for which no idle connection was there."""
        self.resent = 0
        """Requests sent again, as the server had closed their idle connection."""
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
        doubtful = any(probe.outcome[1] in _MAY_BE_DEAD for probe in self.probes)
        gone = doubtful and not await self._pool.reachable()
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


async def _dialect(pool: ConnectionPool, settings: UrlSettings, card: Mapping[str, Any]) -> ServerDialect:
    """Find how a server counts tokens, and its baseline: the time per token of one request alone.

    card: its model's, see `model_card`. Raises ConfigError, which says what came instead.
    """
    own = card.get("owned_by") == _OWNER
    said = _number(card.get("baseline_ms")) if own else None
    baseline_s = settings.baseline_s or (said / 1e3 if said else 0.0)
    plain = ServerDialect(settings.model or str(card["id"]), {}, own, baseline_s)
    dialect = await _accepted(pool, settings, plain)
    return dialect if baseline_s else replace(dialect, baseline_s=await _baseline_s(pool, settings, dialect))


def model_card(settings: UrlSettings) -> Mapping[str, Any]:
    """Return the wanted model's entry in the server's list, or {} if it is not listed."""
    body = _get(settings, "v1/models")
    listed = body.get("data")
    cards = [card for card in listed if isinstance(card, Mapping)] if isinstance(listed, list) else []
    named = [card for card in cards if isinstance(card.get("id"), str) and settings.model in (None, card["id"])]
    if not named and settings.model is None:
        raise ConfigError(f"{settings.url} lists no model; name the model")
    return named[0] if named else {}


def _get(settings: UrlSettings, route: str) -> Mapping[str, Any]:
    """Return the object that a route answers with; {} if there is no such route and the model is named."""
    path = settings.route(route)
    where = f"{settings.url}: GET {path}"
    kind = http.client.HTTPSConnection if settings.tls else http.client.HTTPConnection
    try:
        with closing(kind(settings.host, settings.port, timeout=settings.silence_timeout_s)) as connection:
            connection.request("GET", path, headers=headers_of(settings))
            answer = connection.getresponse()
            content = answer.read(MAX_LIST_BYTES)
    except TimeoutError:
        raise ConfigError(
            f"{where} got no answer in {settings.silence_timeout_s:g} s; is it the right server?"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"{where} failed ({error}); is the server running?") from error
    if answer.status in (401, 403):
        raise ConfigError(f"{where} answered {answer.status}; give the API key")
    if answer.status != 200:
        if settings.model is None:
            raise ConfigError(f"{where} answered {answer.status}; name the model")
        return {}
    try:
        body = json.loads(content)
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
    the received texts with their times. on_note: told what people should know of the server before it is measured.
    Raises ConfigError: no such server or model, or an answer without a stream.
    """

    def __init__(
        self, settings: UrlSettings, *, policy: str | None = None, keep_texts: bool = False,
        on_note: Callable[[str], None] | None = None,
    ):  # fmt: skip
        parser_library()
        card = model_card(settings)
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
            self._dialect = self._wait(_dialect(self._pool, settings, card))
            self.about = _about(settings, self._dialect, card, policy)
        except BaseException:
            self.close()
            raise
        if on_note is not None and not self._dialect.own:
            on_note(f"{self.about.system}: {NO_SALT}")

    def prepare(self, ask: Ask) -> PreparedRequest:
        """Build the bytes of a request. Raises ConfigError if it cannot be sent to a URL."""
        item = ask.item
        written = self._writer.write(item.lengths, ask.seed) if item.by_length and item.lengths else ""
        return prepare(ask, self.settings, self._dialect, written)

    @cached_property
    def _writer(self) -> PromptWriter:
        return PromptWriter(about_tokens)  # the server's tokenizer is unknown

    def drive(
        self, due: Sequence[Due], *, drain_s: float, on_progress: Callable[[int], None] | None = None
    ) -> LoopResult:
        """Send in order of due_s and on time; cut off what is left drain_s after the last by closing connections."""
        assert self._pool is not None
        run = UrlRun(self._pool, self.settings.silence_timeout_s, on_progress, keep_texts=self._keep_texts)
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

    async def _make_pool(self) -> ConnectionPool:
        return ConnectionPool(self.settings)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _about(settings: UrlSettings, dialect: ServerDialect, card: Mapping[str, Any], policy: str | None) -> EngineAbout:
    said = _get(settings, "version").get("engine") if dialect.own else None
    engine = said if isinstance(said, Mapping) else {}
    system = settings.system or (OWN_SYSTEM if dialect.own else settings.authority)

    def text(name: str, otherwise: str) -> str:
        value = engine.get(name)
        return value if isinstance(value, str) else otherwise

    synthetic = engine.get("synthetic_acceptance")
    draft, requests, context = engine.get("draft"), engine.get("max_requests"), card.get("max_model_len")
    return EngineAbout(
        system=system,
        device=text("device", "unknown"),
        jax_version=text("jax_version", "unknown"),
        target=text("target", dialect.model),
        draft=draft if isinstance(draft, str) else None,
        target_params=None,
        draft_params=None,
        deterministic=engine.get("deterministic") is True,
        max_requests=requests if isinstance(requests, int) else 0,
        max_context=context if isinstance(context, int) else 0,
        baseline_s=dialect.baseline_s,
        synthetic_acceptance=synthetic if isinstance(synthetic, str) else None,
        policies=(policy or text("policy", system),),
    )


def _notes(run: UrlRun) -> Iterator[str]:
    sources = Counter(probe.token_source for probe in run.probes)
    for count, note in (
        (run.waited_to_connect, "{} requests waited for a new connection, and their times hold it"),
        (run.resent, "{} requests were sent again: the server had closed their idle connection"),
        (sources["usage_spread"], "tokens of {} requests were counted at the end and spread over the events"),
        (sources["events"], "tokens of {} requests were counted by events, which is a lower bound"),
    ):
        if count:
            yield note.format(f"{count} of {len(run.probes)}")
