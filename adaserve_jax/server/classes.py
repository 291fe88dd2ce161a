"""Named classes of service: the targets, the priority and the service tiers that a request gets by naming one.

Knows no request and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO

DEFAULT_CLASS = "default"
USUAL_TIERS = {"auto": DEFAULT_CLASS, "default": DEFAULT_CLASS, "priority": "interactive", "flex": "batch"}
"""OpenAI's service tiers, and the classes that they stand for where no class answers to them."""
MAX_PRIORITY = 2**31


@dataclass(frozen=True)
class SloClass:
    """What requests of one class get, where they say nothing themselves. Each field's text is in CLASS_HELP.

    Raises ConfigError.
    """

    name: str
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    priority: int = 0
    service_tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"name must be letters, digits and _, not beginning with a digit, got {self.name!r}")
        try:
            SLO(self.tpot_ms, self.ttft_ms)
        except RequestError as error:
            raise ConfigError(str(error).removeprefix("slo_")) from error
        if abs(self.priority) >= MAX_PRIORITY:
            raise ConfigError(f"priority must be an integer of less than 32 bits, got {self.priority}")

    @classmethod
    def from_text(cls, text: str) -> SloClass:
        """Of the short form name=tpot_ms[:ttft_ms], as `--slo-classes` has it. Raises ConfigError."""
        name, found, targets = text.partition("=")
        tpot, _, ttft = targets.partition(":")
        try:
            if not found:
                raise ValueError(text)
            return cls(name, float(tpot) if tpot else None, float(ttft) if ttft else None)
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                "slo_classes must be like name=tpot_ms or name=tpot_ms:ttft_ms, with nothing where there is no "
                f"target, got {text!r}"
            ) from error


def tiers_of(classes: Iterable[SloClass]) -> dict[str, str]:
    """The class that each service tier stands for. Raises ConfigError when two classes answer to one tier."""
    tiers: dict[str, str] = {}
    for one in classes:
        for tier in one.service_tiers:
            if tiers.setdefault(tier, one.name) != one.name:
                raise ConfigError(f"service_tiers: {tier!r} must belong to one class, got {tiers[tier]} and {one.name}")
    return USUAL_TIERS | tiers


CLASS_HELP: dict[str, str] = {
    "name": "what `slo_class` of a request says; `default` is the class of requests that name none",
    "tpot_ms": "TPOT target, milliseconds per token; none: no such target",
    "ttft_ms": "TTFT target, milliseconds; none: no such target",
    "priority": "of requests that bring none; lower is sooner",
    "service_tiers": "values of `service_tier` that stand for this class; unless some class has them, auto and default "
    "stand for default, priority for interactive, flex for batch",
}
