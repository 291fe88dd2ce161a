"""HumanEval: JSON lines of task_id, prompt and more; the prompt is code to complete. Class code, no target, no time.

Source: github.com/openai/human-eval, data/HumanEval.jsonl.gz.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Source


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        line.string("task_id")
        yield gaps.item(prompt=line.string("prompt"), slo_class="code")


FORMAT = Format("humaneval", has_keys("task_id", "prompt"), read)
