"""The requests of benchmarks/adaserve/validation.py: AdaServe's, scaled to a small machine, as workload and trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import TraceRequest
from adaserve_jax.workloads.traces import Trace, load_trace
from adaserve_jax.workloads.workload import Workload, WorkloadItem

PROMPT_PARTS = 13
"""A prompt keeps one of so many of its tokens."""
PAPER_BASELINE_S = 0.030
"""What AdaServe's absolute targets, and the TTFT target, are scaled by."""
TTFT_SLO_S = 4.0


@dataclass(frozen=True)
class Asked:
    """One request. due_s: in the trace's own time."""

    due_s: float
    item: WorkloadItem
    prompt_tokens: int
    output_tokens: int

    def measured(self, prompt_ids: Sequence[int]) -> Asked:
        """With the prompt's length as the engine has it."""
        return replace(self, prompt_tokens=len(prompt_ids))


def asked_requests(
    folder: Path, name: str, *, count: int, new_tokens: int, baseline_s: float, temperature: float
) -> list[Asked]:
    """The first `count` of a trace, with the beginnings of their prompts. baseline_s: of the machine, which all targets
    are scaled to."""
    path = folder / f"{name}.jsonl.gz"
    trace = load_trace(path)
    with gzip.open(path, "rt") as file:
        ids = [values["prompt_id"] for values in sorted(map(json.loads, file), key=lambda values: values["t_ms"])]
    texts = _texts(folder)
    tokenizer = Tokenizer.from_folder(resolve_folder("demo", "target"))
    scale = baseline_s / PAPER_BASELINE_S
    asked = []
    for request, prompt_id in list(zip(trace.requests, ids, strict=True))[:count]:
        kept = tokenizer.encode(texts[prompt_id])[: max(1, round(request.prompt_tokens / PROMPT_PARTS))]
        tpot_s = request.slo.tpot_s(PAPER_BASELINE_S)
        assert tpot_s is not None
        slo = SLO(tpot_ms=tpot_s * scale * 1e3, ttft_ms=TTFT_SLO_S * scale * 1e3)
        prompt = tokenizer.decode(kept) or " "
        item = WorkloadItem(prompt, (), new_tokens, request.slo_class, slo, temperature, None, None)
        asked.append(Asked(request.due_s, item, len(kept), new_tokens))
    return asked


def as_workload(asked: Sequence[Asked], rate_rps: float) -> Workload:
    """With arrivals at a mean rate."""
    scale = len(asked) / asked[-1].due_s / rate_rps
    items = tuple(replace(each.item, arrival_s=each.due_s * scale) for each in asked)
    return Workload(f"first {len(asked)} at {rate_rps:g}/s", "", items)


def as_trace(asked: Sequence[Asked]) -> Trace:
    """As the simulator takes it."""
    requests = [
        TraceRequest(each.due_s, each.prompt_tokens, each.output_tokens, each.item.slo, each.item.slo_class)
        for each in asked
    ]
    return Trace(f"first {len(asked)}", "", tuple(requests))


def _texts(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("prompts_*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            texts |= {values["id"]: values["prompt"] for values in map(json.loads, file)}
    if not texts:
        raise ConfigError(f"{folder} has no prompts_*.jsonl.gz; give the folder of AdaServe's traces")
    return texts
