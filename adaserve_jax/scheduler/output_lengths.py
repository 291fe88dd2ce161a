"""Bounds on how much a sequence still writes, learned from the sequences that ended."""

from __future__ import annotations

from collections import deque

import numpy as np

KEPT = 256
"""Ended sequences of one size of prompt that are remembered."""
FEWEST = 8
"""Ended sequences at least as long as a running one that a bound needs."""
LOWER, UPPER = 0.1, 0.9
"""Shares of the sequences that are at most as long as the lower bound and as the upper one. Source: the upper is
JITServe's.
"""


class OutputLengths:
    """Quantiles of output lengths by size of prompt (a power of two), among sequences that wrote at least as much.

    A bound is refined as the text grows: each token rules out the sequences that had ended before it. Nothing is known
    of a sequence itself: neither its `max_tokens` nor its end.
    """

    def __init__(self) -> None:
        self._ended: dict[int, deque[int]] = {}
        self._sorted: dict[int, np.ndarray] = {}

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take in a sequence that ended by itself."""
        size = prompt_tokens.bit_length()
        self._ended.setdefault(size, deque(maxlen=KEPT)).append(output_tokens)
        self._sorted.pop(size, None)

    def remaining(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray, share: float) -> np.ndarray:
        """Return i64[R], tokens to the quantile `share` of the whole length; 0 where too little is known.

        prompt_tokens, output_tokens: i64[R], of each sequence so far.
        """
        found = np.zeros(len(prompt_tokens), np.int64)
        sizes = np.frexp(prompt_tokens)[1]  # the bit length of an integer above 0
        for size in np.unique(sizes).tolist():
            rows = (sizes == size).nonzero()[0]
            lengths = self._lengths(size)
            shorter = np.searchsorted(lengths, output_tokens[rows], side="right")
            left = len(lengths) - shorter
            rows, shorter, left = rows[left >= FEWEST], shorter[left >= FEWEST], left[left >= FEWEST]
            place = shorter + np.ceil(share * left).astype(np.int64) - 1
            found[rows] = lengths[place] - output_tokens[rows]
        return found

    def _lengths(self, size: int) -> np.ndarray:
        lengths = self._sorted.get(size)
        if lengths is None:
            lengths = self._sorted[size] = np.sort(np.array(self._ended.get(size, ()), np.int64))
        return lengths
