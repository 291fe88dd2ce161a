"""An EAGLE-3 head in the executor: it reads the target's features where they were committed, and searches as the oracle
says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError, UnsupportedModelError
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from tests.models.checkpoints import write_checkpoint, write_eagle3
from tests.oracles.eagle3 import Head
from tests.oracles.llama import oracle_logits
from tests.plans import packed_trees
from tests.runtime.head_steps import DEPTH, NO_TREES, SMALL, TEXTS, check_tree, plan_step, prefill, searched
from tests.runtime.head_steps import executor as executor

LAYERS = [0, 2, 3]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target", num_hidden_layers=4)
    head = write_eagle3(folder / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": LAYERS}, seed=4)
    return EngineConfig(target=str(target), draft=str(head), **SMALL)


def _expected(config: EngineConfig, text: np.ndarray) -> tuple[Head, np.ndarray]:
    """An oracle that was fed a whole text, and its last feature."""
    assert config.draft is not None
    head = Head(Path(config.draft))
    return head, _root(head, config, text)


def _root(head: Head, config: EngineConfig, text: np.ndarray) -> np.ndarray:
    """Feed an oracle a whole text and return its last feature."""
    streams: list[np.ndarray] = []
    oracle_logits(Path(config.target), text[:-1], streams=streams)
    return head.read_target(text[1:].tolist(), np.concatenate([streams[layer] for layer in LAYERS], axis=1))


@pytest.mark.parametrize(
    ("ends", "fed"),
    [
        ([[20, 9]], [[21, 10]]),
        ([[7, 1], [8, 8], [20, 9]], [[1, 1], [6, 10], [21, 10]]),
        ([[20, 9]], [[16, 8], [21, 10]]),
    ],
    ids=["at_once", "in_chunks", "by_pages"],
)
def test_trees_are_those_of_the_oracle(
    executor: ModelExecutor, config: EngineConfig, ends: list[list[int]], fed: list[list[int]]
) -> None:
    found = searched(executor, ends, fed)
    for row, text in enumerate(TEXTS):
        check_tree(found[row], row, *_expected(config, text))


def test_only_committed_features_are_read(executor: ModelExecutor, config: EngineConfig) -> None:
    """A tree of another text at the same positions, of which nothing is accepted, leaves the features alone."""
    prefill(executor, [[20, 9]])
    known = [len(text) - 1 for text in TEXTS]
    trees = packed_trees([([TEXTS[0][-1], 5, 6], [-1, 0, 1]), ([TEXTS[1][-1], 7], [-1, 0])])
    outcome = executor.verify(plan_step(known), trees)
    drawn = outcome.tokens[:, 0]
    wrong = (drawn + 1) % 300
    trees = replace(trees, token=np.array([TEXTS[0][-1], wrong[0], 6, TEXTS[1][-1], wrong[1]], np.int32))
    assert executor.verify(plan_step(known), trees).counts.tolist() == [1, 1]
    texts = [np.append(text, drawn[row]) for row, text in enumerate(TEXTS)]
    plan = plan_step([len(text) for text in TEXTS], fed=TEXTS, drafted=[0, 0])
    executor.speculate(plan)
    plan = plan_step([len(text) for text in TEXTS], fed=[text[-1:] for text in texts], drafted=[len(t) for t in TEXTS])
    assert plan.draft is not None
    plan = replace(plan, draft=replace(plan.draft, depth=DEPTH, speculates=np.ones(2, bool)))
    found = executor.speculate(plan)
    for row, text in enumerate(texts):
        check_tree(found, row, *_expected(config, text))


def test_without_a_head_pools_have_no_features(config: EngineConfig, executor: ModelExecutor) -> None:
    plain = load_executor(replace(config, draft=None))
    features = plain.target.pools.features
    plain.close()
    assert features is None
    with_features = executor.target.pools.features
    assert with_features is not None
    assert with_features.shape == (3, 32, 1, 8, 32)


def test_memory_is_planned_to_the_byte(executor: ModelExecutor) -> None:
    target, drafter, sizes = executor.target, executor.local_drafter, executor.resolved.sizes
    assert drafter is not None
    pools = [pool for pool in (target.pools.k, target.pools.v, target.pools.features) if pool is not None]
    assert sizes.target_page * 32 == sum(pool.nbytes for pool in pools)
    assert sizes.draft_weights == sum(weight.nbytes for weight in drafter.model.params.values())


def test_heads_that_do_not_fit_are_refused(config: EngineConfig, tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises((CheckpointError, ConfigError, UnsupportedModelError)) as caught:
            load_executor(replace(config, **changes))
        return str(caught.value)

    wide = str(write_eagle3(tmp_path / "wide", features=40))
    assert "an EAGLE-3 head whose target_hidden_size is 40, and its target's is 32; use a head" in refusal(draft=wide)
    other = str(write_eagle3(tmp_path / "other", vocab_size=300))
    assert "an EAGLE-3 head whose vocab_size is 300, and its target's is 320; use a head" in refusal(draft=other)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 9]}
    deep = str(write_eagle3(tmp_path / "deep", eagle_config=layers))
    assert "reads layers 0, 2, 9 of its target, which has 4; use a head" in refusal(draft=deep)


@pytest.mark.slow
def test_features_come_back_from_pages_in_the_drafts_memory(config: EngineConfig) -> None:
    """What the target computes while the head is away lies on pages of the extension, and moves with them."""
    executor = load_executor(replace(config, elastic="on"))
    executor.compile()
    limits = executor.limits
    try:
        prefill(executor, [[8, 8]], first_page=0)
        executor.expand()
        beyond = limits.num_pages  # the second page of each text is one of the extension, and so is the third
        away = np.array([[0, beyond, beyond + 1], [8, beyond + 2, beyond + 3]], np.int32)
        plan = plan_step([8, 8], prefill=[TEXTS[0][8:20], TEXTS[1][8:9]])
        table = plan.page_table.copy()
        table[:, :3] = away
        executor.verify(replace(plan, page_table=table), NO_TREES)
        executor.move_pages(away[:, 1:].reshape(-1), np.array([1, 2, 9, 10]))
        executor.contract()
        assert executor.elastic is not None
        executor.elastic.wait()
        found = executor.speculate(plan_step([20, 9], fed=TEXTS, drafted=[0, 0]))
        for row, text in enumerate(TEXTS):
            check_tree(found, row, *_expected(config, text))
        assert executor.compiles_after_ready == 0
    finally:
        executor.close()


@pytest.mark.slow
def test_a_head_without_an_embedding_uses_its_targets(config: EngineConfig, tmp_path: Path) -> None:
    """The same array, which is counted once and outlives the head's memory and its exchanges."""
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    head = write_eagle3(tmp_path / "head", eagle_config=layers, seed=4, own_embedding=False)
    executor = load_executor(replace(config, draft=str(head), elastic="on"))
    executor.compile()
    try:
        embedding, drafter = executor.target.params["embed"], executor.local_drafter
        assert drafter is not None
        assert executor.draft_params()["embed"] is embedding
        assert executor.resolved.sizes.draft_weights == sum(
            weight.nbytes for weight in drafter.model.weights[0].values()
        )
        executor.expand()
        executor.contract()
        assert executor.elastic is not None
        executor.elastic.wait()
        executor.set_draft({name: jnp.copy(weight) for name, weight in executor.draft_params().items()})
        assert executor.draft_params()["embed"] is embedding
        assert not embedding.is_deleted()
        prefill(executor, [[20, 9]])
        found = executor.speculate(plan_step([20, 9], fed=TEXTS, drafted=[0, 0]))
        tensors = load_file(Path(config.target) / "model.safetensors")
        for row, text in enumerate(TEXTS):
            oracle = Head(head, tensors["model.embed_tokens.weight"])
            check_tree(found, row, oracle, _root(oracle, config, text))
        assert executor.compiles_after_ready == 0
    finally:
        executor.close()
    with_copy = load_executor(replace(config, draft=str(head), quantize="int8"))
    try:
        assert with_copy.local_drafter is not None
        assert with_copy.draft_params()["embed"].dtype == jnp.float32
        weights = with_copy.local_drafter.model.weights[0]
        assert with_copy.resolved.sizes.draft_weights == sum(weight.nbytes for weight in weights.values())
    finally:
        with_copy.close()
