"""Reads workloads of every known format, and the packaged one. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest, Workload, WorkloadItem, derived_hash
from adaserve_jax.workloads.readers import AUTO, find_format, left_out_notes
from adaserve_jax.workloads.readers.format import Gaps
from adaserve_jax.workloads.readers.jsonl import MAX_TEMPERATURE
from adaserve_jax.workloads.readers.source import Source

Targeted = TypeVar("Targeted", WorkloadItem, TraceRequest)
OTHERS = "*"
"""In the place of a class: requests that carry no target and whose class is not named."""
NONE = "none"
_FIELDS = {"tpot": "tpot_ms", "ttft": "ttft_ms", "relative": "relative", "e2e": "e2e_ms"}
EXAMPLE = "code:relative=1.2,ttft=4000;chat:e2e=8000;*:tpot=100"


@dataclass(frozen=True)
class SloTable:
    """by_class: target of every request of a class, in place of what it carries. others: of the rest, where they carry
    none; None: those stay as they are. text: as `parse_slos` read it."""

    by_class: tuple[tuple[str, SLO], ...]
    others: SLO | None
    text: str

    def apply(self, items: Iterable[WorkloadItem], name: str) -> list[WorkloadItem]:
        """Return the items with their targets. Raises ConfigError for a class that workload `name` does not have."""
        items = list(items)
        targets, present = dict(self.by_class), {item.slo_class for item in items}
        unknown = sorted(targets.keys() - present)
        if unknown:
            raise ConfigError(f"slos: workload {name} has no class {unknown[0]!r}; it has {', '.join(sorted(present))}")
        return [replace(item, slo=self._target(item, targets)) for item in items]

    def _target(self, item: WorkloadItem, targets: dict[str, SLO]) -> SLO:
        if item.slo_class in targets:
            return targets[item.slo_class]
        return self.others if self.others is not None and item.slo == SLO() else item.slo


def with_relative(requests: Sequence[Targeted], scale: float, what: str) -> list[Targeted]:
    """Set the relative TPOT targets of the requests that have one to `scale` baseline latencies.

    Raises ConfigError when none of `what` has one, or `scale` cannot be a target.
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
    """Parse classes apart by ";", each "class:field=number,...": tpot, ttft and e2e in milliseconds, relative in
    baseline latencies; "class:none": no target. Class "*" is for requests that carry no target.

    Raises ConfigError naming the part at fault.
    """
    targets: dict[str, SLO] = {}
    for part in text.split(";"):
        name, colon, fields = part.strip().partition(":")
        name = name.strip()
        if not (colon and name and fields.strip()):
            raise ConfigError(f"slos: expected class:field=number such as {EXAMPLE}, got {part.strip()!r}")
        if name in targets:
            raise ConfigError(f"slos: class {name!r} is named twice; say all its targets once, apart by commas")
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
                f"slos: class {name}: expected each of {', '.join(_FIELDS)} at most once, or {NONE}, got {part!r}"
            )
        try:
            values[_FIELDS[field]] = float(number)
        except ValueError as error:
            raise ConfigError(
                f"slos: class {name}: {field}: expected a number, got {number!r}; no target at all is {name}:{NONE}"
            ) from error
    try:
        return SLO(**values)
    except RequestError as error:
        raise ConfigError(f"slos: class {name}: {error}") from error


PACKAGED = "packaged"


def load_workload(
    path: Path | None = None, *, format: str = AUTO, slos: SloTable | None = None, max_tokens: int | None = None,
    temperature: float | None = None, slo_class: str | None = None, texts: bool = True,
) -> Workload:  # fmt: skip
    """Read `path`, plain or .gz, or the packaged workload without one.

    format: a name of `readers.FORMATS`, or "auto". slos: targets by class. max_tokens and temperature: of requests that
    do not say. slo_class: of all requests, in place of the format's. texts: False leaves out the prompts of
    requests that have lengths. What is given here is in the workload's name and hash.

    Raises ConfigError naming file, line and field.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max tokens must be at least 1, got {max_tokens}")
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise ConfigError(f"temperature must be from 0 to {MAX_TEMPERATURE:g}, got {temperature}")
    if path is None:
        packaged = files("adaserve_jax.workloads").joinpath("data/workload.jsonl")
        source = Source(PACKAGED, PACKAGED, packaged.read_bytes(), None)
    else:
        source = Source.open(path)
    gaps = Gaps(max_tokens, temperature, slo_class or None, texts)
    items = tuple(find_format(format, source).read(source, gaps))
    if not items:
        raise ConfigError(f"workload {source.place} holds no request")
    with_times = sum(item.arrival_s is not None for item in items)
    if with_times not in (0, len(items)):
        raise ConfigError(
            f"workload {source.place}: arrival_s must be on every line or on none, got {with_times} of {len(items)}"
        )
    sha256 = derived_hash(source.sha256, " ".join(gaps.also_read)) if gaps.also_read else source.sha256
    workload = Workload(source.name, sha256, items, left_out_notes(gaps.left_out))
    for name, value in (("class", gaps.slo_class), ("max tokens", max_tokens), ("temperature", temperature)):
        if value is not None:
            workload = workload.derived(f"{name} {value}", workload.items)
    if slos is not None:
        workload = workload.derived(f"targets {slos.text}", slos.apply(workload.items, workload.name))
    return workload
