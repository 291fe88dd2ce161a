"""Warm-up times steps whose tokens are as varied as those of texts: equal ones would reach the same few experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from adaserve_jax.runtime.compile import BucketSet
from adaserve_jax.runtime.warmup import WARM_UP, measure
from adaserve_jax.types import DraftTrees, Limits, StepPlan

VOCABULARY = 4096
LIMITS = Limits(
    max_requests=8, token_edges=(4, 64, 256), max_tree_tokens=64, max_context=1024, page_size=16, num_pages=64,
    max_depth=0, max_width=0,
)  # fmt: skip


class Recorder:
    """An executor that keeps the tokens of each step that it is asked to verify, i32[tokens]."""

    local_drafter, draft_resident, limits = None, False, LIMITS

    def __init__(self) -> None:
        self.steps: list[np.ndarray] = []
        self.target: Any = SimpleNamespace(
            buckets=BucketSet(LIMITS.token_edges, (1, 8), 64), config=SimpleNamespace(vocab_size=VOCABULARY)
        )
        config = SimpleNamespace(deterministic=False, lora_slots=0)
        self.resolved: Any = SimpleNamespace(config=config, attention="cpu", limits=LIMITS)

    def verify(self, plan: StepPlan, trees: DraftTrees) -> Any:
        self.steps.append(np.concatenate([trees.token, plan.prefill_tokens]))


def test_tokens_are_drawn_from_the_whole_vocabulary() -> None:
    recorder = Recorder()
    timings = measure(recorder, WARM_UP)
    assert {tokens for tokens, _, _ in timings.verify} == set(LIMITS.token_edges)
    by_size = {len(tokens): tokens for tokens in recorder.steps}
    assert set(by_size) == set(LIMITS.token_edges)
    for size, tokens in by_size.items():
        assert len(set(tokens)) > 0.9 * size
        assert tokens.min() >= 0 and tokens.max() < VOCABULARY
    assert np.ptp(by_size[256]) > 0.9 * VOCABULARY


def test_the_tokens_of_a_size_do_not_change() -> None:
    """Else the least time of several would be that of the tokens with the fewest experts."""
    recorder = Recorder()
    measure(recorder, WARM_UP)
    measure(recorder, WARM_UP)
    for size in LIMITS.token_edges:
        whole_trees = {tokens.tobytes() for tokens in recorder.steps if len(tokens) == size}
        assert len(whole_trees) <= 2, "one for each number of rows"
