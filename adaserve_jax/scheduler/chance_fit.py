"""Fits the table of chances to counted outcomes: cells with few outcomes lean on their kin, and chances never fall as
the draft grows surer. Pure functions of arrays [2, D, ranks, bins]; the order of axes is that of `tree.chances`."""

from __future__ import annotations

import numpy as np

PSEUDO_OUTCOMES = 12.0
"""What a prior weighs, at each level of the hierarchy, in outcomes."""
UNSEEN_WEIGHT = 1e-3
"""Weight in the isotonic fit of a cell without outcomes: it follows its neighbours."""
_LEAST = 1e-4


def fit(prior: np.ndarray, outcomes: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """f32[2, D, ranks, bins], chances that a child is accepted after its parent was, by cell.

    From coarse to fine, each level leaning on the one above by PSEUDO_OUTCOMES: the prior, moved in log-odds to what
    a rank has shown over all depths and bins; then to what a (rank, bin) has shown over all depths; then the cell's own
    outcomes. Without outcomes it is the prior. Both features (log q, and the gap of perturbed scores) grow as the draft
    grows surer, so chances do not fall along the bins. outcomes, accepted: counts f64, decayed or not.
    """
    log_odds = _log_odds(prior.astype(np.float64))
    for pooled in ((1, 3), (1,)):
        log_odds += _shift(_chance(log_odds), outcomes, accepted, pooled)
    chance = (accepted + PSEUDO_OUTCOMES * _chance(log_odds)) / (outcomes + PSEUDO_OUTCOMES)
    return np.clip(non_decreasing(chance, outcomes + UNSEEN_WEIGHT), 0.0, 1.0).astype(np.float32)


def non_decreasing(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The non-decreasing sequences along the last axis that are nearest to `value` in squares weighted by `weight` > 0.

    The largest, over starts up to a bin, of the least, over ends from it, of the weighted means between them: what
    pooling adjacent violators gives, for all rows at once.
    """
    fitted = value.copy()
    falling = (value[..., 1:] < value[..., :-1]).any(axis=-1)
    fitted[falling] = _pooled(value[falling], weight[falling])
    return fitted


def _pooled(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`non_decreasing` for rows [N, bins]."""
    bins = value.shape[1]
    weight = np.ascontiguousarray(weight.T)  # rows last: numpy is fast along them
    total, mass = np.cumsum(value.T * weight, axis=0), np.cumsum(weight, axis=0)
    fitted = np.full_like(total, -np.inf)
    for start in range(bins):
        before = (total[start - 1], mass[start - 1]) if start else (0.0, 0.0)
        mean = (total[start:] - before[0]) / (mass[start:] - before[1])
        least = np.minimum.accumulate(mean[::-1], axis=0)[::-1]
        np.maximum(fitted[start:], least, out=fitted[start:])
    return fitted.T


def _shift(chance: np.ndarray, outcomes: np.ndarray, accepted: np.ndarray, pooled: tuple[int, ...]) -> np.ndarray:
    """By how much to move the log-odds of each group, the cells along the axes `pooled`, as its outcomes say."""
    count = outcomes.sum(axis=pooled, keepdims=True)
    stated = (outcomes * chance).sum(axis=pooled, keepdims=True)
    stated = np.divide(stated, count, out=np.full(count.shape, 0.5), where=count > 0)
    shown = (accepted.sum(axis=pooled, keepdims=True) + PSEUDO_OUTCOMES * stated) / (count + PSEUDO_OUTCOMES)
    return _log_odds(shown) - _log_odds(stated)


def _log_odds(chance: np.ndarray) -> np.ndarray:
    bounded = np.clip(chance, _LEAST, 1 - _LEAST)
    return np.log(bounded / (1 - bounded))


def _chance(log_odds: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-log_odds))
