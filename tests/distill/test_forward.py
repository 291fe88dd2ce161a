"""Scores and gradients of packed texts against float64 by hand: the right row, and nothing of what is padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import numpy as np
import pytest

from adaserve_jax.distill.programs import batch_sums
from adaserve_jax.distill.records import PADDING, PackedBatch
from adaserve_jax.learn_config import LearnConfig, Loss
from tests.distill.made import (
    CONFIG,
    SIZE,
    VOCAB,
    as_texts,
    assert_close,
    assert_same,
    float64,
    made_params,
    made_record,
    packed,
)
from tests.oracles import training as oracle
from tests.slow import slow_after

PARAMS = made_params()


@partial(jax.jit, static_argnums=1)
def sums_and_gradient(params: Any, learn: LearnConfig, fields: PackedBatch):
    """((loss, overlap), gradient of the loss)."""

    def loss_of(params: Any):
        loss, overlap = batch_sums(params, CONFIG, learn, fields)
        return loss, (loss, overlap)

    gradient, sums = jax.grad(loss_of, has_aux=True)(params)
    return sums, gradient


def two_texts() -> list[Any]:
    rng = np.random.default_rng(1)
    return [made_record(rng, 13, 6), made_record(rng, 11, 5)]


LEARN = LearnConfig()
"""Settings of all tests of the usual loss, which so compiles once."""


@pytest.mark.parametrize("learn", slow_after(1, [
    LEARN, *(LearnConfig(learn_loss=kind, learn_beta=0.3, learn_temperature=0.8) for kind in get_args(Loss)),
]), ids=lambda learn: f"{learn.learn_loss}-{learn.learn_temperature}")  # fmt: skip
def test_the_gradient_of_packed_texts_is_that_of_each_text_by_hand(learn: LearnConfig):
    how = learn.learn_loss, learn.learn_beta, learn.learn_temperature
    records = two_texts()
    (loss, overlap), gradient = sums_and_gradient(PARAMS, learn, packed(*records))
    draft = oracle.Draft(CONFIG, float64(PARAMS))
    np.testing.assert_allclose((loss, overlap), draft.loss(as_texts(records), *how), rtol=1e-4)
    assert_close(gradient, draft.gradient(as_texts(records), *how))


@pytest.mark.parametrize(("kind", "tied"), [("kl", True), ("jsd", False), ("reverse_kl", False)])
@pytest.mark.slow
def test_the_hands_gradient_is_that_of_finite_differences(kind: str, tied: bool):
    config = replace(CONFIG, tie_embeddings=tied)
    weights = float64(made_params(config))
    texts = as_texts(two_texts())
    gradient = oracle.Draft(config, weights).gradient(texts, kind, 0.3, 0.8)
    rng = np.random.default_rng(2)
    for name, weight in weights.items():
        for flat in rng.choice(weight.size, 2, replace=False):
            at, ends = np.unravel_index(flat, weight.shape), []
            for step in (1e-5, -1e-5):
                moved = weight.copy()
                moved[at] += step
                ends.append(oracle.Draft(config, weights | {name: moved}).loss(texts, kind, 0.3, 0.8)[0])
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, gradient[name][at], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("at", [0, 3, 7])
def test_one_row_learns_from_the_token_that_predicted_and_from_none_after_it(at: int):
    """Each token of the text is another one, so that its row of the embedding says whether it took part."""
    record = made_record(np.random.default_rng(3), 12, [at])
    record.tokens = np.arange(12, dtype=np.int32)
    batch = packed(record)
    batch.tokens[at + 1 : 12] = record.tokens[at + 1 :]  # what packing leaves out, as if more of the text were here
    batch.segment[at + 1 : 12], batch.position[at + 1 : 12] = 0, np.arange(at + 1, 12)
    _, gradient = sums_and_gradient(PARAMS, LEARN, batch)
    by_token = np.abs(np.asarray(gradient["embed"])).max(1)
    assert (by_token[: at + 1] > 0).all()
    assert (by_token[at + 1 :] == 0).all()


def test_padding_has_no_effect_whatever_it_holds():
    batch = packed(*two_texts())
    expected = sums_and_gradient(PARAMS, LEARN, batch)
    rng = np.random.default_rng(6)
    free, empty = batch.segment == PADDING, batch.weight == 0
    assert free.any() and empty.any()
    batch.tokens[free] = rng.integers(0, VOCAB, free.sum())
    batch.position[free] = rng.integers(0, 99, free.sum())
    batch.at[empty] = rng.integers(0, SIZE, empty.sum())
    batch.ids[empty] = rng.integers(-9, 99, batch.ids[empty].shape)
    batch.log_p[empty] = np.nan
    assert_same(sums_and_gradient(PARAMS, LEARN, batch), expected)
    batch.weight[:] = 0
    (loss, overlap), gradient = sums_and_gradient(PARAMS, LEARN, batch)
    assert loss == overlap == 0
    assert all((np.asarray(each) == 0).all() for each in gradient.values())
