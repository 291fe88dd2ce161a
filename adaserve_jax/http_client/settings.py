"""Settings of a client that knows a server by its URL: a bench that measures it, or a router in front of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from adaserve_jax.errors import ConfigError
from adaserve_jax.settings import Settings, setting, settings

Endpoint = Literal["auto", "completions", "chat"]
OWN_FIELDS = ("model", "prompt", "messages", "stream", "max_tokens")
"""Fields of a request's body that `extra_body` may not set; it overrides any other, such as temperature."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PORTS = {"http": 80, "https": 443}


@settings
class UrlSettings(Settings):
    """Address and dialect of a server. Raises ConfigError."""

    url: str = setting(..., "OpenAI-compatible server to measure, as http://127.0.0.1:8000, with or without /v1")
    system: str = setting(
        "", "name of what serves, for the rows; left out: adaserve_jax where the server says so, else host and port"
    )
    model: str | None = setting(None, "model to ask for; left out: the first that the server lists")
    api_key: str | None = setting(
        None, "it is sent as a bearer token, and never gets into rows or messages", secret=True
    )
    headers: tuple[tuple[str, str], ...] = setting(
        (), "further headers of every request, name and value", expected="pairs of name and value", secret=True
    )
    endpoint: Endpoint = setting(
        "auto", "auto: chat for requests with messages, else completions; completions or chat: always that"
    )
    send_slo: bool | None = setting(
        None, "whether requests carry their targets; left out: only to servers of this package, since some refuse "
        "fields that they do not know",
    )  # fmt: skip
    baseline_s: float | None = setting(
        None, "what relative targets multiply, seconds; left out: the server's own, else measured at the start",
        gt=0, unit="seconds",
    )  # fmt: skip
    extra_body: Mapping[str, Any] = setting(
        {}, "fields that are merged into the body of every request, over those of the bench", expected="an object"
    )
    spare_connections: int = setting(
        8, "idle connections held ready; 0: every request opens its own and closes it", ge=0, le=1024
    )
    connect_timeout_s: float = setting(10.0, "longest wait for a connection, seconds", gt=0, unit="seconds")
    silence_timeout_s: float = setting(
        120.0, "a request that hears nothing for so many seconds fails", gt=0, unit="seconds"
    )

    def __post_init__(self) -> None:
        self._check_url()
        for name, value in (*self.headers, ("authorization", self.api_key or "")):
            if not _TOKEN.fullmatch(name) or not _one_line(value):
                raise ConfigError(f"a header must be a name and one line of visible ASCII, got {name!r} with its value")
        taken = sorted(set(self.extra_body) & set(OWN_FIELDS))
        if taken:
            raise ConfigError(f"extra_body must leave out {', '.join(OWN_FIELDS)}, got {taken[0]!r}")

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
        """Return the path of a route such as `v1/models`, whether or not the URL ends in /v1."""
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
