"""The request traces of AdaServe's artifact, and the same with each prompt stored once.

`adaserve`: one JSON array, each request with time, lengths, prompt and target. Source:
github.com/zikun-li/AdaServe-Artifact-Evaluation, exps/*/emission_*.json.

`adaserve-trace`: JSON lines of t_ms, prompt_id, slo_ratio, output_length and input_length. Prompts are read from files
beside the trace, prompts_<class>.jsonl or .jsonl.gz, lines of id and prompt; where a class has no such file, its
requests are known by their lengths only. `traces.save_trace` writes this format, without prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.types import NO_TARGET, SLO
from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

CLASS_OF_TPOT_MS = {50.0: "chat", 150.0: "summarization"}
"""The paper's classes by their absolute targets; a relative target is that of `RELATIVE_CLASS`."""
RELATIVE_CLASS = "code"
MOST_RATIO = 1e9


def _read_artifact(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for request in source.objects():
        slo, prompt = _target(request), request.string("prompt")
        yield gaps.item(
            prompt=prompt if gaps.texts else None,
            slo_class=_class_of(slo),
            slo=slo,
            arrival_s=request.seconds("emission_time_ms", per=1e3),
            lengths=_lengths(request),
        )


def _read_trace(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    prompts: dict[str, dict[str, str] | None] = {}
    for line in source.objects():
        prompt_id = line.string("prompt_id")
        name = prompt_id.rpartition("-")[0] or DEFAULT_CLASS  # "code-0096" is of class code
        if name not in prompts:
            prompts[name] = _prompts(source, name, gaps) if gaps.texts else None
        known = prompts[name]
        if known is not None and prompt_id not in known:
            raise line.fail("prompt_id", f"an id of the file of prompts of class {name}, beside this one")
        yield gaps.item(
            prompt=None if known is None else known[prompt_id],
            slo_class=name,
            slo=_target(line),
            arrival_s=line.seconds("t_ms", per=1e3),
            lengths=_lengths(line),
        )


def _target(request: Fields) -> SLO:
    """Read slo_ratio. Above 0: a multiple of the baseline latency; below 0: milliseconds per token; 0, or within
    NO_TARGET of it: no target."""
    ratio = request.number("slo_ratio", low=-MOST_RATIO, high=MOST_RATIO)
    if abs(ratio) <= NO_TARGET:
        return SLO()
    return SLO(relative=ratio) if ratio > 0 else SLO(tpot_ms=-ratio)


def _class_of(slo: SLO) -> str:
    """Return the paper's class of a target; any other absolute target is a class of its own."""
    if slo.tpot_ms is None:
        return DEFAULT_CLASS if slo.relative is None else RELATIVE_CLASS
    return CLASS_OF_TPOT_MS.get(slo.tpot_ms, f"tpot {slo.tpot_ms:g} ms")


def _lengths(request: Fields) -> Lengths:
    return Lengths(request.integer("input_length"), request.integer("output_length"))


def _prompts(source: Source, name: str, gaps: Gaps) -> dict[str, str] | None:
    """Return the prompts of a class by id, None if it has no file of them."""
    if source.folder is None or not name.replace("-", "").replace("_", "").isalnum():
        return None
    paths = (source.folder / f"prompts_{name}.jsonl{packed}" for packed in ("", ".gz"))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    prompts = Source.open(path)
    gaps.also_read.append(prompts.sha256)
    return {line.string("id"): line.string("prompt") for line in prompts.objects()}


FORMATS = (
    Format("adaserve", has_keys("emission_time_ms"), _read_artifact),
    Format("adaserve-trace", has_keys("t_ms"), _read_trace),
)
