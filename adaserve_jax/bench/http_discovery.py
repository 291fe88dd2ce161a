"""What a server says of itself before it is measured: its model, whether it is of this package, how it counts tokens,
and how fast it decodes one request alone. Runs on the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from adaserve_jax.bench.engine import Ask
from adaserve_jax.bench.http_drive import UrlRun
from adaserve_jax.bench.http_pool import ConnectionPool
from adaserve_jax.bench.http_probe import MAX_ERROR_BYTES, UrlProbe
from adaserve_jax.bench.http_requests import USAGE_LADDER, Dialect, message, prepare
from adaserve_jax.bench.http_settings import UrlSettings
from adaserve_jax.bench.open_loop import Due
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.schema import OWN_SYSTEM
from adaserve_jax.types import SLO

PROMPT = "Write down the numbers from one to a hundred:"
BASELINE_TOKENS, BASELINE_REQUESTS, PROBE_TOKENS = 32, 3, 2
FIRST_ANSWER_S = 600.0
"""The first request may load a model."""
_OWNER = "adaserve"


@dataclass(frozen=True)
class Discovered:
    """dialect: how to talk to the server. engine: what a server of this package says of its engine. max_context: 0
    where it does not say."""

    dialect: Dialect
    max_context: int
    engine: Mapping[str, Any]


class _Body:
    """Collects a whole answer."""

    def __init__(self) -> None:
        self.status, self.content = 0, bytearray()
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

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
        if not self.over.done():
            self.over.set_result(code)


async def discover(pool: ConnectionPool, settings: UrlSettings) -> Discovered:
    """Raises ConfigError that says what came instead."""
    card = await _model_card(pool, settings)
    own = card.get("owned_by") == _OWNER
    said = _number(card.get("baseline_ms")) if own else None
    baseline_s = settings.baseline_s or (said / 1e3 if said else 0.0)
    plain = Dialect(settings.model or str(card["id"]), {}, own, baseline_s)
    dialect = await _accepted(pool, settings, plain)
    if not baseline_s:
        dialect = replace(dialect, baseline_s=await _baseline_s(pool, settings, dialect))
    version = await _get(pool, settings, "version") if own else {}
    engine = version.get("engine")
    context = card.get("max_model_len")
    return Discovered(
        dialect, context if isinstance(context, int) else 0, engine if isinstance(engine, Mapping) else {}
    )


def system_name(settings: UrlSettings, found: Discovered) -> str:
    return settings.system or (OWN_SYSTEM if found.dialect.own else settings.authority)


async def _model_card(pool: ConnectionPool, settings: UrlSettings) -> Mapping[str, Any]:
    """The wanted model's entry in the server's list, or an empty one where it is not listed."""
    try:
        body = await _get(pool, settings, "v1/models")
    except _NotThere as error:
        if settings.model is None:
            raise ConfigError(f"{error}; name the model") from None
        return {}
    listed = body.get("data")
    cards = [card for card in listed if isinstance(card, Mapping)] if isinstance(listed, list) else []
    named = [card for card in cards if isinstance(card.get("id"), str) and settings.model in (None, card["id"])]
    if not named and settings.model is None:
        raise ConfigError(f"{settings.url} lists no model; name the model")
    return named[0] if named else {}


class _NotThere(ConfigError):
    """The server has no such route."""


async def _get(pool: ConnectionPool, settings: UrlSettings, route: str) -> Mapping[str, Any]:
    answer = _Body()
    pool.acquire(lambda connection: connection.send(message(settings, route, None), answer), answer.fail)
    where = f"{settings.url}: GET {settings.route(route)}"
    try:
        lost = await asyncio.wait_for(answer.over, settings.silence_timeout_s)
    except TimeoutError:
        raise ConfigError(
            f"{where} got no answer in {settings.silence_timeout_s:g} s; is it the right server?"
        ) from None
    if lost is not None:
        raise ConfigError(f"{where} failed ({lost.replace('_', ' ')}); is the server running?")
    if answer.status in (401, 403):
        raise ConfigError(f"{where} answered {answer.status}; give the API key")
    if answer.status != 200:
        raise _NotThere(f"{where} answered {answer.status}")
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} must answer with a JSON object; is it an OpenAI-compatible server?")
    return body


async def _accepted(pool: ConnectionPool, settings: UrlSettings, plain: Dialect) -> Dialect:
    """With the best of USAGE_LADDER that the server does not refuse."""
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


async def _baseline_s(pool: ConnectionPool, settings: UrlSettings, dialect: Dialect) -> float:
    """Median seconds per token of greedy requests, each alone; 0 where there were never two tokens."""
    found = []
    for _ in range(BASELINE_REQUESTS):
        times = (await _ask(pool, settings, dialect, BASELINE_TOKENS)).token_times_s
        if len(times) > 1:
            found.append((times[-1] - times[0]) / (len(times) - 1))
    return median(found) if found else 0.0


async def _ask(pool: ConnectionPool, settings: UrlSettings, dialect: Dialect, tokens: int) -> UrlProbe:
    item = WorkloadItem(PROMPT, (), tokens, "default", SLO(), 0.0, 0, None)
    prepared = prepare(Ask("probe", item, 0, SLO(), "probe", tokens), settings, dialect)
    run = UrlRun(pool, max(settings.silence_timeout_s, FIRST_ANSWER_S))
    await run.run([Due(0.0, prepared)], FIRST_ANSWER_S)
    return run.probes[0]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
