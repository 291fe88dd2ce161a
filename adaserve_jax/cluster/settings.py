"""How a router behaves: frozen, validated. Options of `adaserve cluster` are made from the fields and FIELD_HELP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adaserve_jax.errors import ConfigError
from adaserve_jax.routing.routers import find_router
from adaserve_jax.server.settings import FIELD_HELP as SERVER_HELP
from adaserve_jax.server.settings import ServerSettings

OF_THE_SERVER = (
    "host", "port", "api_key", "max_body_bytes", "shutdown_timeout", "log_level", "tls_cert", "tls_key",
    "tls_client_ca", "keep_alive_timeout", "receive_timeout", "max_header_bytes",
)  # fmt: skip
"""Fields that mean here what they mean for a server."""


def _of_the_server(name: str) -> Any:
    return ServerSettings.__dataclass_fields__[name].default


@dataclass(frozen=True)
class RouterSettings:
    """One router's settings; each field's help text is in FIELD_HELP. Raises ConfigError."""

    targets: tuple[str, ...] = ()
    router: str = "slo-aware"
    profile: str | None = None
    most_wait: float = 30.0
    most_requests: int = 4096
    poll_every: float = 1.0
    poll_timeout: float = 5.0
    token_file: str | None = None
    host: str = _of_the_server("host")
    port: int = _of_the_server("port")
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = _of_the_server("max_body_bytes")
    shutdown_timeout: float = _of_the_server("shutdown_timeout")
    log_level: str = _of_the_server("log_level")
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    keep_alive_timeout: float = _of_the_server("keep_alive_timeout")
    receive_timeout: float = _of_the_server("receive_timeout")
    max_header_bytes: int = _of_the_server("max_header_bytes")

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", checked_urls(self.targets))
        find_router(self.router)
        for name in ("poll_every", "poll_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number of seconds above 0, got {getattr(self, name)!r}")
        if not 0 <= self.most_wait < math.inf:
            raise ConfigError(f"most_wait must be a finite number of seconds >= 0, got {self.most_wait!r}")
        if self.most_requests < 1:
            raise ConfigError(f"most_requests must be an integer >= 1, got {self.most_requests!r}")
        _ = self.server  # checks the rest

    @property
    def server(self) -> ServerSettings:
        """What the HTTP front is made from. Raises ConfigError."""
        return ServerSettings(**{name: getattr(self, name) for name in OF_THE_SERVER})

    @property
    def target_key(self) -> str | None:
        """The API key that targets are asked with for their load: the first of `api_key`."""
        keys = self.server.all_keys()
        return keys[0].key if keys else None

    def token(self) -> str | None:
        """The secret of `token_file`. Raises ConfigError when there is none in it."""
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"token_file must be a file that can be read, got {self.token_file}: {error.strerror}"
            ) from error
        if not token:
            raise ConfigError(f"token_file must hold a token, got {self.token_file}, which is empty")
        return token


def checked_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """URLs of targets, without a slash at their ends; "host:port" is one of http. Raises ConfigError."""
    found: list[str] = []
    for given in urls:
        url = (given if "://" in given else f"http://{given}").rstrip("/")
        try:
            parts = urlsplit(url)
            ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            ok = ok and not (parts.path or parts.query or parts.fragment or parts.username)
        except ValueError:
            ok = False
        if not ok:
            raise ConfigError(
                f"targets must be host:port or URLs like http://127.0.0.1:8001 without a path, got {given!r}"
            )
        if url in found:
            raise ConfigError(f"targets must be different ones, got {url!r} twice")
        found.append(url)
    return tuple(found)


FIELD_HELP: dict[str, str] = {
    "targets": "servers to send requests to, as host:port or http://host:port, with commas",
    "router": "how a target is chosen: slo-aware (fewest requests off pace), least-loaded, round-robin",
    "profile": "file of `adaserve profile` that says what steps cost on a target; none: a guess from its own baseline",
    "most_wait": "longest that a request waits for a target that can take it, seconds; then it is refused with 503",
    "most_requests": "most requests at once; more are refused with 429",
    "poll_every": "seconds between two looks at a target's health and load",
    "poll_timeout": "a target that does not say how it is within so many seconds, twice, gets no requests",
    "token_file": "file with the token for /cluster, by which targets are drained and exchanged; none: nobody can",
    **{name: SERVER_HELP[name] for name in OF_THE_SERVER},
    "api_key": "key with which targets are asked for their load, and that /metrics and /cluster ask for; requests keep "
    "the keys that they come with, which the targets check; none: no key",
    "port": "TCP port of the router; 0: any free one, which is printed",
}
