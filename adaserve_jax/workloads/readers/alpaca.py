"""Alpaca: a JSON array or JSON lines of instruction, input and output. Class chat, no target, no time.

The prompt is the instruction and, below an empty line, the input where there is one, as in AdaServe's traces.
Source: github.com/tatsu-lab/stanford_alpaca, alpaca_data.json.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Source


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        more = line.text("input", required=False, empty=True)
        instruction = line.string("instruction")
        yield gaps.item(prompt=f"{instruction}\n\n{more}" if more else instruction, slo_class="chat")


FORMAT = Format("alpaca", has_keys("instruction"), read)
