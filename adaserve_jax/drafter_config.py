"""Which draft services a target asks, and how: frozen, validated, explicit. Imports no jax."""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

from adaserve_jax.errors import ConfigError

SCHEME = "grpc://"
FILES = ("drafter_token_file", "drafter_ca", "drafter_cert", "drafter_key")


@dataclass(frozen=True)
class DrafterConfig:
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
        deadline = self.drafter_deadline_ms
        number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
        ok = number and math.isfinite(deadline) and deadline > 0
        self._check(ok, "drafter_deadline_ms", "a finite number above 0")
        self._check(
            isinstance(self.drafter_version, str), "drafter_version", "the version of a draft, or empty for any"
        )
        for name in FILES:
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(cast("os.PathLike[str]", value)))
            self._check(value is None or isinstance(getattr(self, name), str), name, "a path")
        pair = (self.drafter_cert is None) == (self.drafter_key is None)
        self._check(pair, "drafter_key", "given together with drafter_cert")
        trusted = self.drafter_cert is None or self.drafter_ca is not None
        self._check(trusted, "drafter_ca", "given where drafter_cert is")

    def _check(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of every service, in order."""
        return tuple(service.removeprefix(SCHEME) for service in self.drafter)

    @property
    def deadline_s(self) -> float:
        return self.drafter_deadline_ms / 1e3

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        """Build from plain values. Raises ConfigError naming the first unknown key."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known options are {', '.join(sorted(known))}")
        return cls(**values)


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
        return [] if self.drafter else [f.name for f in fields(self) if getattr(self, f.name) != f.default]


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
