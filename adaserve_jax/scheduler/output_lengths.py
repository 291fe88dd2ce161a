"""Output lengths, learned by class and prompt length: how many tokens a running text has still to write.

A deadline becomes a pace by what is left to write. Nobody knows that, so a text that has written o tokens is compared
with the lately ended ones of its kind that were longer than o.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

TYPICAL = 0.5
"""Share of the texts of a kind that end within the length that is planned for. The plan is corrected as a text grows;
with a larger share more would be reserved than texts come to need, and others would not start.
"""
LOWER, UPPER = 0.1, 0.9
"""Shares that JITServe bounds a length by; the upper is its paper's."""
COLD_TOKENS = 200
"""Output tokens that are planned for before enough texts have ended."""
MEMORY = 256
"""Ended texts that are remembered of a kind."""
ENOUGH = 16
"""Longer texts of a kind below which a coarser kind is asked."""
GROWTH = 0.5
"""Share of its own length that a text longer than all others is expected to write still."""


class EndedLengths:
    """The last lengths of ended texts, sorted."""

    def __init__(self) -> None:
        self._in_order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Remember a length, and forget the oldest one of more than MEMORY."""
        insort(self._sorted, length)
        self._in_order.append(length)
        if len(self._in_order) > MEMORY:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def longer_than(self, length: int) -> int:
        """Return how many of them are longer."""
        return len(self._sorted) - bisect_right(self._sorted, length)

    def quantile_beyond(self, length: int, share: float) -> int:
        """Return the length within which `share` of those that are longer end; there is one at least."""
        first = bisect_right(self._sorted, length)
        last = len(self._sorted) - 1
        return self._sorted[min(first + int(share * (last + 1 - first)), last)]


class OutputLengths:
    """Lengths of ended outputs by class and size of prompt, by class, and of all."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], EndedLengths] = {}
        self._classes: dict[str, EndedLengths] = {}
        self._all = EndedLengths()

    def observe(self, slo_class: str, prompt_tokens: int, output_tokens: int) -> None:
        """Take in an output that ended by itself or at its length limit."""
        kind = slo_class, prompt_tokens.bit_length()
        self._kinds.setdefault(kind, EndedLengths()).add(output_tokens)
        self._classes.setdefault(slo_class, EndedLengths()).add(output_tokens)
        self._all.add(output_tokens)

    def left(self, slo_class: str, prompt_tokens: int, written: int, most: int, share: float = TYPICAL) -> int:
        """Return the tokens within which `share` of such outputs end, from 1 to `most`, the tokens to its length limit.

        written: tokens that it has.
        """
        learned = self.learned_left(slo_class, prompt_tokens, written, share)
        planned = max(COLD_TOKENS - written, int(GROWTH * written)) if learned is None else learned
        return max(1, min(planned, most))

    def learned_left(self, slo_class: str, prompt_tokens: int, written: int, share: float) -> int | None:
        """Return the same without bounds; None where too few outputs were longer."""
        known = (self._kinds.get((slo_class, prompt_tokens.bit_length())), self._classes.get(slo_class), self._all)
        for lengths in known:
            if lengths is not None and lengths.longer_than(written) >= ENOUGH:
                return lengths.quantile_beyond(written, share) - written
        return None
