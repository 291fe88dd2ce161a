"""What a suffix source may propose, by scanning every text: no hashes, no trees, no numba."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_MATCH = 2


def longest_match(text: Sequence[int], other: Sequence[int], position: int) -> int:
    """Return how many of the last tokens of `text` stand in `other` before `position`."""
    length = 0
    while length < min(len(text), position) and text[-1 - length] == other[position - 1 - length]:
        length += 1
    return length


def continuations(text: Sequence[int], others: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Return (length of the match, what followed) of every occurrence of the end of `text` of at least LEAST_MATCH
    tokens: in the text itself, where what follows goes on with itself at the end, and in the others.
    """
    found = []
    for position in range(1, len(text)):
        if (length := longest_match(text, text, position)) >= LEAST_MATCH:
            period = list(text[position:])
            found.append((length, (period * 64)[:64]))
    for other in others:
        lengths = [longest_match(text, other, position) for position in range(len(other))]
        found += [(length, list(other[at:])) for at, length in enumerate(lengths) if length >= LEAST_MATCH]
    return found
