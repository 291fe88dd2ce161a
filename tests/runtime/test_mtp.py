"""The MTP layer of a target's own checkpoint in the executor: it reads the target's last output where it was committed,
shares embedding and logits with it, and searches as the oracle says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig, LearnConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from tests.models.checkpoints import write_mimo
from tests.oracles.eagle3 import norm
from tests.oracles.llama import oracle_logits
from tests.oracles.mtp import MtpLayer
from tests.runtime.head_steps import SMALL, TEXTS, check_tree, searched
from tests.runtime.head_steps import executor as executor


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(target=str(write_mimo(tmp_path_factory.mktemp("models"))), draft="mtp", **SMALL)


def _check_tree(found: Any, row: int, config: EngineConfig, text: np.ndarray) -> None:
    """Compare a tree with the oracle, fed with what the target says of the text."""
    layer = MtpLayer(Path(config.target))
    streams: list[np.ndarray] = []
    oracle_logits(Path(config.target), text[:-1], streams=streams)
    outputs = norm(streams[-1], layer.w["model.norm.weight"], layer.config["rms_norm_eps"])
    root = layer.read_target(text[1:].tolist(), outputs)
    check_tree(found, row, layer, root)


@pytest.mark.parametrize(
    ("ends", "fed"),
    [
        pytest.param([[20, 9]], [[21, 10]], id="at_once", marks=pytest.mark.slow),
        pytest.param([[7, 1], [8, 8], [20, 9]], [[1, 1], [6, 10], [21, 10]], id="in_chunks"),
    ],
)
def test_trees_are_those_of_the_oracle(
    executor: ModelExecutor, config: EngineConfig, ends: list[list[int]], fed: list[list[int]]
) -> None:
    found = searched(executor, ends, fed)
    for row, text in enumerate(TEXTS):
        _check_tree(found[row], row, config, text)


def test_embedding_and_logits_are_the_targets_own_arrays(executor: ModelExecutor, config: EngineConfig) -> None:
    drafter, target = executor.local_drafter, executor.target
    assert drafter is not None and target.pools.features is not None
    params = executor.draft_params()
    assert params["embed"] is target.params["embed"]
    assert params["head"] is target.params["head"]
    own = drafter.model.weights[0]
    assert not {"embed", "head"} & own.keys()
    assert executor.resolved.sizes.draft_weights == sum(weight.nbytes for weight in own.values())
    pools = (target.pools.k, target.pools.v, target.pools.features)
    assert executor.resolved.sizes.target_page * 32 == sum(pool.nbytes for pool in pools)
    with_copies = load_executor(replace(config, quantize="int8"))
    try:
        assert with_copies.local_drafter is not None
        copies = with_copies.local_drafter.model.weights[0]
        assert {"embed", "head"} <= copies.keys()
        assert with_copies.resolved.sizes.draft_weights == sum(weight.nbytes for weight in copies.values())
    finally:
        with_copies.close()


def test_what_an_mtp_layer_cannot_do_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="learning needs a draft in a folder of its own, got 'mtp'; train an EAGLE-3"):
        load_executor(replace(config, learning=LearnConfig()))
