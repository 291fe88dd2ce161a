"""Bad words: finds the tokens that would complete a banned word after each node of a tree.

A word is banned as its own tokens and as its tokens after a space. Spelled by other tokens, it may appear.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np

Spelling = tuple[int, ...]


class Spells(Protocol):
    """The part of a tokenizer that constraints use."""

    def spell(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        ...


def spellings(tokenizer: Spells, words: Iterable[str]) -> set[Spelling]:
    """Return the token sequences to ban for these words. Raises RequestError: a word is no valid Unicode."""
    found = {tuple(tokenizer.spell(text)) for word in words for text in (word, " " + word.lstrip(" "))}
    return found - {()}


class BadWords:
    """Banned spellings, indexed by the token before their last. always: tokens that are a banned word by themselves."""

    def __init__(self, spelled: Collection[Spelling]):
        self.always = frozenset(spelling[0] for spelling in spelled if len(spelling) == 1)
        self._memory = max((len(spelling) - 1 for spelling in spelled), default=0)
        self._by_last: dict[int, list[Spelling]] = {}
        for spelling in spelled:
            if len(spelling) > 1:
                self._by_last.setdefault(spelling[-2], []).append(spelling)

    def completions(self, output: list[int], tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, int]]:
        """Return (node, token) for each token that would complete a word of several tokens after the path to a node.

        output: tokens so far, with the root's if it is one of them. tokens, parents: i32[N] of one tree, the root
        (parent -1) first.
        """
        if not self._by_last:
            return []
        found, tails = [], []
        for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            tail = output[-self._memory :] if parent < 0 else [*tails[parent], token][-self._memory :]
            tails.append(tail)
            for spelling in self._by_last.get(tail[-1], ()) if tail else ():
                before = len(spelling) - 1
                if tuple(tail[-before:]) == spelling[:-1]:
                    found.append((node, spelling[-1]))
        return found
