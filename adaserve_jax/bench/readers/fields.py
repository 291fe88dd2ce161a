"""Typed access to the fields of one request of a workload file; every refusal names file, line and field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adaserve_jax.bench.workload_items import Message
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO

MOST_TOKENS = 1 << 20
"""Longest prompt and longest output that a file may tell of."""
MOST_SECONDS = 1e10
"""Latest time that a file may tell of."""


@dataclass(frozen=True)
class Fields:
    """values: of a JSON object, or the texts of a table's row by column (is_row). where: file and line."""

    values: dict[str, Any]
    where: str
    is_row: bool = False

    def fail(self, field: str, expected: str) -> ConfigError:
        got = "nothing" if field not in self.values else _shown(self.values[field])
        return ConfigError(f"{self.where}: {field}: expected {expected}, got {got}")

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def only(self, known: tuple[str, ...]) -> None:
        """Raises ConfigError: a field that is not known."""
        unknown = sorted(self.values.keys() - set(known))
        if unknown:
            raise ConfigError(f"{self.where}: unknown field {_shown(unknown[0])}; known fields are {', '.join(known)}")

    def text(self, field: str, *, required: bool = True, empty: bool = False) -> str | None:
        """None: absent and not required."""
        value = self.values.get(field)
        if value is None and not required:
            return None
        if not isinstance(value, str) or not (value or empty) or not _is_unicode(value):
            raise self.fail(field, f"{'a' if empty else 'a non-empty'} string")
        return value

    def string(self, field: str) -> str:
        """A text that must be there."""
        return self.text(field) or ""

    def integer(self, field: str, *, low: int = 1, high: int = MOST_TOKENS, default: int | None = None) -> int:
        """A whole number, in a table one in decimal digits. default: when it is absent; None: it must be there."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if self.is_row and isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, *, low: float, high: float) -> float:
        """A number that must be there, in a table one in decimal digits."""
        value = self.values.get(field)
        if self.is_row and isinstance(value, str):
            value = _decimal(value)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(field, f"a finite number from {low:g} to {high:g}")
        return float(value)

    def optional(self, field: str, *, low: float, high: float) -> float | None:
        return self.number(field, low=low, high=high) if self.has(field) else None

    def seconds(self, field: str, *, per: float = 1.0) -> float:
        """A time that must be there, of so many to the second."""
        return self.number(field, low=0.0, high=MOST_SECONDS * per) / per

    def messages(self, field: str = "messages") -> tuple[Message, ...]:
        """() when absent."""
        turns = self.values.get(field)
        if turns is None:
            return ()
        read = [_turn(turn) for turn in turns] if isinstance(turns, list) else []
        if not read or None in read:
            raise self.fail(field, 'a non-empty list of {"role": text, "content": text}')
        return tuple(turn for turn in read if turn is not None)

    def slo(self) -> SLO:
        """From slo_tpot_ms, slo_ttft_ms and slo_relative, as the HTTP interface spells them."""
        get = self.values.get
        try:
            return SLO(tpot_ms=get("slo_tpot_ms"), ttft_ms=get("slo_ttft_ms"), relative=get("slo_relative"))
        except (RequestError, OverflowError) as error:
            field = getattr(error, "param", None) or "slo"
            raise ConfigError(f"{self.where}: {field}: {error}") from error


def _turn(turn: object) -> Message | None:
    """Parts of a content that are texts are joined; None: no message of texts."""
    if not isinstance(turn, dict) or turn.keys() != {"role", "content"}:
        return None
    role, content = turn["role"], turn["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        content = "".join(strings) if strings and len(strings) == len(content) else None
    if not (isinstance(role, str) and isinstance(content, str) and _is_unicode(role + content)):
        return None
    return Message(role, content)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return "something nested too deeply to show"


def _is_unicode(text: str) -> bool:
    """Without halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decimal(text: str) -> float:
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan
