"""What learning takes of a step: the target's log probabilities at chosen positions, and the weights of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import IntegrityError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.runtime.capture import row_edges
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.loading import plan_memory
from adaserve_jax.types import LogitEdits, StepPlan
from tests.engines import TINY
from tests.hlo import instructions
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits
from tests.plans import i32, packed_trees, step_plan

TAU, TOP = 1.5, 24
LEARNING = LearnConfig(learn_temperature=TAU, learn_top_k=TOP)
PROMPTS = [[5, 9, 300, 17, 40], [7, 7, 250], [310, 12, 13, 14, 15, 16]]
TREES = [([3, 11, 12, 13], [-1, 0, 1, 0]), ([19, 20], [-1, 0])]  # tokens and parents, root first
TOLERANCE = 1e-4  # of log probabilities in float32, of a model of two layers


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target")
    draft = write_checkpoint(folder / "draft", seed=1, num_hidden_layers=1)
    return EngineConfig(target=str(target), draft=str(draft), learning=LEARNING, **TINY)


@pytest.fixture(scope="module")
def executor(config: EngineConfig) -> Iterator[ModelExecutor]:
    executor = load_executor(config)
    executor.compile()
    yield executor
    assert executor.compiles_after_ready == 0
    executor.close()


def plan_of(contexts: list[int], chunks: list[list[int]], final: list[bool]) -> StepPlan:
    """Rows with pages of their own; the last len(chunks) of them prefill."""
    rows = len(contexts)
    table = np.zeros((rows, 8), np.int32)
    table[:, 0] = 1 + np.arange(rows)
    table[:, 1] = 9 + np.arange(rows)
    return step_plan(
        rows - len(chunks), chunks, ctx_len=i32(contexts), page_table=table, prefill_final=np.array(final, bool),
        tree_token_cap=16,
    )  # fmt: skip


def path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(tokens, parents, parents[node]), tokens[node]]


def expected_of(folder: str, texts: list[list[int]]) -> np.ndarray:
    """log_softmax(logits / TAU) after each text, f64[M, V], by the oracle."""
    scores = np.stack([oracle_logits(folder, text)[-1] for text in texts]) / TAU
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def check(rows: Any, log_p: np.ndarray) -> None:
    assert rows.ids.shape == rows.log_p.shape == (len(log_p), TOP) and rows.ids.dtype == np.int32
    np.testing.assert_allclose(rows.log_p, np.sort(log_p, axis=1)[:, ::-1][:, :TOP], atol=TOLERANCE)
    np.testing.assert_allclose(rows.log_p, np.take_along_axis(log_p, rows.ids, axis=1), atol=TOLERANCE)
    assert all(len(set(ids)) == TOP for ids in rows.ids.tolist())


def edits_of(rows: int, positions: int) -> LogitEdits:
    """All rows must say token 77."""
    nothing, zeros = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    return LogitEdits(
        nothing, nothing, nothing + 1, np.arange(rows), zeros + 77, zeros, zeros > 0, nothing + 1000.0, None,
        np.ones(positions, bool), zeros - 1,
    )  # fmt: skip


@pytest.mark.parametrize("edited", [False, True])
def test_captured_rows_are_those_of_the_oracle(executor: ModelExecutor, config: EngineConfig, edited: bool) -> None:
    """Ends of two prompts, then nodes of two trees and the end of the third prompt, which came in two parts; the raw
    logits, whatever a step makes of them."""
    first = plan_of([0, 0, 0], [PROMPTS[0], PROMPTS[1], PROMPTS[2][:4]], [True, True, False])
    executor.verify(first, packed_trees([]), edits_of(3, 2) if edited else None)
    check(executor.capture(np.array([1, 0])).collect(), expected_of(config.target, [PROMPTS[1], PROMPTS[0]]))
    second = plan_of([5, 3, 4], [PROMPTS[2][4:]], [True])
    outcome = executor.verify(second, packed_trees(TREES), edits_of(3, 7) if edited else None)
    assert not edited or (outcome.tokens[:, 0] == 77).all()
    pending = executor.capture(np.array([0, 2, 3, 5, 6]))
    again = executor.capture(np.arange(7))
    texts = [PROMPTS[0] + path(*TREES[0], node) for node in range(4)]
    texts += [PROMPTS[1] + path(*TREES[1], node) for node in range(2)] + [PROMPTS[2]]
    executor.verify(plan_of([0], [PROMPTS[0]], [True]), packed_trees([]))  # what is under way stays what it was
    check(pending.collect(), expected_of(config.target, [texts[node] for node in (0, 2, 3, 5, 6)]))
    check(again.collect(), expected_of(config.target, texts))


def test_every_number_of_rows_has_a_program(executor: ModelExecutor) -> None:
    assert row_edges(1) == (1,) and row_edges(8) == (8,) and row_edges(16) == (8, 16)
    assert row_edges(128) == (8, 32, 128) and row_edges(100) == (8, 32, 100)
    executor.verify(plan_of([0], [PROMPTS[0]], [True]), packed_trees([]))
    (alone,) = executor.capture(np.array([0])).collect().log_p
    for count in (0, 1, 8, 9, 16):
        rows = executor.capture(np.zeros(count, np.int32)).collect()
        assert rows.ids.shape == (count, TOP)
        np.testing.assert_allclose(rows.log_p, np.tile(alone, (count, 1)), atol=1e-6)


def test_what_cannot_be_captured_is_refused(executor: ModelExecutor) -> None:
    executor.verify(plan_of([0, 0], [PROMPTS[0], PROMPTS[1]], [True, False]), packed_trees([]))
    for wrong in ([1], [-1], [0, 1]):
        with pytest.raises(IntegrityError, match="positions must be from 0 to 0, got"):
            executor.capture(np.array(wrong))
    assert executor.logit_capture is not None
    executor.logit_capture.drop_logits()
    with pytest.raises(IntegrityError, match="logits are gone; capture between a verification and the next step"):
        executor.capture(np.array([0]))


def test_without_learning_nothing_is_there_to_capture(executor: ModelExecutor, config: EngineConfig) -> None:
    """No program more; with it, one more for each size and number of rows, and the others as they were."""
    plain = load_executor(replace(config, learning=None))
    try:
        plain.compile()
        with pytest.raises(IntegrityError, match="captures nothing: it was built without learning"):
            plain.capture(np.array([0]))
        ours, theirs = plain.target.compiled, executor.target.compiled
        assert theirs.keys() - ours.keys() == {("target", "capture", 16, 8), ("target", "capture", 16, 16)}
        for key, program in ours.items():
            ours_text, theirs_text = (each.as_text() for each in (program, theirs[key]))  # type: ignore[attr-defined]
            assert instructions(ours_text) == instructions(theirs_text) != []
    finally:
        plain.close()


def test_one_step_at_most_leaves_its_logits(executor: ModelExecutor) -> None:
    """Also where no draft speculates between two verifications; what is planned for memory counts one."""
    capture = executor.logit_capture
    assert capture is not None
    executor.verify(plan_of([0], [PROMPTS[0]], [True]), packed_trees([]))
    first = capture.logits
    assert first is not None
    run, seen = executor.target.run, []
    try:
        executor.target.run = lambda *args: (seen.append(capture.logits), run(*args))[1]  # type: ignore[method-assign]
        executor.verify(plan_of([5], [], []), packed_trees(TREES[:1]))
    finally:
        executor.target.run = run  # type: ignore[method-assign]
    assert seen == [None] and capture.logits is not None and capture.logits is not first


def test_what_is_planned_is_what_is_there(executor: ModelExecutor, config: EngineConfig) -> None:
    resolved, workspace = plan_memory(config)
    planned, ledger = resolved.ledger(workspace), executor.ledger
    assert planned == ledger and planned.needed == planned.taken()


def test_weights_of_a_draft_are_exchanged_and_checked(executor: ModelExecutor) -> None:
    assert executor.num_drafts == 1 and executor.draft_names == ("default",) and executor.draft_resident
    old = executor.draft_params()
    new = {name: weight * 2 for name, weight in old.items()}
    executor.set_draft(new)
    assert executor.draft_params() is new
    executor.set_draft(old)
    name = "norm"
    for wrong, said in (
        ({name: old[name]}, "got 1, without"),
        (old | {"more": old[name]}, "with 'more'"),
        (old | {name: old[name].astype(jnp.bfloat16)}, r"'norm' must be float32\[\d+\] on .*, got bfloat16\["),
        (old | {name: old[name][None]}, r"'norm' must be .*, got float32\[1, \d+\]"),
        (old | {name: np.asarray(old[name])}, "got .* on the host"),
    ):
        with pytest.raises(IntegrityError, match=f"draft 0.*{said}"):
            executor.set_draft(wrong)
    gone = jnp.array(old[name])
    gone.delete()
    with pytest.raises(IntegrityError, match="still there, got a deleted one"):
        executor.set_draft(old | {name: gone})
    for draft in (-1, 1):
        with pytest.raises(IntegrityError, match=f"one of the 1 that are loaded, by index, got {draft}"):
            executor.draft_params(draft)
    assert executor.draft_params() is old
