"""The bytes of the requests that a bench sends to a URL, made ahead of the run. Opens nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaserve_jax.bench.engine import Ask
from adaserve_jax.bench.http_settings import UrlSettings
from adaserve_jax.bench.workload import WorkloadItem
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO

USAGE_LADDER: tuple[Mapping[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Ways to ask for token counts in a stream, the best first; servers that refuse one get the next."""


@dataclass(frozen=True)
class Dialect:
    """What one server takes. usage: of USAGE_LADDER. own: it is of this package, so that it knows targets, salts and
    every parameter of sampling."""

    model: str
    usage: Mapping[str, Any]
    own: bool
    baseline_s: float


@dataclass(frozen=True)
class Prepared:
    """A request as it goes onto the wire, and what its record needs. slo: as the client accounts for it."""

    request_id: str
    message: bytes
    slo: SLO
    slo_class: str
    max_tokens: int


def prepare(ask: Ask, settings: UrlSettings, dialect: Dialect, written: str = "") -> Prepared:
    """written: the prompt of an item that is known by its lengths only. Raises ConfigError when the item cannot be
    asked of this server."""
    if ask.slo.relative is not None and dialect.baseline_s <= 0:
        raise ConfigError("a relative target needs a baseline, and none could be measured; give baseline_s")
    body = request_body(ask, settings, dialect, written)
    return Prepared(ask.request_id, message(settings, *body), ask.slo, ask.item.slo_class, ask.max_tokens)


def request_body(
    ask: Ask, settings: UrlSettings, dialect: Dialect, written: str = ""
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Route and body. Whatever sampling the server would fill in by itself is said where that is standard."""
    route, content = _content(ask.item, ask.item.prompt or written, settings.endpoint)
    body: dict[str, Any] = {
        "model": dialect.model, **content, "stream": True, **dialect.usage, "max_tokens": ask.max_tokens,
        "temperature": ask.item.temperature, "top_p": 1.0, "seed": ask.seed,
    }  # fmt: skip
    if dialect.own:
        body |= {"top_k": 0, "min_p": 0.0, "cache_salt": ask.cache_salt}
        if ask.item.by_length:
            body["ignore_eos"] = True
    if dialect.own if settings.send_slo is None else settings.send_slo:
        tpot_s = ask.slo.tpot_s(dialect.baseline_s)
        targets = {"slo_tpot_ms": None if tpot_s is None else 1e3 * tpot_s, "slo_ttft_ms": ask.slo.ttft_ms}
        body |= {name: value for name, value in targets.items() if value is not None}
    return route, body | dict(settings.extra_body)


def message(settings: UrlSettings, route: str, body: Mapping[str, Any] | None) -> bytes:
    """A whole HTTP request; GET without a body."""
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    headers = {
        "host": settings.authority,
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        "user-agent": "adaserve-bench",
    }
    if body is not None:
        headers |= {"content-type": "application/json", "content-length": str(len(content))}
    if settings.api_key is not None:
        headers["authorization"] = f"Bearer {settings.api_key}"
    if not settings.spare_connections:
        headers["connection"] = "close"
    headers |= {name.lower(): value for name, value in settings.headers}
    lines = [f"{'GET' if body is None else 'POST'} {settings.route(route)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + content


def _content(item: WorkloadItem, prompt: str, endpoint: str) -> tuple[str, dict[str, Any]]:
    if not prompt and not item.messages:
        raise ConfigError("a request known by its lengths only needs a made prompt before it is sent to a URL")
    if item.messages or endpoint == "chat":
        turns = [{"role": m.role, "content": m.content} for m in item.messages]
        if endpoint == "completions":
            raise ConfigError(
                "a request with messages cannot be sent to completions; leave the endpoint at auto, or make it chat"
            )
        return "v1/chat/completions", {"messages": turns or [{"role": "user", "content": prompt}]}
    return "v1/completions", {"prompt": prompt}
