"""Public sets of prompts, as JSON lines or arrays: no target, no time.

Sources: HumanEval, github.com/openai/human-eval, data/HumanEval.jsonl.gz. GSM8K,
github.com/openai/grade-school-math, grade_school_math/data/. Alpaca, github.com/tatsu-lab/stanford_alpaca,
alpaca_data.json. Spec-Bench, github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl. SPEED-Bench,
huggingface.co/datasets/nvidia/SPEED-Bench, its parquet files as JSON lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from adaserve_jax.errors import ConfigError
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.readers.format import Format, Gaps, has_keys
from adaserve_jax.workloads.readers.source import Fields, Source

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of Spec-Bench that are one class, as in its own tables."""


NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""Beginning of a turn of SPEED-Bench whose text its owners do not let others publish."""


def _read_humaneval(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        line.string("task_id")
        yield gaps.item(prompt=line.string("prompt"), slo_class="code")


def _read_gsm8k(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    for line in source.objects():
        yield gaps.item(prompt=line.string("question"), slo_class="math")


def _read_spec_bench(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    """Read first turns. Later ones build on a model's answer, which a replay at fixed times cannot wait for."""
    for line in source.objects():
        category = line.string("category")
        turns = _turns(line)
        gaps.left_out["later turns of conversations"] += len(turns) - 1
        yield gaps.item(prompt=turns[0], slo_class="mt_bench" if category in MT_BENCH else category)


def _read_speed_bench(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    """Read first turns, as of Spec-Bench, without those that are still to be fetched. Raises ConfigError if all are."""
    found = False
    for line in source.objects():
        turns = _turns(line)
        if turns[0].startswith(NOT_FETCHED):
            gaps.left_out["prompts that SPEED-Bench's prepare.py has yet to fetch"] += 1
            continue
        found = True
        gaps.left_out["later turns of conversations"] += len(turns) - 1
        yield gaps.item(prompt=turns[0], slo_class=line.string("category"))
    if not found:
        raise ConfigError(
            f"workload {source.place}: every prompt is still to be fetched; run SPEED-Bench's prepare.py on it first"
        )


def _turns(line: Fields) -> list[str]:
    turns = line.values.get("turns")
    if not isinstance(turns, list) or not turns:
        raise line.fail("turns", "a non-empty list of texts")
    named = Fields({f"turns[{number}]": turn for number, turn in enumerate(turns)}, line.where)
    return [named.string(name) for name in named.values]


def _read_alpaca(source: Source, gaps: Gaps) -> Iterator[WorkloadItem]:
    """Read instructions, each with its input below an empty line, as in AdaServe's traces."""
    for line in source.objects():
        more = line.text("input", required=False, empty=True)
        instruction = line.string("instruction")
        yield gaps.item(prompt=f"{instruction}\n\n{more}" if more else instruction, slo_class="chat")


FORMATS = (
    Format("humaneval", has_keys("task_id", "prompt"), _read_humaneval),
    Format("gsm8k", has_keys("question", "answer"), _read_gsm8k),
    Format("spec-bench", has_keys("category", "turns", without=("src_id",)), _read_spec_bench),
    Format("speed-bench", has_keys("category", "turns", "src_id"), _read_speed_bench),
    Format("alpaca", has_keys("instruction"), _read_alpaca),
)
