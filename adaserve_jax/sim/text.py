"""Simulated texts: the target's tokens and the draft's guesses, as pure functions of (seed, choice, position).

No policy, tree or load enters. Each sequence has one word, made from its seed and choice; a draw is splitmix64's
output at that word, moved on by the position. `kernels.py` has the loops over rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from adaserve_jax.types import DraftTrees

CONCENTRATION = 2.3
"""Default concentration of the Beta distribution that the draft's chance of being right follows over positions: that of
the embedded pair at temperature 0."""
CHOICE_DECAY = 1.0
"""Default chance that the draft's next choice is right, where those before it were wrong, over the chance of the choice
before."""
OVERCONFIDENCE = 2.0
"""Power to which an uncalibrated draft raises the odds of its first choice: 0.7 is called 0.84, 0.4 is called 0.31."""
MEANS, SHARES = 100, 1024
"""Steps of the table of that distribution's quantiles."""
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.001, 0.999


def token_at(
    seed: np.ndarray | int, choice: np.ndarray | int, position: np.ndarray | int, vocab_size: int
) -> np.ndarray:
    """i32, the target's token at `position`; arguments broadcast."""
    arguments = (np.atleast_1d(each) for each in (seed, choice, position))
    seeds, choices, positions = np.broadcast_arrays(*arguments)
    roots = positions.astype(np.int64).ravel() - 1
    return tokens_after(seeds.ravel(), choices.ravel(), roots, 1, vocab_size).reshape(seeds.shape)


def tokens_after(seed: np.ndarray, choice: np.ndarray, root: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """i32[R, count], the target's tokens at the positions behind `root` (integers [R])."""
    tokens = np.empty((len(seed), count), np.int32)
    _kernels().draw_tokens(seed, choice, root, vocab_size, tokens)
    return tokens


@dataclass(frozen=True, eq=False)
class Draws:
    """One step of drafting. target: i32[R, depth + 1], the target's tokens after the root. luck, mood: f64[R, depth],
    uniform in [0, 1), by level: what the draft gets right, and how sure it can be. vocab_size: of the target."""

    target: np.ndarray
    luck: np.ndarray
    mood: np.ndarray
    vocab_size: int

    @classmethod
    def of(cls, seed: np.ndarray, choice: np.ndarray, root: np.ndarray, depth: int, vocab_size: int) -> Draws:
        """root: integers [R], the position of each row's root."""
        target = tokens_after(seed, choice, root, depth + 1, vocab_size)
        luck, mood = np.empty((len(seed), depth)), np.empty((len(seed), depth))
        _kernels().draw_luck(seed, choice, root, luck, mood)
        return cls(target, luck, mood, vocab_size)


def acceptance_at(mean: np.ndarray | float, mood: np.ndarray, concentration: float) -> np.ndarray:
    """Return the chance at each position that the draft's first choice is the target's, f64[R, depth], around the mean
    of each request (f64[R], or one for all)."""
    row = np.atleast_1d(np.asarray(mean) * MEANS + 0.5).astype(np.int64)[:, None]
    return _quantiles(concentration)[row, (mood * SHARES).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Beams:
    """The result of a beam search, level by level: C = depth * width nodes of each row.

    f: f64[R, C], as the draft states it, above 0. token, parent: i32[R, C], the parent by its column, -1 for the root.
    A node has the target's token if the path to it is the target's text, and another one otherwise.
    """

    f: np.ndarray
    token: np.ndarray
    parent: np.ndarray


def search(
    draws: Draws, a: np.ndarray, width: int, *, decay: float = CHOICE_DECAY, calibrated: bool = True
) -> Beams:  # fmt: skip
    """Search beams in which the draft's choice r, where no better one is right, is the target's with chance a decay^r
    at every node of a level.

    a: f64[R, depth]. At most one node of a level is true: the one that the luck of each level picks. Without
    calibration the draft states a too sharply, by OVERCONFIDENCE, and ranks its beams by that.
    """
    rows, columns = len(a), a.shape[1] * width
    beams = Beams(np.empty((rows, columns)), *np.empty((2, rows, columns), np.int32))
    said = a if calibrated else _overconfident(a)
    found = beams.f, beams.token, beams.parent
    _kernels().search(draws.target, draws.luck, a, said, decay, width, draws.vocab_size, *found)
    return beams


def walk(trees: DraftTrees, root_token: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Follow the target's tokens, i32[R, at least the depth], down every tree.

    Returns the nodes that carry them like all above, bool[N], and how many each row has, its root included, i32[R];
    None if the roots are not those of all rows, once each and in order. root_token: i32[R].
    """
    walked, counts = np.empty(len(trees.row), bool), np.empty(len(root_token), np.int32)
    nodes = trees.row, trees.token, trees.parent, trees.depth
    return (walked, counts) if _kernels().walk(*nodes, root_token, target, walked, counts) else None


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


@cache
def _kernels() -> ModuleType:
    """Import the loops, and with them numba: whatever simulates nothing starts without it."""
    from adaserve_jax.sim import kernels

    return kernels
