"""Targets by class, for workloads that bring none: from a line such as "code:relative=1.2,ttft=4000;chat:tpot=50".

Knows no file format and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from adaserve_jax.bench.workload_items import WorkloadItem
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO

if TYPE_CHECKING:
    from adaserve_jax.bench.traces import TraceRequest

Targeted = TypeVar("Targeted", WorkloadItem, "TraceRequest")
OTHERS = "*"
"""In the place of a class: requests that carry no target and whose class is not named."""
NONE = "none"
_FIELDS = {"tpot": "tpot_ms", "ttft": "ttft_ms", "relative": "relative"}
EXAMPLE = "code:relative=1.2,ttft=4000;chat:tpot=50;*:tpot=100"


@dataclass(frozen=True)
class SloTable:
    """by_class: target of every request of a class, in place of what it carries. others: of the rest, where they carry
    none; None: those stay as they are. text: as `parse_slos` read it."""

    by_class: tuple[tuple[str, SLO], ...]
    others: SLO | None
    text: str

    def apply(self, items: Iterable[WorkloadItem], name: str) -> list[WorkloadItem]:
        """The items with their targets. Raises ConfigError: a class that workload `name` does not have."""
        items = list(items)
        targets, present = dict(self.by_class), {item.slo_class for item in items}
        unknown = sorted(targets.keys() - present)
        if unknown:
            raise ConfigError(
                f"targets: workload {name} has no class {unknown[0]!r}; it has {', '.join(sorted(present))}"
            )
        return [replace(item, slo=self._target(item, targets)) for item in items]

    def _target(self, item: WorkloadItem, targets: dict[str, SLO]) -> SLO:
        if item.slo_class in targets:
            return targets[item.slo_class]
        return self.others if self.others is not None and item.slo == SLO() else item.slo


def with_relative(requests: Sequence[Targeted], scale: float, what: str) -> list[Targeted]:
    """The requests, the relative TPOT targets of those that have one being `scale` baseline latencies.

    Raises ConfigError: none of `what` has one, or it cannot be a target.
    """
    if all(request.slo.relative is None for request in requests):
        raise ConfigError(f"SLO scale: {what} has no request whose target is relative to the baseline")
    try:
        return [
            request if request.slo.relative is None else replace(request, slo=replace(request.slo, relative=scale))
            for request in requests
        ]
    except RequestError as error:
        raise ConfigError(f"SLO scale: {error}") from error


def parse_slos(text: str) -> SloTable:
    """Classes apart by ";", each "class:field=number,...": tpot and ttft in milliseconds, relative in baseline
    latencies; "class:none": no target. Class "*" is for requests that carry no target.

    Raises ConfigError naming the part at fault.
    """
    targets: dict[str, SLO] = {}
    for part in text.split(";"):
        name, colon, fields = part.strip().partition(":")
        name = name.strip()
        if not (colon and name and fields.strip()):
            raise ConfigError(f"targets: expected class:field=number such as {EXAMPLE}, got {part.strip()!r}")
        if name in targets:
            raise ConfigError(f"targets: class {name!r} is named twice; say all its targets once, apart by commas")
        targets[name] = _slo(name, fields.strip())
    others = targets.pop(OTHERS, None)
    return SloTable(tuple(targets.items()), others, text.strip())


def _slo(name: str, text: str) -> SLO:
    if text == NONE:
        return SLO()
    values: dict[str, float] = {}
    for part in text.split(","):
        field, _, number = (piece.strip() for piece in part.partition("="))
        if field not in _FIELDS or _FIELDS[field] in values:
            raise ConfigError(
                f"targets: class {name}: expected each of {', '.join(_FIELDS)} at most once, or {NONE}, got {part!r}"
            )
        try:
            values[_FIELDS[field]] = float(number)
        except ValueError as error:
            raise ConfigError(f"targets: class {name}: {field}: expected a number, got {number!r}") from error
    try:
        return SLO(**values)
    except RequestError as error:
        raise ConfigError(f"targets: class {name}: {error}") from error
