"""The targets, the class and the priority that a request gets: its own, else its class's, within all limits.

Raises RequestError that names the field. Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adaserve_jax.errors import RequestError
from adaserve_jax.server.classes import DEFAULT_CLASS, SloClass
from adaserve_jax.server.keys import KeySettings
from adaserve_jax.server.protocol import GenerationBody
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO


@dataclass(frozen=True)
class Targets:
    """What the engine is told. slo_class: the class's name. priority: lower is sooner."""

    slo: SLO
    slo_class: str
    priority: int


def targets_of(
    body: GenerationBody,
    settings: ServerSettings,
    classes: Mapping[str, SloClass],
    baseline_s: float,
    limits: KeySettings | None = None,
) -> Targets:
    """The targets in force.

    baseline_s: seconds, what `slo_relative` multiplies. limits: of the key that the request came with. Raises
    RequestError(code="invalid_slo").
    """
    default = _class_of(body, settings, classes, limits)
    own = SLO(body.slo_tpot_ms, body.slo_ttft_ms, body.slo_relative)
    tpot_ms, relative, ttft_ms = own.tpot_ms, own.relative, own.ttft_ms
    if tpot_ms is None and relative is None:
        tpot_ms = default.tpot_ms
    if ttft_ms is None:
        ttft_ms = default.ttft_ms
    low, high = settings.min_slo_tpot_ms, settings.max_slo_tpot_ms
    ttft_low = settings.min_slo_ttft_ms
    if limits is not None:
        low, ttft_low = max(low, limits.min_slo_tpot_ms), max(ttft_low, limits.min_slo_ttft_ms)
    if relative is not None and not low <= relative * baseline_s * 1e3 <= high:
        tpot_ms, relative = relative * baseline_s * 1e3, None
    slo = SLO(_clamp(tpot_ms, low, high), _clamp(ttft_ms, ttft_low, settings.max_slo_ttft_ms), relative)
    return Targets(slo, default.name, _priority(body, default, limits))


def _class_of(
    body: GenerationBody, settings: ServerSettings, classes: Mapping[str, SloClass], limits: KeySettings | None
) -> SloClass:
    name = body.slo_class
    if name is None and body.service_tier is not None:
        name = settings.tiers().get(body.service_tier, body.service_tier)
    allowed = sorted(classes)
    if limits is not None and limits.slo_classes:
        allowed = list(limits.slo_classes)
        if body.slo_class is None and name in (None, DEFAULT_CLASS):
            name = allowed[0]
    name = DEFAULT_CLASS if name is None else name
    if name not in allowed:
        param = "slo_class" if body.slo_class is not None else "service_tier"
        raise RequestError(
            f"{param} must be one of {', '.join(allowed)}, got {name!r}", param=param, code="invalid_slo"
        )
    return classes[name]


def _priority(body: GenerationBody, default: SloClass, limits: KeySettings | None) -> int:
    priority = default.priority if body.priority is None else body.priority
    if limits is None or limits.min_priority is None:
        return priority
    return max(priority, limits.min_priority)


def _clamp(value: float | None, low: float, high: float) -> float | None:
    """`value` within the limits; the lower one wins where a key's is above the server's upper one."""
    return None if value is None else max(min(value, high), low)
