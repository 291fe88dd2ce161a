"""Medusa heads as checkpoints: their scores are the oracle's, and what they are not is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import logits, medusa_logits
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import write_medusa
from tests.oracles.medusa import medusa_scores


@pytest.mark.parametrize("blocks", [1, 2])
def test_scores_are_those_of_the_oracle(tmp_path: Path, blocks: int) -> None:
    folder = write_medusa(tmp_path, blocks=blocks)
    config = ModelConfig.from_folder(folder, may_be_head=True)
    params = load_params(folder, config)
    hidden = np.random.default_rng(3).standard_normal((32, 4)).astype(np.float32)
    found = np.stack([medusa_logits(params, config, head, hidden) for head in range(3)])
    expected = np.stack([medusa_scores(folder, column) for column in hidden.T], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(logits(params, config, hidden), expected[0], atol=1e-4)


def test_heads_are_no_model(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path)
    with pytest.raises(UnsupportedModelError, match="these are Medusa heads, which are no model without their target"):
        ModelConfig.from_folder(folder)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    folder = write_medusa(tmp_path, heads=2)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"medusa_num_heads": 2', '"medusa_num_heads": 3'))
    with pytest.raises(CheckpointError, match=r"medusa_head\.2"):
        load_params(folder, ModelConfig.from_folder(folder, may_be_head=True))
