"""Plans of steps and trees for tests. What a test does not give is zero, greedy and without a draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from adaserve_jax.sampling import RowSampling
from adaserve_jax.types import DraftTrees, StepPlan


def i32(values: Iterable[int]) -> np.ndarray:
    return np.array([*values], np.int32)


def step_plan(num_decode: int, chunks: Sequence[Sequence[int] | np.ndarray] = (), **given: Any) -> StepPlan:
    """Return a step of so many decode rows and a prefill row for each chunk. given: fields of `StepPlan`."""
    rows = num_decode + len(chunks)
    fields: dict[str, Any] = {
        "step": 0, "slots": i32(range(rows)), "num_decode": num_decode, "root_token": i32([0] * num_decode),
        "ctx_len": i32([0] * rows), "page_table": np.zeros((rows, 1), np.int32), "sampling": RowSampling.greedy(rows),
        "prefill_tokens": i32(token for chunk in chunks for token in chunk), "prefill_counts": i32(map(len, chunks)),
        "prefill_final": np.zeros(len(chunks), bool), "draft": None, "tree_token_cap": 64,
    }  # fmt: skip
    return StepPlan(**fields | given)


def trees_of(rows: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> DraftTrees:
    """Return packed trees by the row, token and parent of each node; -1: it is a root."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return DraftTrees(*map(i32, (rows, tokens, parents, depth)), i32(depth) - 1, np.ones(len(tokens), np.float32))


def packed_trees(trees: Iterable[tuple[Sequence[int], Sequence[int]]]) -> DraftTrees:
    """Return the trees of decode rows, each of tokens and parents within itself."""
    rows, tokens, parents = [], [], []
    for row, (own, above) in enumerate(trees):
        start = len(tokens)
        rows += [row] * len(own)
        tokens += own
        parents += [-1 if parent < 0 else start + parent for parent in above]
    return trees_of(rows, tokens, parents)
