"""Simulated texts: the target's tokens and the draft's guesses, as pure functions of (seed, choice, position).

No policy, tree or load enters. Each sequence has one word, made from its seed and choice; a draw is splitmix64's
output at that word, moved on by the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

_SEED, _CHOICE = np.uint64(0xD1342543DE82EF95), np.uint64(0xA0761D6478BD642F)
_POSITION, _KIND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xE7037ED1A0B428DB)
_DRAFT, _MOOD = np.arange(1, 3, dtype=np.uint64) * _KIND
"""Offsets of a word for the other draws: what the draft gets right, and how well it does."""
CONCENTRATION = 2.3
"""Default concentration of the Beta distribution that the draft's chance of being right follows over positions: that of
the embedded pair at temperature 0."""
OVERCONFIDENCE = 2.0
"""Power to which an uncalibrated draft raises the odds of its first choice: 0.7 is called 0.84, 0.4 is called 0.31."""
MEANS, SHARES = 100, 1024
"""Steps of the table of that distribution's quantiles."""
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.001, 0.999


def token_at(
    seed: np.ndarray | int, choice: np.ndarray | int, position: np.ndarray | int, vocab_size: int
) -> np.ndarray:
    """i32, the target's token at `position`; arguments broadcast."""
    return _token(_mixed(_word(_u64(seed), _u64(choice)) + _u64(position) * _POSITION), vocab_size)


def tokens_after(seed: np.ndarray, choice: np.ndarray, root: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """i32[R, count], the target's tokens at the positions behind `root` (integers [R])."""
    word = _word(seed, choice) + root.astype(np.uint64) * _POSITION
    return _token(_mixed(word[:, None] + _steps(count)), vocab_size)


@dataclass(frozen=True, eq=False)
class Draws:
    """One step of drafting. target: i32[R, depth + 1], the target's tokens after the root. luck, mood: f64[R, depth],
    uniform in [0, 1), by level: what the draft gets right, and how sure it can be."""

    target: np.ndarray
    luck: np.ndarray
    mood: np.ndarray

    @classmethod
    def of(cls, seed: np.ndarray, choice: np.ndarray, root: np.ndarray, depth: int, vocab_size: int) -> Draws:
        """root: integers [R], the position of each row's root."""
        word = _word(seed, choice) + root.astype(np.uint64) * _POSITION
        draws = _mixed(word[:, None] + _columns(depth))
        uniform = _uniform(draws[:, depth + 1 :])
        return cls(_token(draws[:, : depth + 1], vocab_size), uniform[:, :depth], uniform[:, depth:])


def acceptance_at(mean: np.ndarray | float, mood: np.ndarray, concentration: float) -> np.ndarray:
    """Return the chance at each position that the draft's first choice is the target's, f64[R, depth], around the mean
    of each request (f64[R], or one for all)."""
    row = np.atleast_1d(np.asarray(mean) * MEANS + 0.5).astype(np.int64)[:, None]
    return _quantiles(concentration)[row, (mood * SHARES).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Beams:
    """The result of a beam search. f: f64[R, depth, width], as the draft states it. parent: i64[R, depth, width], rank
    in the beam above. true: bool[R, depth, width], whether the path to the node is the target's text."""

    f: np.ndarray
    parent: np.ndarray
    true: np.ndarray


def search(a: np.ndarray, luck: np.ndarray, width: int, *, calibrated: bool = True) -> Beams:
    """Search beams in which the draft's choice r is the target's with chance a (1 - a)^r at every node of a level.

    a, luck: f64[R, depth]. At most one node of a level is true: the one that the luck of each level picks. Without
    calibration the draft states a too sharply, by OVERCONFIDENCE, and ranks its beams by that.
    """
    said = a if calibrated else _overconfident(a)
    rows, depth = a.shape
    if width == 1:
        true = np.logical_and.accumulate(luck < a, axis=1)
        shape = (rows, depth, 1)
        return Beams(np.cumprod(said, axis=1).reshape(shape), np.zeros(shape, np.int64), true.reshape(shape))
    rank = np.arange(width)
    chance = said[:, :, None] * (1 - said)[:, :, None] ** rank
    pick = np.minimum(np.log1p(-luck) / np.log1p(-a), width).astype(np.int64)
    beams = Beams(*(np.empty((rows, depth, width), kind) for kind in (np.float64, np.int64, bool)))
    beams.f[:, 0], beams.parent[:, 0], beams.true[:, 0] = chance[:, 0], 0, rank == pick[:, :1]
    row = np.arange(rows)[:, None]
    for level in range(1, depth):
        paths = (beams.f[:, level - 1, :, None] * chance[:, level, None, :]).reshape(rows, width * width)
        best = np.argsort(-paths, axis=1, kind="stable")[:, :width]
        parent = best // width
        beams.f[:, level], beams.parent[:, level] = paths[row, best], parent
        beams.true[:, level] = beams.true[:, level - 1][row, parent] & (best % width == pick[:, level, None])
    return beams


@cache
def _quantiles(concentration: float) -> np.ndarray:
    """f64[MEANS + 1, SHARES], of Beta(k m, k (1 - m)) for k the concentration and m a mean, in its row."""
    rng = np.random.default_rng(0)
    middles = (np.arange(SHARES) + 0.5) / SHARES
    table = np.empty((MEANS + 1, SHARES))
    for index in range(MEANS + 1):
        mean = min(max(index / MEANS, 0.5 / MEANS), 1 - 0.5 / MEANS)
        drawn = np.quantile(rng.beta(concentration * mean, concentration * (1 - mean), 1 << 14), middles)
        table[index] = np.clip(drawn + mean - drawn.mean(), LEAST_ACCEPTANCE, MOST_ACCEPTANCE)
    return table


def _overconfident(chance: np.ndarray) -> np.ndarray:
    """Sharpen a chance: raise its odds to the power OVERCONFIDENCE."""
    raised = chance**OVERCONFIDENCE
    return raised / (raised + (1 - chance) ** OVERCONFIDENCE)


def _u64(value: np.ndarray | int) -> np.ndarray:
    """Return u64 of at least one dimension, which wraps around without a warning."""
    return np.atleast_1d(value).astype(np.uint64)


def _word(seed: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """u64. seed: u64."""
    return seed * _SEED + choice.astype(np.uint64) * _CHOICE


@cache
def _steps(count: int) -> np.ndarray:
    """u64[count], what positions 1, 2, ... behind another one add."""
    return np.arange(1, count + 1, dtype=np.uint64) * _POSITION


@cache
def _columns(depth: int) -> np.ndarray:
    """u64[3 depth + 1], of the text and of the draft's luck and mood."""
    return np.concatenate([_steps(depth + 1), _steps(depth) + _DRAFT, _steps(depth) + _MOOD])


def _mixed(value: np.ndarray) -> np.ndarray:
    """splitmix64's last steps, in place (u64)."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def _token(draw: np.ndarray, vocab_size: int) -> np.ndarray:
    return (draw % np.uint64(vocab_size)).astype(np.int32)


def _uniform(draw: np.ndarray) -> np.ndarray:
    return (draw >> np.uint64(11)) * 2.0**-53
