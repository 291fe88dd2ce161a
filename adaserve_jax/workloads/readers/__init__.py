"""Readers of workload files, found by name or by what a file's first request looks like."""

from __future__ import annotations

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.readers import adaserve, jsonl, length_traces, openai_batch, prompt_sets
from adaserve_jax.workloads.readers.format import Format
from adaserve_jax.workloads.readers.source import Source

AUTO = "auto"
_FORMATS = {
    each.name: each
    for each in (
        jsonl.FORMAT, *adaserve.FORMATS, *prompt_sets.FORMATS, openai_batch.FORMAT, *length_traces.FORMATS,
    )
}  # fmt: skip
FORMATS = tuple(_FORMATS)


def find_format(name: str, source: Source) -> Format:
    """Return the format of that name; "auto": the one that the file's first request matches. Raises ConfigError when
    none or several match."""
    if name != AUTO:
        if name not in _FORMATS:
            raise ConfigError(f"no workload format {name!r}; give {AUTO} or one of {', '.join(FORMATS)}")
        return _FORMATS[name]
    if source.begin == len(source.text):
        raise ConfigError(f"workload {source.place} holds no request")
    keys = source.keys()
    fitting = [each for each in _FORMATS.values() if each.detects(source, keys)]
    fitting = [each for each in fitting if not each.only_alone] or fitting
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(each.name for each in fitting)
    fields = ", ".join(sorted(keys))[:200].encode(errors="replace").decode() or "no fields"
    said = f"looks like several formats ({found})" if fitting else "looks like no known format"
    raise ConfigError(
        f"workload {source.place} {said}: its first request has {fields}; say --format, one of {', '.join(FORMATS)}"
    )


def left_out_notes(left_out: dict[str, int]) -> tuple[str, ...]:
    """Return one sentence for each thing that a file says and that is not replayed."""
    return tuple(f"left out: {count} {what}" for what, count in sorted(left_out.items()) if count)
