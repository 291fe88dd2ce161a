"""The bytes of a workload file: plain or gzip, within bounds, as JSON objects or table rows that know their line.

Knows no format.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Message

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
        """Raise ConfigError for an unknown field."""
        unknown = sorted(self.values.keys() - set(known))
        if unknown:
            raise ConfigError(f"{self.where}: unknown field {_shown(unknown[0])}; known fields are {', '.join(known)}")

    def text(self, field: str, *, required: bool = True, empty: bool = False) -> str | None:
        """Return the field, or None if it is absent and not required."""
        value = self.values.get(field)
        if value is None and not required:
            return None
        if not isinstance(value, str) or not (value or empty) or not _is_unicode(value):
            raise self.fail(field, f"{'a' if empty else 'a non-empty'} string")
        return value

    def string(self, field: str) -> str:
        """Return a required text."""
        return self.text(field) or ""

    def integer(self, field: str, *, low: int = 1, high: int = MOST_TOKENS, default: int | None = None) -> int:
        """Return a whole number, in a table one in decimal digits. default: used if absent; None: required."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if self.is_row and isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, *, low: float, high: float) -> float:
        """Return a required number, in a table one in decimal digits."""
        value = self.values.get(field)
        if self.is_row and isinstance(value, str):
            value = _decimal(value)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(field, f"a finite number from {low:g} to {high:g}")
        return float(value)

    def optional(self, field: str, *, low: float, high: float) -> float | None:
        return self.number(field, low=low, high=high) if self.has(field) else None

    def seconds(self, field: str, *, per: float = 1.0) -> float:
        """Return a required time in seconds. per: the file's units per second."""
        return self.number(field, low=0.0, high=MOST_SECONDS * per) / per

    def messages(self) -> tuple[Message, ...]:
        """Return the messages, () when there are none."""
        turns = self.values.get("messages")
        if turns is None:
            return ()
        read = [_turn(turn) for turn in turns] if isinstance(turns, list) else []
        if not read or None in read:
            raise self.fail("messages", 'a non-empty list of {"role": text, "content": text}')
        return tuple(turn for turn in read if turn is not None)

    def slo(self) -> SLO:
        """Return the targets from slo_tpot_ms, slo_ttft_ms, slo_relative and slo_e2e_ms, as the HTTP interface has
        them."""
        get = self.values.get
        try:
            return SLO(
                tpot_ms=get("slo_tpot_ms"), ttft_ms=get("slo_ttft_ms"), relative=get("slo_relative"),
                e2e_ms=get("slo_e2e_ms"),
            )  # fmt: skip
        except (RequestError, OverflowError) as error:
            field = getattr(error, "param", None) or "slo"
            raise ConfigError(f"{self.where}: {field}: {error}") from error


def _turn(turn: object) -> Message | None:
    """Return a message, whose parts are joined by line breaks, as servers do; None if they are not all texts."""
    if not isinstance(turn, dict) or turn.keys() != {"role", "content"}:
        return None
    role, content = turn["role"], turn["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        content = "\n".join(strings) if strings and len(strings) == len(content) else None
    if not (isinstance(role, str) and isinstance(content, str) and _is_unicode(role + content)):
        return None
    return Message(role, content)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return "something nested too deeply to show"


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which no tokenizer takes."""
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


MOST_BYTES = 256 << 20
MOST_REQUESTS = 2_000_000
"""Larger files, uncompressed, and requests beyond these bounds are refused."""
_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Source:
    """One file. place: what errors call it. raw: uncompressed. folder: where it lies, None for a packaged one."""

    name: str
    place: str
    raw: bytes
    folder: Path | None

    @classmethod
    def open(cls, path: Path) -> Source:
        """Read a file, .gz or plain. Raises ConfigError: it cannot be read, or is too large."""
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot read workload {path}: {reason}; give the path of a file, .gz or plain"
            ) from error
        if len(raw) > MOST_BYTES:
            raise ConfigError(f"workload {path} has more than {MOST_BYTES} bytes uncompressed; cut it")
        return cls(path.name, str(path), raw, path.parent)

    @property
    def sha256(self) -> str:
        """Hex, of what the file holds, however it is packed."""
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def text(self) -> str:
        """Without a byte order mark. Raises ConfigError: it is no UTF-8."""
        try:
            return self.raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"workload {self.place} must be UTF-8 text: {error}") from error

    @cached_property
    def begin(self) -> int:
        """Return the position of the first character that is not blank."""
        return _skip(self.text, 0)

    @property
    def is_json(self) -> bool:
        return self.text.startswith(("[", "{"), self.begin)

    def keys(self) -> frozenset[str]:
        """Return the keys of the first JSON object, or the columns of a table, without blanks around."""
        if self.is_json:
            first = next(self.objects(), None)
            return frozenset() if first is None else frozenset(first.values)
        end = self.text.find("\n", self.begin)
        header = self.text[self.begin : end if end >= 0 else None]
        return frozenset(name.strip(' \r"') for name in header.split(","))

    def objects(self) -> Iterator[Fields]:
        """Yield every JSON object of an array or of JSON lines. Raises ConfigError naming file and line."""
        is_array = self.text.startswith("[", self.begin)
        for number, (line, value) in enumerate(self._array() if is_array else self._lines(), 1):
            where = f"{self.place}:{line}"
            if number > MOST_REQUESTS:
                raise ConfigError(f"{where}: expected at most {MOST_REQUESTS} requests; cut the file")
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}")
            yield Fields(value, where)

    def rows(self) -> Iterator[Fields]:
        """Yield every row of a table with a header, as texts by column. Raises ConfigError naming file and line."""
        reader = csv.reader(io.StringIO(self.text, newline=""))
        header: list[str] | None = None
        number = 0
        try:
            for row in reader:
                where = f"{self.place}:{reader.line_num}"
                if not row:
                    continue
                if header is None:
                    header = [name.strip() for name in row]
                    continue
                number += 1
                if number > MOST_REQUESTS:
                    raise ConfigError(f"{where}: expected at most {MOST_REQUESTS} requests; cut the file")
                if len(row) != len(header):
                    raise ConfigError(f"{where}: expected {len(header)} fields, got {len(row)}")
                yield Fields(dict(zip(header, row, strict=True)), where, is_row=True)
        except csv.Error as error:
            raise ConfigError(f"{self.place}:{reader.line_num}: expected a row of a table, got {error}") from error

    def _lines(self) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(self.text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{self.place}:{number}: expected one JSON object per line, got invalid JSON: {_reason(error)}"
                ) from error

    def _array(self) -> Iterator[tuple[int, Any]]:
        """Yield the elements of the array, each with the line that it begins on."""
        text, line, counted = self.text, 1, 0
        at = _skip(text, self.begin + 1)
        while text[at : at + 1] != "]":
            line, counted = line + text.count("\n", counted, at), at
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{self.place}:{line}: expected a JSON object, got invalid JSON: {_reason(error)}"
                ) from error
            yield line, value
            at = _skip(text, at)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise ConfigError(f"{self.place}:{line}: expected a comma or the end of the array after this object")
            at = _skip(text, at + 1)
            if text[at : at + 1] == "]":
                raise ConfigError(f"{self.place}:{line}: expected another object after the comma that follows this one")
        if _skip(text, at + 1) != len(text):
            raise ConfigError(f"{self.place}: expected nothing after the end of the JSON array")


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)
