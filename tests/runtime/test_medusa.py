"""Medusa heads in the executor: they read the target's last output where it was committed, and each level of a tree is
one head's, as the oracle says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from tests.models.checkpoints import write_checkpoint, write_medusa
from tests.oracles.llama import oracle_logits
from tests.oracles.medusa import medusa_scores
from tests.runtime.head_steps import DEPTH, SMALL, TEXTS, WIDTH, searched


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    heads = write_medusa(folder / "heads", heads=DEPTH, blocks=2, seed=4)
    return EngineConfig(target=str(write_checkpoint(folder / "target")), draft=str(heads), **SMALL)


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> Iterator[ModelExecutor]:
    """Load an executor, whose programs are there once `executor` has compiled them."""
    executor = load_executor(config)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def executor(loaded: ModelExecutor) -> Iterator[ModelExecutor]:
    loaded.compile()
    yield loaded
    assert loaded.compiles_after_ready == 0


def _expected(config: EngineConfig, text: np.ndarray) -> np.ndarray:
    """Return the oracle's scores of each head behind a text whose last token the target drew, f64[heads, V]."""
    streams: list[np.ndarray] = []
    target = Path(config.target)
    oracle_logits(target, text[:-1], streams=streams)
    last = streams[-1][-1]
    norm = load_file(target / "model.safetensors")["model.norm.weight"].astype(np.float64)
    return medusa_scores(Path(str(config.draft)), last / np.sqrt((last**2).mean() + 1e-5) * norm)


def _check_tree(found: Any, row: int, scores: np.ndarray) -> None:
    """Each node's log probability is that of the head of its level, and a level's children are its head's best."""
    assert (found.log_f[row] > -np.inf).sum() == DEPTH * WIDTH
    log_q = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    for node in range(DEPTH * WIDTH):
        level, token = node // WIDTH, int(found.token[row][node])
        assert abs(found.log_q[row][node] - log_q[level, token]) < 1e-4
        assert token in np.argsort(-scores[level])[:WIDTH]
    assert found.token[row][:WIDTH].tolist() == np.argsort(-scores[0])[:WIDTH].tolist()


@pytest.mark.parametrize(
    ("ends", "fed"),
    [([[20, 9]], [[21, 10]]), ([[7, 1], [8, 8], [20, 9]], [[1, 1], [6, 10], [21, 10]])],
    ids=["at_once", "in_chunks"],
)
@pytest.mark.slow
def test_trees_are_those_of_the_oracle(
    executor: ModelExecutor, config: EngineConfig, ends: list[list[int]], fed: list[list[int]]
) -> None:
    found = searched(executor, ends, fed)
    for row, text in enumerate(TEXTS):
        _check_tree(found[row], row, _expected(config, text))


def test_heads_have_no_kv_and_memory_is_planned_to_the_byte(loaded: ModelExecutor) -> None:
    target, drafter, sizes = loaded.target, loaded.local_drafter, loaded.resolved.sizes
    assert drafter is not None and target.pools.features is not None
    assert target.pools.features.shape == (1, 32, 1, 8, 32)
    pools = (target.pools.k, target.pools.v, target.pools.features)
    assert sizes.target_page * 32 == sum(pool.nbytes for pool in pools)
    assert sizes.draft_page == 0
    assert sizes.draft_weights == sum(weight.nbytes for weight in drafter.model.params.values())


def test_a_tree_is_no_deeper_than_there_are_heads(config: EngineConfig, tmp_path: Path) -> None:
    executor = load_executor(replace(config, draft=str(write_medusa(tmp_path / "two", heads=2))))
    try:
        assert executor.limits.max_depth == 2
    finally:
        executor.close()


def test_heads_that_do_not_fit_are_refused(config: EngineConfig, tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            load_executor(replace(config, **changes))
        return str(caught.value)

    wide = str(write_medusa(tmp_path / "wide", size=40))
    assert "a set of Medusa heads whose hidden_size is 40, and its target's is 32; use a head" in refusal(draft=wide)
    other = str(write_medusa(tmp_path / "other", vocab_size=300))
    assert "a set of Medusa heads whose vocab_size is 300, and its target's is 320; use a head" in refusal(draft=other)
    heads = [str(write_medusa(tmp_path / name)) for name in ("first", "second")]
    assert "route must be tag or language with Medusa heads, which have no embedding" in refusal(
        draft=heads[0], drafts=(f"b={heads[1]}",), route="topic"
    )
