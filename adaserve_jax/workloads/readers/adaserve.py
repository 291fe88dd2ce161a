"""The request traces of AdaServe's artifact: one JSON array, each request with time, lengths, prompt and target.

Source: github.com/zikun-li/AdaServe-Artifact-Evaluation, exps/*/emission_*.json.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, WorkloadItem
from adaserve_jax.workloads.readers.format import DEFAULT_CLASS, Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

CLASS_OF_TPOT_MS = {50.0: "chat", 150.0: "summarization"}
"""The paper's classes by their absolute targets; a relative target is that of `RELATIVE_CLASS`."""
RELATIVE_CLASS = "code"
MOST_RATIO = 1e9


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for request in source.objects():
        slo = target_of(request)
        yield gaps.item(
            prompt=request.string("prompt"),
            slo_class=class_of(slo),
            slo=slo,
            arrival_s=request.seconds("emission_time_ms", per=1e3),
            lengths=lengths_of(request),
        )


def target_of(request: Fields) -> SLO:
    """slo_ratio above 0: a multiple of the baseline latency; below 0: milliseconds per token; 0: no target."""
    ratio = request.number("slo_ratio", low=-MOST_RATIO, high=MOST_RATIO)
    if not ratio:
        return SLO()
    return SLO(relative=ratio) if ratio > 0 else SLO(tpot_ms=-ratio)


def class_of(slo: SLO) -> str:
    """Return the paper's class of a target; any other absolute target is a class of its own."""
    if slo.tpot_ms is None:
        return DEFAULT_CLASS if slo.relative is None else RELATIVE_CLASS
    return CLASS_OF_TPOT_MS.get(slo.tpot_ms, f"tpot {slo.tpot_ms:g} ms")


def lengths_of(request: Fields) -> Lengths:
    return Lengths(request.integer("input_length"), request.integer("output_length"))


FORMAT = Format("adaserve", has_keys("emission_time_ms"), read)
