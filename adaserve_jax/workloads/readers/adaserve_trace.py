"""AdaServe's traces with each prompt stored once.

JSON lines of t_ms, prompt_id, slo_ratio, output_length and input_length.

Prompts are read from files beside the trace, prompts_<class>.jsonl or .jsonl.gz, lines of id and prompt; where a class
has no such file, its requests are known by their lengths only. `traces.save_trace` writes this format, without prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.adaserve import lengths_of, target_of
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Source

PROMPTS = ("prompts_{}.jsonl", "prompts_{}.jsonl.gz")


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    prompts: dict[str, dict[str, str] | None] = {}
    for line in source.objects():
        prompt_id = line.string("prompt_id")
        name = class_of(prompt_id)
        if name not in prompts:
            prompts[name] = _prompts(source, name, gaps) if gaps.texts else None
        known = prompts[name]
        if known is not None and prompt_id not in known:
            raise line.fail("prompt_id", f"an id of the file of prompts of class {name}, beside this one")
        yield gaps.item(
            prompt=None if known is None else known[prompt_id],
            slo_class=name,
            slo=target_of(line),
            arrival_s=line.seconds("t_ms", per=1e3),
            lengths=lengths_of(line),
        )


def class_of(prompt_id: str) -> str:
    """Return what stands before the last dash: "code-0096" is of class code."""
    return prompt_id.rpartition("-")[0] or DEFAULT_CLASS


def _prompts(source: Source, name: str, gaps: Gaps) -> dict[str, str] | None:
    path = _file_of(source, name)
    if path is None:
        return None
    prompts = Source.open(path)
    gaps.also_read.append(prompts.sha256)
    return {line.string("id"): line.string("prompt") for line in prompts.objects()}


def _file_of(source: Source, name: str) -> Path | None:
    if source.folder is None or not name.replace("-", "").replace("_", "").isalnum():
        return None
    found = (source.folder / pattern.format(name) for pattern in PROMPTS)
    return next((path for path in found if path.is_file()), None)


FORMAT = Format("adaserve-trace", has_keys("t_ms"), read)
