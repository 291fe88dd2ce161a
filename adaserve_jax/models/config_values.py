"""Reads values of a checkpoint's JSON files; errors name the file and the setting."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaserve_jax.errors import CheckpointError, UnsupportedModelError


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a checkpoint's file. Raises CheckpointError: it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; expected a Hugging Face checkpoint folder with config.json, safetensors and tokenizer"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


MOST_INTEGER = 2**31 - 1
"""Largest integer that is taken: sizes and token ids become 32-bit integers on the device."""


class ConfigValues:
    """Values of one file. within: name of the nested object that they come from, for messages."""

    def __init__(self, values: Mapping[str, Any], path: Path, within: str = ""):
        self.values = values
        self.path = path
        self._within = f"{within}." if within else ""

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def inside(self, name: str, values: Mapping[str, Any]) -> ConfigValues:
        """Return the values of a nested object."""
        return ConfigValues(values, self.path, f"{self._within}{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer >= 1; absent and null mean the default. Raises CheckpointError."""
        value = self.get(name)
        return self._integer(name, default if value is None else value, 1)

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an integer >= 0; the default is for an absent key only. Raises CheckpointError."""
        return self._integer(name, self.get(name, default), 0)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a number above 0; the default is for an absent key only. Raises CheckpointError."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def optional(self, name: str) -> float | None:
        """Return a number above 0, or None if the key is absent or null. Raises CheckpointError."""
        return None if self.get(name) is None else self.positive(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false; absent and null mean the default. Raises CheckpointError."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return default if value is None else value

    def _integer(self, name: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, value, f"an integer >= {least}")
        if value > MOST_INTEGER:
            raise self.wrong(name, value, f"an integer of at most {MOST_INTEGER}")
        return value

    def wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._within}{name} must be {expected}, got {value!r}")

    def unsupported(self, name: str, advice: str = "use a checkpoint without it") -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: {self._within}{name} = {self.get(name)!r} is not supported; {advice}"
        )
