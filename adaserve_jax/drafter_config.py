"""Which draft services a target asks, and how: frozen, validated, explicit. Imports no jax."""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar
from urllib.parse import urlsplit

from adaserve_jax.checked import Checked, is_finite

SCHEME = "grpc://"
FILES = ("drafter_token_file", "drafter_ca", "drafter_cert", "drafter_key")


@dataclass(frozen=True)
class DrafterConfig(Checked):
    """One or more draft services, "grpc://host:port" each. Each field's help text is in FIELD_HELP. The connection is
    encrypted where `drafter_ca` is given. Raises ConfigError."""

    drafter: tuple[str, ...] = ()
    drafter_deadline_ms: float = 100.0
    drafter_version: str = ""
    drafter_token_file: str | None = None
    drafter_ca: str | None = None
    drafter_cert: str | None = None
    drafter_key: str | None = None

    least_services: ClassVar[int] = 1

    def __post_init__(self) -> None:
        given = isinstance(self.drafter, (tuple, list)) and len(self.drafter) >= self.least_services
        self._check(given and all(map(is_service, self.drafter)), "drafter", "one or more of grpc://host:port")
        object.__setattr__(self, "drafter", tuple(self.drafter))
        self._check(len(set(self.drafter)) == len(self.drafter), "drafter", "of different addresses")
        in_time = is_finite(self.drafter_deadline_ms) and self.drafter_deadline_ms > 0
        self._check(in_time, "drafter_deadline_ms", "a finite number above 0")
        self._check(
            isinstance(self.drafter_version, str), "drafter_version", "the version of a draft, or empty for any"
        )
        self._take_paths(FILES)
        for name in FILES:
            self._check(isinstance(getattr(self, name), str | None), name, "a path")
        pair = (self.drafter_cert is None) == (self.drafter_key is None)
        self._check(pair, "drafter_key", "given together with drafter_cert")
        trusted = self.drafter_cert is None or self.drafter_ca is not None
        self._check(trusted, "drafter_ca", "given where drafter_cert is")

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of every service, in order."""
        return tuple(service.removeprefix(SCHEME) for service in self.drafter)

    @property
    def deadline_s(self) -> float:
        return self.drafter_deadline_ms / 1e3


@dataclass(frozen=True)
class DrafterOptions(DrafterConfig):
    """DrafterConfig as a command line or a file gives it: without a service it says that none is asked.

    The other fields may be set all the same, so that a file can keep them.
    """

    least_services: ClassVar[int] = 0

    def chosen(self) -> DrafterConfig | None:
        """What an engine takes as `drafter`."""
        if not self.drafter:
            return None
        return DrafterConfig(**{f.name: getattr(self, f.name) for f in fields(DrafterConfig)})

    def unused(self) -> list[str]:
        """The fields that say something, and to no effect, because no service is given."""
        return [] if self.drafter else self.changed()


def is_service(value: object) -> bool:
    """Whether a value is "grpc://host:port", and nothing more."""
    if not isinstance(value, str) or not value.startswith(SCHEME):
        return False
    try:
        parts = urlsplit(value)
        named = bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False
    return named and not (
        parts.path or parts.query or parts.fragment or "@" in parts.netloc or value.split() != [value]
    )


FIELD_HELP: dict[str, str] = {
    "drafter": "draft service that drafts in place of a draft of this engine, as grpc://host:port; several share the "
    "requests; none: the engine's own draft",
    "drafter_deadline_ms": "longest that a step waits for a draft service; what is late is decoded without",
    "drafter_version": "version of the only draft that will do, as `adaserve draft` prints it; empty: any",
    "drafter_token_file": "file with the token that the draft services ask for; none: no token",
    "drafter_ca": "PEM file of the authority that signed the draft services' certificates; none: not encrypted",
    "drafter_cert": "PEM file of this engine's own certificate, for services that ask for one (mTLS)",
    "drafter_key": "PEM file of that certificate's key",
}
"""The meaning of every field of DrafterConfig and DrafterOptions."""
