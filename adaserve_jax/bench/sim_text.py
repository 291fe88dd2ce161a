"""What a simulated target says and a simulated draft guesses: pure functions of (seed, choice, position).

Nothing else enters: no policy, tree or load. A request has one word, made from its seed and choice; a draw is
splitmix64's output at that word, moved on by the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

_SEED, _CHOICE = np.uint64(0xD1342543DE82EF95), np.uint64(0xA0761D6478BD642F)
_POSITION, _KIND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xE7037ED1A0B428DB)
_DRAFT, _DRIFT, _NAME = np.arange(1, 4, dtype=np.uint64) * _KIND
"""What is added to a word for draws that are not of the text: what the draft gets right, how well it does, and names
of KV entries."""
DRIFT_TOKENS = 64
"""Tokens over which the draft does equally well."""
DRIFT_WIDTH = 0.3
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.02, 0.98


def token_at(
    seed: np.ndarray | int, choice: np.ndarray | int, position: np.ndarray | int, vocab_size: int
) -> np.ndarray:
    """i32, the target's token at `position`; arguments broadcast."""
    return _token(_mixed(_word(_u64(seed), _u64(choice)) + _u64(position) * _POSITION), vocab_size)


def tokens_after(seed: np.ndarray, choice: np.ndarray, root: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """i32[R, count], the target's tokens at the positions behind `root` (integers [R])."""
    word = _word(seed, choice) + root.astype(np.uint64) * _POSITION
    return _token(_mixed(word[:, None] + _steps(count)), vocab_size)


def kv_name(seed: np.ndarray | int, choice: np.ndarray | int, position: np.ndarray) -> np.ndarray:
    """u64, what stands for the KV of a token: no two tokens of a simulation share one."""
    return _mixed(_word(_u64(seed), _u64(choice)) + _u64(position) * _POSITION + _NAME)


@dataclass(frozen=True, eq=False)
class Draws:
    """One step of drafting. target: i32[R, depth + 1], the target's tokens after the root. luck: f64[R, depth], uniform
    in [0, 1), by level: what the draft gets right. mood: f64[R], uniform, the same for DRIFT_TOKENS tokens."""

    target: np.ndarray
    luck: np.ndarray
    mood: np.ndarray

    @classmethod
    def of(cls, seed: np.ndarray, choice: np.ndarray, root: np.ndarray, depth: int, vocab_size: int) -> Draws:
        """root: integers [R], the position of each row's root."""
        word, position = _word(seed, choice), root.astype(np.uint64)
        draws = np.empty((len(word), 2 * depth + 2), np.uint64)
        np.add((word + position * _POSITION)[:, None], _columns(depth), out=draws[:, :-1])
        draws[:, -1] = word + position // np.uint64(DRIFT_TOKENS) * _POSITION + _DRIFT
        _mixed(draws)
        uniform = _uniform(draws[:, depth + 1 :])
        return cls(_token(draws[:, : depth + 1], vocab_size), uniform[:, :-1], uniform[:, -1])


def acceptance_now(mean: np.ndarray | float, mood: np.ndarray) -> np.ndarray:
    """a: f64[R], the chance that the draft's first choice is the target's, around a request's mean."""
    return np.minimum(np.maximum(mean + DRIFT_WIDTH * (mood - 0.5), LEAST_ACCEPTANCE), MOST_ACCEPTANCE)


def true_ranks(a: np.ndarray, luck: np.ndarray, width: int) -> np.ndarray:
    """i64[R, depth]: the rank of the beam that carries the target's token at each level, `width` where none does.

    A level's pick is r with chance a (1 - a)^r. The first lane goes on while the picks are 0, and where it ends the
    pick is on a side branch (r >= 2); the second hangs from the root by a pick of 1 and goes on while the picks are 0.
    """
    if width == 1:
        return 1 - np.logical_and.accumulate(luck < a[:, None], axis=1)
    pick = np.minimum(np.log1p(-luck) / np.log1p(-a)[:, None], width).astype(np.int64)
    hit = pick == 0
    on_first = np.logical_and.accumulate(hit, axis=1)
    reached = np.concatenate([np.ones((len(pick), 1), bool), on_first[:, :-1]], axis=1)
    ranks = np.where(reached, pick, width)
    ranks[:, 1:][pick[:, 1:] == 1] = width
    hit[:, 0] = pick[:, 0] == 1
    ranks[np.logical_and.accumulate(hit, axis=1)] = 1
    return ranks


def _u64(value: np.ndarray | int) -> np.ndarray:
    """Of at least one dimension: those wrap around without a warning."""
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
    """u64[2 depth + 1], of the text and of the draft's luck."""
    return np.concatenate([_steps(depth + 1), _steps(depth) + _DRAFT])


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
