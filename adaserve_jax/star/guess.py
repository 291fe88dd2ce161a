"""What a session's text may become: the likeliest path of the tree that its target verifies, and the target's token.

No thread, clock or device; whether to act on a guess is ahead.py's.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.star.messages import Draft

Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""index, token, parent, cell: i32[C]; log_q: f32[C]; as in `messages.Tree`."""
MEMORY = 0.98
"""What a round that is over counts in the shares of the next."""
PRIOR = 4.0
"""Rounds that a share begins with."""


class Path:
    """From the root down. tokens: i32[D]; chance: f64[D], of each node, not rising."""

    def __init__(self, tokens: np.ndarray, chance: np.ndarray):
        self.tokens, self.chance = tokens, chance

    @property
    def depth(self) -> int:
        return len(self.tokens)


class Found:
    """The nodes of one searched row as a Tree has them, by their columns, rising. log_f: f32[C], of their paths."""

    def __init__(self, columns: Columns, log_f: np.ndarray):
        self.columns, self.log_f = columns, log_f

    def cut(self, width: int, depth: int) -> Columns:
        """Of the first `depth` levels."""
        count = int(np.searchsorted(self.columns[0], width * depth))
        index, token, parent, cell, log_q = (part[:count] for part in self.columns)
        return index, token, parent, cell, log_q

    def best_path(self, width: int, depth: int) -> Path:
        """Down to the likeliest node of the deepest of the first `depth` levels; empty for an empty tree."""
        index, token, parent, *_ = self.cut(width, depth)
        if not len(index):
            return Path(token, np.zeros(0))
        first = int(np.searchsorted(index, int(index[-1]) // width * width))
        at = first + int(self.log_f[first : len(index)].argmax())
        nodes = [at]
        while parent[at] >= 0:
            at = int(np.searchsorted(index, parent[at]))
            nodes.append(at)
        nodes.reverse()
        return Path(token[nodes], np.exp(np.minimum(self.log_f[nodes], 0.0).astype(np.float64)))


class Ends:
    """How rounds of one target end: it takes so many tokens of the likeliest path and no other. Beyond the path there
    is one more, the target's own. One that verifies whole trees never ends within a path; one that cuts them ends where
    it cut. Shares are of the chance that the tree gives the path up to there."""

    def __init__(self) -> None:
        self._happened = np.zeros(0)
        self._expected = np.zeros(0)

    def likeliest(self, path: Path) -> tuple[int, float]:
        """Tokens of the likeliest end, path.depth + 1 with an own one behind the path, and its chance. path: not empty
        unless (0, 0.0) will do."""
        if not path.depth:
            return 0, 0.0
        self._grow(path.depth + 1)
        prior = np.zeros(path.depth + 1)
        prior[-1] = PRIOR  # whole trees, until it shows
        happened, expected = self._happened[: path.depth + 1], self._expected[: path.depth + 1]
        chance = _ends(path) * (happened + prior) / (expected + PRIOR)
        count = int(chance.argmax())
        return count + 1, min(float(chance[count]), 1.0)

    def saw(self, path: Path, tokens: np.ndarray) -> None:
        """The target took these tokens. What it took beyond the path is its own."""
        size = path.depth + 1
        self._grow(size)
        self._happened *= MEMORY
        self._expected *= MEMORY
        self._expected[:size] += _ends(path)
        both = min(len(tokens), path.depth)
        if 0 < len(tokens) <= size and np.array_equal(tokens[:both], path.tokens[:both]):
            self._happened[len(tokens) - 1] += 1.0

    def _grow(self, size: int) -> None:
        more = size - len(self._happened)
        if more > 0:
            self._happened, self._expected = (np.pad(part, (0, more)) for part in (self._happened, self._expected))


def _ends(path: Path) -> np.ndarray:
    """f64[D + 1]: the chance of the path up to each end; the own token behind it counts as certain here."""
    return np.append(path.chance, path.chance[-1])


class Guess:
    """A text that a session may ask for next. path: of the tree it was answered. text: i32[n], as far as it is guessed;
    is_whole: all of it is, else the target's own token lacks. held: how many tokens of it the KV holds. depth, width,
    calibrated: of the search, as they were last asked. found: its tree, once there."""

    def __init__(self, text: np.ndarray, path: Path, count: int, chance: float, draft: Draft):
        """The session's text, with `count` tokens of path and own one."""
        self.path = path
        self.text = np.concatenate([text, path.tokens[:count]])
        self.is_whole = count <= path.depth
        self.held = len(text)
        self.chance = chance
        self.depth, self.width = int(draft.depth), int(draft.width)
        self.calibrated = bool(draft.calibrated)
        self.found: Found | None = None
        self._draft = draft

    @property
    def feed(self) -> np.ndarray:
        """What the KV lacks, i32[n]; at least the last token, from whose logits a tree grows."""
        return self.text[min(self.held, len(self.text) - 1) :]

    def completed(self, found: Found) -> Guess:
        """With the token that the draft itself would take behind the path, which a search of one level found."""
        own = found.best_path(self.width, 1)
        whole = Guess(self.text, own, 1, self.chance * float(own.chance[0]), self._draft)
        whole.path, whole.held = self.path, self.held
        return whole

    def is_of(self, text: np.ndarray) -> bool:
        """Whether this is the text that was guessed, whole."""
        return self.is_whole and np.array_equal(self.text, text)

    def fits(self, draft: Draft) -> bool:
        """Whether a Draft of this text asks for this tree, or for its first levels."""
        return draft.depth <= self.depth and draft.width == self.width and bool(draft.calibrated) == self.calibrated

    def common(self, text: np.ndarray) -> int:
        """Tokens that a text has in common with what the KV holds."""
        both = min(len(text), self.held)
        differs = np.flatnonzero(self.text[:both] != text[:both])
        return int(differs[0]) if len(differs) else both
