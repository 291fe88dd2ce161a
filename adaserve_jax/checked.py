"""What all settings have in common: fields checked by name, paths taken as text, unknown keys refused.

Knows no setting. Imports no jax.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from adaserve_jax.errors import ConfigError


@dataclass(frozen=True)
class Checked:
    """Base of frozen records that a user fills in; subclasses check their fields as they are built."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain values. Raises ConfigError naming the first unknown key."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known options are {', '.join(sorted(known))}")
        return cls(**values)

    def changed(self) -> list[str]:
        """The fields that are not what they are by default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def _check(self, ok: bool, name: str, expected: str) -> None:
        """Raise ConfigError naming the field at fault unless `ok`."""
        if not ok:
            raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    def _take_paths(self, names: Iterable[str]) -> None:
        """Paths become texts; other values stay, to be checked."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(cast("os.PathLike[str]", value)))


def check_tls(tls_cert: str | None, tls_key: str | None, tls_client_ca: str | None) -> None:
    """Raise ConfigError unless a server has certificate and key or neither, and an authority beside these only."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("tls_cert and tls_key must be given together, got one of them")
    if tls_client_ca is not None and tls_cert is None:
        raise ConfigError("tls_client_ca needs tls_cert and tls_key, got neither")


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether it is one, True and False left out, within the bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it is a number, and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and is_number(value) and math.isfinite(value)
