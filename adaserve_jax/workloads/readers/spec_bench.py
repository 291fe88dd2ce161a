"""Spec-Bench: JSON lines of question_id, category and turns. The first turn is the prompt; no target, no time.

Later turns build on a model's answer to the first, which a replay at fixed times cannot wait for: they are left out,
and the workload's notes count them. The eight categories of MT-bench are one class, as in Spec-Bench's own tables.
Source: github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def read(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        category = line.string("category")
        turns = _turns(line)
        gaps.left_out["later turns of conversations"] += len(turns) - 1
        yield gaps.item(prompt=turns[0], slo_class="mt_bench" if category in MT_BENCH else category)


def _turns(line: Fields) -> list[str]:
    turns = line.values.get("turns")
    if not isinstance(turns, list) or not turns:
        raise line.fail("turns", "a non-empty list of texts")
    named = Fields({f"turns[{number}]": turn for number, turn in enumerate(turns)}, line.where)
    return [named.string(name) for name in named.values]


FORMAT = Format("spec-bench", has_keys("category", "turns"), read)
