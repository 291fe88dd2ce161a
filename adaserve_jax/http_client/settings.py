"""What a client needs to be told of a server that it knows by its URL. Opens nothing.

The client is a bench that measures the server, or the cluster's router, which knows each of its targets so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from adaserve_jax.errors import ConfigError

ENDPOINTS = ("auto", "completions", "chat")
OWN_FIELDS = ("model", "prompt", "messages", "stream", "max_tokens")
"""Fields of a request's body that the client sets, and that nobody else may."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PORTS = {"http": 80, "https": 443}

FIELD_HELP = {
    "url": "OpenAI-compatible server to measure, as http://127.0.0.1:8000, with or without /v1",
    "system": "name of what serves, for the rows; left out: adaserve_jax where the server says so, else host and port",
    "model": "model to ask for; left out: the first that the server lists",
    "api_key": "it is sent as a bearer token, and never gets into rows or messages",
    "headers": "further headers of every request, name and value",
    "endpoint": "auto: chat for requests with messages, else completions; completions or chat: always that",
    "send_slo": "whether requests carry their targets; left out: only to servers of this package, since some refuse "
    "fields that they do not know",
    "baseline_s": "what relative targets multiply, seconds; left out: the server's own, else measured at the start",
    "extra_body": "fields that are merged into the body of every request",
    "spare_connections": "idle connections held ready; 0: every request opens its own and closes it",
    "connect_timeout_s": "longest wait for a connection, seconds",
    "silence_timeout_s": "a request that hears nothing for so many seconds fails",
}


@dataclass(frozen=True)
class UrlSettings:
    """Where the server is and how to talk to it; each field's meaning is in FIELD_HELP. Raises ConfigError."""

    url: str
    system: str = ""
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    endpoint: str = "auto"
    send_slo: bool | None = None
    baseline_s: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    spare_connections: int = 8
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self._check_url()
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {self.endpoint!r}")
        for name in ("connect_timeout_s", "silence_timeout_s", "baseline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")
        if not 0 <= self.spare_connections <= 1024:
            raise ConfigError(f"spare_connections must be from 0 to 1024, got {self.spare_connections!r}")
        for name, value in (*self.headers, ("authorization", self.api_key or "")):
            if not _TOKEN.fullmatch(name) or not _one_line(value):
                raise ConfigError(f"a header must be a name and one line of visible ASCII, got {name!r} with its value")
        taken = sorted(set(self.extra_body) & set(OWN_FIELDS))
        if taken:
            raise ConfigError(f"extra_body must leave out what the workload decides, got {taken[0]!r}")

    @property
    def tls(self) -> bool:
        return self._parts.scheme == "https"

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    @property
    def port(self) -> int:
        return self._parts.port or _PORTS[self._parts.scheme]

    @property
    def authority(self) -> str:
        """Host and port as the URL has them."""
        return self._parts.netloc

    def route(self, name: str) -> str:
        """The path of a route: of `v1/models` below the URL, whether or not that ends in /v1."""
        path = self._parts.path.rstrip("/").removesuffix("/v1")
        return f"{path}/{name}"

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    def _check_url(self) -> None:
        try:
            parts = self._parts
            ok = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0 and self.url.isascii()
            plain = not (parts.query or parts.fragment or "@" in parts.netloc or " " in self.url) and _one_line(
                self.url
            )
        except ValueError:
            ok = plain = False
        if not ok or not plain:
            raise ConfigError(
                "the URL of a server must be like http://127.0.0.1:8000 or https://host/v1, without a user, a query or "
                f"a fragment, got {self.url.rpartition('@')[2]!r}"
            )


def _one_line(text: str) -> bool:
    return text.isascii() and (text.isprintable() or not text)
