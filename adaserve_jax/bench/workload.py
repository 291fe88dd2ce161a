"""Reads workloads of every known format, and the packaged one. Knows nothing of engines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from adaserve_jax.bench.readers import AUTO, find_format, left_out_notes
from adaserve_jax.bench.readers.format import Gaps
from adaserve_jax.bench.readers.jsonl import MAX_TEMPERATURE
from adaserve_jax.bench.readers.source import Source
from adaserve_jax.bench.slo_table import SloTable
from adaserve_jax.bench.workload_items import Lengths, Message, Workload, WorkloadItem, derived_hash
from adaserve_jax.errors import ConfigError

__all__ = ["PACKAGED", "Lengths", "Message", "Workload", "WorkloadItem", "load_workload"]

PACKAGED = "packaged"


def load_workload(
    path: Path | None = None, *, format: str = AUTO, slos: SloTable | None = None, max_tokens: int | None = None,
    temperature: float | None = None, slo_class: str | None = None, texts: bool = True,
) -> Workload:  # fmt: skip
    """Read `path`, plain or .gz, or the packaged workload without one.

    format: a name of `readers.FORMATS`, or "auto". slos: targets by class. max_tokens and temperature: of requests that
    do not say. slo_class: of all requests, in place of the format's. texts: whether prompts that a format keeps in
    other files are read. What is given here is in the workload's name and hash.

    Raises ConfigError naming file, line and field.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max tokens must be at least 1, got {max_tokens}")
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise ConfigError(f"temperature must be from 0 to {MAX_TEMPERATURE:g}, got {temperature}")
    source = Source(PACKAGED, PACKAGED, _packaged_bytes(), None) if path is None else Source.open(path)
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
    for note in _notes(gaps):
        workload = workload.derived(note, workload.items)
    if slos is not None:
        workload = workload.derived(f"targets {slos.text}", slos.apply(workload.items, workload.name))
    return workload


def _notes(gaps: Gaps) -> list[str]:
    given = (("class", gaps.slo_class), ("max tokens", gaps.max_tokens), ("temperature", gaps.temperature))
    return [f"{name} {value}" for name, value in given if value is not None]


def _packaged_bytes() -> bytes:
    return files("adaserve_jax.bench").joinpath("data/workload.jsonl").read_bytes()
