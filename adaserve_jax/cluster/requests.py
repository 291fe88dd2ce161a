"""What a router reads of a request's body: what routing needs to know, and nothing that it would have to check.

A body that is wrong is the target's to refuse: what cannot be read here counts as not given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaserve_jax.bench.routers import Assigned
from adaserve_jax.server.classes import DEFAULT_CLASS, USUAL_TIERS

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
BYTES_PER_TOKEN = 4
"""Of text, as tokenizers have it about; lists of token ids are counted."""
MOST_CHOICES = 64
"""Of one request, that are counted one by one."""


@dataclass(frozen=True)
class Classes:
    """What a target says of itself, as far as requests' targets depend on it. targets: by class, TPOT and TTFT in
    seconds, None without one. baseline_s: what slo_relative multiplies."""

    targets: Mapping[str, tuple[float | None, float | None]]
    baseline_s: float


@dataclass(frozen=True)
class Wanted:
    """What a request asks for. choices: how many answers it wants, each of which takes room."""

    assigned: Assigned
    choices: int
    stream: bool

    def fresh(self) -> list[Assigned]:
        """What a router counts, one per choice; the first choice has the prompt's tokens to compute."""
        others = [replace(self.assigned, prompt_tokens=1) for _ in range(self.choices - 1)]
        return [replace(self.assigned), *others]


def read_request(path: str, body: bytes, classes: Classes, now: float) -> Wanted | None:
    """None: the request generates nothing, and any target will do. now: seconds."""
    if path not in GENERATION_PATHS:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    name = fields.get("slo_class")
    if not isinstance(name, str):
        tier = fields.get("service_tier")
        name = USUAL_TIERS.get(tier, tier) if isinstance(tier, str) else DEFAULT_CLASS
    tpot_s, ttft_s = classes.targets.get(name, (None, None))
    relative = _number(fields.get("slo_relative"))
    own_s = _seconds(fields.get("slo_tpot_ms"))
    if own_s is None and relative is not None:
        own_s = relative * classes.baseline_s
    assigned = Assigned(
        slo_class=name if name in classes.targets else DEFAULT_CLASS,
        prompt_tokens=_prompt_tokens(fields),
        arrival_s=now,
        tpot_slo_s=tpot_s if own_s is None else own_s,
        ttft_slo_s=ttft_s if (own := _seconds(fields.get("slo_ttft_ms"))) is None else own,
    )
    return Wanted(assigned, min(_prompts(fields) * _count(fields.get("n")), MOST_CHOICES), fields.get("stream") is True)


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
    return float(value) if ok else None


def _seconds(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else number / 1e3


def _count(value: Any) -> int:
    return min(value, MOST_CHOICES) if isinstance(value, int) and value > 0 else 1


def _prompts(fields: Mapping[str, Any]) -> int:
    prompt = fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def _prompt_tokens(fields: Mapping[str, Any]) -> int:
    return max(_tokens(fields.get("messages") if "messages" in fields else fields.get("prompt")), 1)


def _tokens(value: Any) -> int:
    """About how many tokens: ids are counted, text is divided."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return len(value)
        return sum(map(_tokens, value))
    if isinstance(value, dict):
        return _tokens(value.get("content", value.get("text")))
    return 0
