"""Steps of an executor whose draft is a head: two texts that prefill, and a draft that is fed and searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.types import CandidateTrees, DraftPlan, StepPlan
from tests.engines import compile_only
from tests.oracles.eagle3 import Head
from tests.oracles.mtp import MtpLayer
from tests.plans import i32, packed_trees, step_plan

DEPTH, WIDTH = 4, 2
SMALL: dict[str, Any] = {
    "max_requests": 4, "max_context": 64, "page_size": 8, "num_pages": 32, "max_depth": DEPTH, "max_width": WIDTH,
    "max_tree_tokens": 16, "row_edges": (4,), "token_edges": (64,), "elastic": "off",
}  # fmt: skip
TEXTS = [np.random.default_rng(seed).integers(3, 300, length).astype(np.int32) for seed, length in ((1, 21), (2, 10))]
"""Prompts, and behind each the token that was drawn after it."""


@pytest.fixture(scope="module")
def executor(config: EngineConfig) -> Iterator[ModelExecutor]:
    """The engine of the file's fixture `config`."""
    executor = load_executor(config)
    compile_only(executor, lambda key: "resample" not in key and key[1:] != ("search", 4, 1))  # neither is run here
    yield executor
    assert executor.compiles_after_ready == 0
    executor.close()


def plan_step(
    known: list[int], *, prefill: list[np.ndarray] | None = None, fed: list[np.ndarray] | None = None,
    drafted: list[int] | None = None, first_page: int = 0,
) -> StepPlan:  # fmt: skip
    """A step of both texts: they prefill, or the draft is fed behind `drafted` tokens and then searched. known: tokens
    that the target has computed."""
    rows = len(TEXTS)
    table = first_page + np.arange(rows * 8, dtype=np.int32).reshape(rows, 8)
    draft = None
    if fed is not None:
        counts = np.array([len(each) for each in fed], np.int32)
        reaches = np.array([start + len(part) for start, part in zip(drafted or [], fed, strict=True)])
        speculates = (counts > 0) & (reaches == [len(text) for text in TEXTS])
        depth = DEPTH if speculates.any() else 0
        draft = DraftPlan(
            depth, WIDTH, np.concatenate(fed), counts, np.array(drafted, np.int32), speculates, calibrated=False
        )
    chunks = prefill or []
    decode = rows - len(chunks)
    return step_plan(
        decode, chunks, root_token=i32(text[-1] for text in TEXTS[:decode]), ctx_len=i32(known), page_table=table,
        prefill_final=np.ones(len(chunks), bool), draft=draft, tree_token_cap=16,
    )  # fmt: skip


NO_TREES = packed_trees([])


def prefill(executor: ModelExecutor, ends: list[list[int]], first_page: int = 0) -> None:
    """Compute both prompts in chunks that end at these tokens."""
    known = [0] * len(TEXTS)
    for stops in ends:
        chunks = [text[start:stop] for text, start, stop in zip(TEXTS, known, stops, strict=True)]
        executor.verify(plan_step(known, prefill=chunks, first_page=first_page), NO_TREES)
        known = stops


def searched(executor: ModelExecutor, ends: list[list[int]], fed: list[list[int]]) -> dict[int, CandidateTrees]:
    """Prefill both prompts, feed the draft up to these tokens, and return the result that has each row's tree."""
    prefill(executor, ends)
    found: dict[int, CandidateTrees] = {}
    drafted, known = [0, 0], [len(text) - 1 for text in TEXTS]
    for stops in fed:
        parts = [text[start:stop] for text, start, stop in zip(TEXTS, drafted, stops, strict=True)]
        plan = plan_step(known, fed=parts, drafted=drafted)
        candidates = executor.speculate(plan)
        assert plan.draft is not None
        found |= dict.fromkeys(np.flatnonzero(plan.draft.speculates).tolist(), candidates)
        drafted = stops
    return found


def check_tree(found: Any, row: int, head: Head | MtpLayer, root: np.ndarray) -> None:
    """Compare a tree with the oracle `head`, which was fed its row's text and returned `root` at last: each node's log
    probability, and that of the best child of every parent on the first level, agree."""
    assert (found.log_f[row] > -np.inf).sum() == DEPTH * WIDTH
    logits = {-1: head.logits(root)}
    fed = len(head.attention.keys)
    paths: dict[int, list[int]] = {-1: []}
    for node in range(DEPTH * WIDTH):
        token, parent = int(found.token[row][node]), int(found.parent[row][node])
        scores = logits[parent]
        assert abs(found.log_q[row][node] - (scores - np.logaddexp.reduce(scores))[token]) < 1e-4
        paths[node] = [*paths[parent], node]
        head.attention.forget(fed)
        feature = root
        for step in paths[node]:
            feature = head.step(int(found.token[row][step]), feature)
        logits[node] = head.logits(feature)
    best = np.argsort(-logits[-1])[:WIDTH]
    assert found.token[row][:WIDTH].tolist() == best.tolist()
