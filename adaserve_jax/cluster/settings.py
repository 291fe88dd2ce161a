"""Settings of a router: options of `adaserve cluster`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from adaserve_jax.errors import ConfigError
from adaserve_jax.routing.routers import find_router
from adaserve_jax.server.settings import HttpSettings, ServerSettings
from adaserve_jax.settings import Panel, PathText, setting, settings


@settings
class RouterSettings(HttpSettings):
    """Settings of a router. Raises ConfigError."""

    port: int = setting(
        8000, "TCP port of the router; 0: any free one, which is printed", Panel.ADDRESS, ge=0, le=65535
    )
    api_key: str | None = setting(
        None, "key with which targets are asked for their load, and that /metrics and /cluster ask for; requests "
        "keep the keys that they come with, which the targets check; none: no key", Panel.ADDRESS, secret=True,
    )  # fmt: skip
    targets: tuple[str, ...] = setting((), "servers to send requests to, as host:port or http://host:port, with commas")
    router: str = setting(
        "slo-aware",
        "how a target is chosen: slo-aware (fewest requests off pace), least-loaded, round-robin, or "
        "slo-aware:<d>, which looks at d targets drawn for each request",
    )
    profile: PathText | None = setting(
        None, "file of `adaserve profile` that says what steps cost on a target; none: a guess from its own baseline",
        Panel.DEVICES,
    )  # fmt: skip
    most_wait: float = setting(
        30.0, "longest that a request waits for a target that can take it, seconds; then it is refused with 503",
        ge=0, unit="seconds",
    )  # fmt: skip
    most_requests: int = setting(4096, "most requests at once; more are refused with 429", ge=1)
    poll_every: float = setting(1.0, "seconds between two looks at a target's health and load", gt=0, unit="seconds")
    poll_timeout: float = setting(
        5.0, "a target that does not say how it is within so many seconds, twice, gets no requests",
        gt=0, unit="seconds",
    )  # fmt: skip
    token_file: PathText | None = setting(
        None, "file with the token for /cluster, by which targets are drained and exchanged; none: nobody can"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "targets", checked_urls(self.targets))
        find_router(self.router)

    @property
    def server(self) -> ServerSettings:
        return ServerSettings(**{each.name: getattr(self, each.name) for each in fields(HttpSettings)})

    @property
    def target_key(self) -> str | None:
        """The API key that targets are asked with for their load: the first of `api_key`."""
        keys = self.server.all_keys()
        return keys[0].key if keys else None

    def token(self) -> str | None:
        """Read the secret of `token_file`. Raises ConfigError when there is none in it."""
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
    """Return URLs of targets without a slash at the end; "host:port" becomes an http URL. Raises ConfigError."""
    found: list[str] = []
    for given in urls:
        url = (given if "://" in given else f"http://{given}").rstrip("/")
        try:
            parts = urlsplit(url)
            ok = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if not ok or parts.path or parts.query or parts.fragment or parts.username:
                raise ValueError(url)
        except ValueError as error:
            raise ConfigError(
                f"targets must be host:port or URLs like http://127.0.0.1:8001 without a path, got {given!r}"
            ) from error
        if url in found:
            raise ConfigError(f"targets must be different ones, got {url!r} twice")
        found.append(url)
    return tuple(found)
