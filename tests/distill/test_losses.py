"""The three distances against float64 by hand, and where they could turn into NaN."""

from __future__ import annotations

from functools import partial
from typing import get_args

import jax
import numpy as np
import pytest

from adaserve_jax.distill.programs import row_losses
from adaserve_jax.learn_config import Loss
from tests.distill.made import made_record
from tests.oracles import training as oracle
from tests.slow import slow_after

ROWS, VOCAB, TOP = 6, 11, 4


def losses_and_gradient(logits, ids, log_p, kind: str, beta: float = 0.3, temperature: float = 1.0):
    """(loss [N], overlap [N], gradient of the sum of losses by the logits)."""
    gradient, (loss, overlap) = _gradient(np.asarray(logits, np.float32), ids, log_p, kind, beta, temperature)
    return np.asarray(loss), np.asarray(overlap), np.asarray(gradient)


@partial(jax.jit, static_argnums=3)
@partial(jax.grad, has_aux=True)
def _gradient(logits, ids, log_p, kind, beta, temperature):
    loss, overlap = row_losses(logits, ids, log_p, kind=kind, beta=beta, temperature=temperature)
    return loss.sum(), (loss, overlap)


@pytest.mark.parametrize("kind", get_args(Loss))
@pytest.mark.parametrize(("top", "temperature"), slow_after(1, [(TOP, 0.7), (VOCAB, 1.0)], several=True))
def test_equal_to_float64_by_hand(kind: str, top: int, temperature: float):
    rng = np.random.default_rng(0)
    record = made_record(rng, 12, ROWS, top=top, vocab=VOCAB)
    logits = 2 * rng.standard_normal((ROWS, VOCAB))
    found = losses_and_gradient(logits, record.ids, record.log_p, kind, 0.3, temperature)
    expected = oracle.row_losses(logits, record.ids, record.log_p, kind, 0.3, temperature)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", slow_after(1, get_args(Loss)))
def test_fewer_tokens_give_a_distance_and_an_acceptance_from_below(kind: str):
    rng = np.random.default_rng(1)
    whole = made_record(rng, 12, ROWS, top=VOCAB, vocab=VOCAB)
    logits = rng.standard_normal((ROWS, VOCAB))
    exact, accepted, _ = losses_and_gradient(logits, whole.ids, whole.log_p, kind)
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    by_id = np.take_along_axis(q, whole.ids, axis=1)
    np.testing.assert_allclose(accepted, np.minimum(np.exp(whole.log_p), by_id).sum(1), rtol=1e-5)
    loss, overlap, _ = losses_and_gradient(logits, whole.ids[:, :TOP], whole.log_p[:, :TOP], kind)
    assert (loss <= exact + 1e-5).all()
    assert (overlap <= accepted + 1e-6).all()


@pytest.mark.parametrize("kind", get_args(Loss))
@pytest.mark.parametrize("sharp", [1.0, 60.0])
def test_a_target_that_is_sure_and_tokens_that_it_excludes_give_numbers(kind: str, sharp: float):
    """Nothing is left for all others, log p is -inf, and with sharp scores q has nothing left either."""
    ids = np.tile(np.arange(TOP, dtype=np.int32), (ROWS, 1))
    log_p = np.tile(np.array([0, -np.inf, -np.inf, -np.inf], np.float32), (ROWS, 1))
    logits = np.tile(sharp * np.linspace(1, -1, VOCAB), (ROWS, 1))
    for scores in (logits, -logits):
        loss, overlap, gradient = losses_and_gradient(scores, ids, log_p, kind)
        assert np.isfinite([*loss, *overlap]).all()
        assert np.isfinite(gradient).all()
        assert (loss >= -1e-6).all()


def test_the_gradient_of_kl_is_that_of_cross_entropy_where_the_target_is_sure():
    logits = np.random.default_rng(2).standard_normal((ROWS, VOCAB))
    log_p = np.tile(np.array([0, -np.inf, -np.inf, -np.inf], np.float32), (ROWS, 1))
    ids = np.tile(np.array([4, 5, 6, 7], np.int32), (ROWS, 1))
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(losses_and_gradient(logits, ids, log_p, "kl")[2], q - np.eye(VOCAB)[4], atol=1e-5)


def test_half_precision_that_adds_up_to_more_than_one_is_scaled_back():
    log_p = np.tile(np.log(np.full(TOP, 1 / TOP)).astype(np.float16) + np.float16(1e-2), (ROWS, 1))
    assert np.exp(log_p.astype(np.float64)).sum(1).min() > 1
    logits = np.full((ROWS, VOCAB), -40.0)
    logits[:, :TOP] = 0
    ids = np.tile(np.arange(TOP, dtype=np.int32), (ROWS, 1))
    loss, overlap, _ = losses_and_gradient(logits, ids, log_p.astype(np.float32), "kl")
    np.testing.assert_allclose(loss, 0, atol=1e-4)
    np.testing.assert_allclose(overlap, 1, atol=1e-4)


@pytest.mark.parametrize("kind", get_args(Loss))
def test_what_is_no_number_spoils_its_row_and_no_other(kind: str):
    record = made_record(np.random.default_rng(3), 12, ROWS, top=TOP, vocab=VOCAB)
    record.log_p[1, 2] = np.nan
    loss, _, _ = losses_and_gradient(np.zeros((ROWS, VOCAB)), record.ids, record.log_p, kind)
    assert np.isnan(loss).tolist() == [row == 1 for row in range(ROWS)]


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_jsd_at_its_ends_is_zero_and_has_a_gradient(beta: float):
    record = made_record(np.random.default_rng(4), 12, ROWS, top=TOP, vocab=VOCAB)
    loss, _, gradient = losses_and_gradient(np.zeros((ROWS, VOCAB)), record.ids, record.log_p, "jsd", beta)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
