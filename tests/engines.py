"""Options of small engines that several files share, so that what one compiles the others find in the compile cache;
and an executor that compiles only what a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.runtime import executor as executor_module
from adaserve_jax.runtime.compile import compile_all
from adaserve_jax.runtime.executor import ModelExecutor

DEMO: dict[str, Any] = {
    "max_requests": 16, "max_context": 512, "page_size": 16, "num_pages": 64, "max_depth": 4, "max_width": 3,
    "max_tree_tokens": 64, "token_edges": (16, 64), "row_edges": (16,), "elastic": "off",
}  # fmt: skip
"""The embedded pair, with so few pages that a full load preempts."""
PLAIN: dict[str, Any] = DEMO | {"draft": None}
"""The target of the embedded pair alone, by the same programs."""
EXACT: dict[str, Any] = {
    "deterministic": True, "max_requests": 8, "max_context": 128, "page_size": 16, "num_pages": 64,
    "max_batch_tokens": 32, "max_depth": 4, "max_width": 3,
}  # fmt: skip
"""The embedded pair in deterministic mode."""
NARROW: dict[str, Any] = EXACT | {"max_depth": 2, "max_width": 1}
"""The same texts from fewer programs to search with."""
TINY: dict[str, Any] = {
    "max_requests": 8, "max_context": 64, "page_size": 8, "num_pages": 64, "max_depth": 2, "max_width": 1,
    "max_tree_tokens": 16, "row_edges": (8,), "token_edges": (32,), "elastic": "off",
}  # fmt: skip
"""Checkpoints of `write_checkpoint`."""


def compile_only(executor: ModelExecutor, wanted: Callable[[tuple[Any, ...]], bool]) -> None:
    """Compile the programs whose keys are wanted; to run another is a KeyError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            executor_module, "compile_all",
            lambda declared, progress: compile_all([each for each in declared if wanted(each.key)], progress),
        )  # fmt: skip
        executor.compile()


def seeded_texts(
    llm: LLM, prompts: list[str], temperature: float, tokens: int, *, seed: int = 0, **changes: Any
) -> list[list[int]]:
    """Return the tokens of each prompt's choices, with seeds from `seed` on. The target is hard to meet, so that
    `adaserve` spends its budget on trees."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=each, ignore_eos=True, **changes)
        for each in range(seed, seed + len(prompts))
    ]
    outputs = llm.generate(prompts, params, slo=SLO(tpot_ms=0.5))
    return [choice.token_ids for output in outputs for choice in output.choices]
