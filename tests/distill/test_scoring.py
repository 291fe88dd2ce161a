"""Rows of a record are the target's distribution at each position, as a float64 oracle has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaserve_jax.distill.offline import Scorer
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits

TEMPERATURE = 0.7


@pytest.mark.parametrize("top_k", [5, 48])
def test_rows_are_the_oracles_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    """Of texts that share forwards, from their first row to the last but one token; ids both models have only."""
    monkeypatch.setattr("adaserve_jax.distill.offline.MIN_TOKENS", 64)
    folder = write_checkpoint(tmp_path, vocab_size=50, num_hidden_layers=1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 48, size).astype(np.int32) for size in (20, 30, 40, 2, 17)]
    first = [0, 11, 38, 0, 5]
    config = ModelConfig.from_folder(folder)
    scorer = Scorer(config, top_k=top_k, vocab_size=48, temperature=TEMPERATURE)
    told: list[int] = []
    records = scorer.records(load_params(folder, config), texts, first, told.append)
    assert told == [2, 5]
    for record, text, start in zip(records, texts, first, strict=True):
        np.testing.assert_array_equal(record.tokens, text)
        assert record.position.tolist() == list(range(start, len(text) - 1))
        scores = oracle_logits(folder, text)[start:-1, :48] / TEMPERATURE
        expected = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        assert record.ids.shape == record.log_p.shape == (len(expected), top_k)
        np.testing.assert_allclose(record.log_p, -np.sort(-expected, axis=1)[:, :top_k], atol=2e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, record.ids, 1), record.log_p, atol=2e-4)
