"""Configuration of a target that asks draft services. Imports no jax."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from adaserve_jax.settings import Panel, PathText, Settings, setting, settings

SCHEME = "grpc://"


@settings
class DrafterConfig(Settings):
    """One or more draft services, "grpc://host:port" each, and how they are asked. Raises ConfigError.

    The connection is encrypted where `drafter_ca` is given.
    """

    PANEL: ClassVar[Panel] = Panel.DRAFTERS
    LEAST_SERVICES: ClassVar[int] = 1

    drafter: tuple[str, ...] = setting(
        (), "draft service that drafts in place of a draft of this engine, as grpc://host:port; several share the "
        "requests; none: the engine's own draft", expected="one or more of grpc://host:port",
    )  # fmt: skip
    drafter_deadline_ms: float = setting(
        100.0, "longest that a step waits for a draft service; what is late is decoded without", gt=0
    )
    drafter_version: str = setting(
        "", "version of the only draft that will do, as `adaserve draft` prints it; empty: any",
        expected="the version of a draft, or empty for any",
    )  # fmt: skip
    drafter_token_file: PathText | None = setting(
        None, "file with the token that the draft services ask for; none: no token"
    )
    drafter_ca: PathText | None = setting(
        None, "PEM file of the authority that signed the draft services' certificates; none: not encrypted"
    )
    drafter_cert: PathText | None = setting(
        None, "PEM file of this engine's own certificate, for services that ask for one (mTLS)"
    )
    drafter_key: PathText | None = setting(None, "PEM file of that certificate's key")

    def __post_init__(self) -> None:
        given = len(self.drafter) >= self.LEAST_SERVICES
        self._require(given and all(map(_is_service, self.drafter)), "drafter", "one or more of grpc://host:port")
        self._require(len(set(self.drafter)) == len(self.drafter), "drafter", "of different addresses")
        pair = (self.drafter_cert is None) == (self.drafter_key is None)
        self._require(pair, "drafter_key", "given together with drafter_cert")
        trusted = self.drafter_cert is None or self.drafter_ca is not None
        self._require(trusted, "drafter_ca", "given where drafter_cert is")

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of every service, in order."""
        return tuple(service.removeprefix(SCHEME) for service in self.drafter)

    @property
    def deadline_s(self) -> float:
        return self.drafter_deadline_ms / 1e3


@settings
class DrafterOptions(DrafterConfig):
    """DrafterConfig as a command line or a file gives it: without a service none is asked.

    The other fields may be set all the same, so that a file can keep them.
    """

    LEAST_SERVICES: ClassVar[int] = 0

    def chosen(self) -> DrafterConfig | None:
        """Return `EngineConfig.drafter`."""
        return self.narrowed(DrafterConfig) if self.drafter else None

    def unused(self) -> list[str]:
        """Return the names of changed fields that have no effect because no service is given."""
        return [] if self.drafter else self.changed()


def _is_service(value: str) -> bool:
    """Return whether a text is "grpc://host:port" and nothing more."""
    if not value.startswith(SCHEME):
        return False
    try:
        parts = urlsplit(value)
        named = bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False
    return named and not (
        parts.path or parts.query or parts.fragment or "@" in parts.netloc or value.split() != [value]
    )
