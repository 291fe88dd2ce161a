"""Finds stop strings in text that arrives in pieces, in one pass (Knuth-Morris-Pratt). Imports no jax."""

from __future__ import annotations


class StopMatcher:
    """Follows one text. The stop string that completes first wins; of several that complete together, the longest.

    Work is constant per character and stop string, whatever the text.
    """

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._borders = [_borders(pattern) for pattern in stop]
        self._matched = [0] * len(stop)

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Take in the next piece. Returns (characters of it up to the end of the stop string, the stop string's
        length) once one is complete, and must not be fed again; else None."""
        for end, char in enumerate(text, start=1):
            done = 0
            for index, pattern in enumerate(self._stop):
                borders, matched = self._borders[index], self._matched[index]
                while matched and pattern[matched] != char:
                    matched = borders[matched]
                matched += pattern[matched] == char
                self._matched[index] = matched
                if matched == len(pattern):
                    done = max(done, matched)
            if done:
                return end, done
        return None


def _borders(pattern: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of pattern[:n] that is also its suffix."""
    borders = [0, 0]
    for char in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != char:
            length = borders[length]
        borders.append(length + (pattern[length] == char))
    return borders
