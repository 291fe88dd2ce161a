"""GSM8K: JSON lines of question and answer; the question is the prompt. Class math, no target, no time.

Source: github.com/openai/grade-school-math, grade_school_math/data/.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Source


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        yield gaps.item(prompt=line.string("question"), slo_class="math")


FORMAT = Format("gsm8k", has_keys("question", "answer"), read)
