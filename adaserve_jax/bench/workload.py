"""Reads workloads: JSON lines, one request each, with its SLO class and targets. Knows nothing of engines.

Fields: prompt | messages, max_tokens, slo_class, slo_tpot_ms | slo_relative, slo_ttft_ms, temperature, seed, arrival_s.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.sampling import MAX_SEED
from adaserve_jax.types import SLO, SamplingParams

FIELDS = (
    "prompt",
    "messages",
    "max_tokens",
    "slo_class",
    "slo_tpot_ms",
    "slo_relative",
    "slo_ttft_ms",
    "temperature",
    "seed",
    "arrival_s",
)
PACKAGED = "packaged"


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class WorkloadItem:
    """One request to replay: either `prompt` or `messages` is set. seed None: one is derived from the run's seed."""

    prompt: str | None
    messages: tuple[Message, ...]
    max_tokens: int
    slo_class: str
    slo: SLO
    temperature: float
    seed: int | None
    arrival_s: float | None

    def sampling(self, seed: int) -> SamplingParams:
        """Sampling parameters with this item's seed, or `seed` when it brings none."""
        chosen = seed if self.seed is None else self.seed
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=chosen)


@dataclass(frozen=True)
class Workload:
    """Requests to replay. sha256: of the file's bytes, hex. items is not empty."""

    name: str
    sha256: str
    items: tuple[WorkloadItem, ...]

    @property
    def has_arrivals(self) -> bool:
        return self.items[0].arrival_s is not None


def load_workload(path: Path | None = None) -> Workload:
    """Read `path`, or the packaged workload without one. Raises ConfigError naming file, line and field."""
    try:
        raw = _packaged_bytes() if path is None else path.read_bytes()
        lines = raw.decode("utf-8").split("\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read workload {path}: {error.strerror}; give the path of a JSON lines file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload {path} must be UTF-8 text: {error}") from error
    name = PACKAGED if path is None else path.name
    items = tuple(_item(line, f"{path or name}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not items:
        raise ConfigError(f"workload {path or name} holds no request; write one JSON object per line")
    with_times = sum(item.arrival_s is not None for item in items)
    if with_times not in (0, len(items)):
        raise ConfigError(
            f"workload {path or name}: arrival_s must be on every line or on none, got {with_times} of {len(items)}"
        )
    return Workload(name, hashlib.sha256(raw).hexdigest(), items)


def _packaged_bytes() -> bytes:
    return files("adaserve_jax.bench").joinpath("data/workload.jsonl").read_bytes()


def _item(line: str, where: str) -> WorkloadItem:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: expected one JSON object per line, got invalid JSON: {error.msg}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
    unknown = sorted(values.keys() - set(FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; known fields are {', '.join(FIELDS)}")
    reader = _Fields(values, where)
    prompt, messages = reader.text("prompt"), reader.messages()
    if (prompt is None) == (messages == ()):
        raise ConfigError(f"{where}: prompt: expected exactly one of prompt and messages")
    item = WorkloadItem(
        prompt=prompt,
        messages=messages,
        max_tokens=reader.integer("max_tokens", default=64, low=1, high=2**31 - 1),
        slo_class=reader.text("slo_class") or "default",
        slo=reader.slo(),
        temperature=reader.number("temperature", low=0.0, high=100.0, default=1.0) or 0.0,
        seed=None if values.get("seed") is None else reader.integer("seed", default=0, low=0, high=MAX_SEED),
        arrival_s=reader.number("arrival_s", low=0.0, high=math.inf, default=None),
    )
    return item


@dataclass(frozen=True)
class _Fields:
    """Typed access to one line; every refusal names file, line and field."""

    values: dict[str, Any]
    where: str

    def fail(self, field: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {field}: expected {expected}, got {self.values.get(field)!r}")

    def text(self, field: str) -> str | None:
        value = self.values.get(field)
        if value is not None and not (isinstance(value, str) and value):
            raise self.fail(field, "a non-empty string")
        return value

    def integer(self, field: str, *, default: int, low: int, high: int) -> int:
        value = self.values.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, *, low: float, high: float, default: float | None) -> float | None:
        value = self.values.get(field, default)
        if value is None:
            return default
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or not low <= value <= high:
            raise self.fail(field, f"a finite number from {low:g} to {high:g}")
        return float(value)

    def messages(self) -> tuple[Message, ...]:
        turns = self.values.get("messages")
        if turns is None:
            return ()
        ok = isinstance(turns, list) and turns and all(_is_turn(turn) for turn in turns)
        if not ok:
            raise self.fail("messages", 'a non-empty list of {"role": text, "content": text}')
        return tuple(Message(turn["role"], turn["content"]) for turn in turns)

    def slo(self) -> SLO:
        get = self.values.get
        try:
            return SLO(tpot_ms=get("slo_tpot_ms"), ttft_ms=get("slo_ttft_ms"), relative=get("slo_relative"))
        except RequestError as error:
            raise ConfigError(f"{self.where}: {error.param}: {error}") from error


def _is_turn(turn: object) -> bool:
    if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
        return False
    return all(isinstance(value, str) for value in turn.values())
