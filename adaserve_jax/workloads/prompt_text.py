"""Writes the texts of requests that are known by length only: so many tokens, out of the packaged workload's text.

Prompts are words that follow each other as they do there, so that a draft model has something to be right about.
Equal blocks give equal beginnings; other prompts begin with a number of their own, so that they share no cached pages.
Knows no engine: tokens are counted by whatever counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import numpy as np

from adaserve_jax.workloads.items import Lengths
from adaserve_jax.workloads.workload import load_workload

CACHED_BLOCKS = 4096
CONTEXT_CHARACTERS = 48
"""Characters before a piece that are counted with it: a word or two, since tokens do not reach across words."""
ANY_WORD = "The"
"""Text before a block while its tokens are counted."""
SAMPLE = 10
"""Passages by which tokens for each word are estimated."""
MOST_GUESSES, SLACK = 30, 16
"""Slack, tokens: how near a guess comes before words are added one by one."""
FILLERS = (" a", " x", ".", "a", "\n")
"""Short words of which each adds one token wherever it stands, in any usual tokenizer."""
_WORD = re.compile(r"\s*\S+")
_ABOUT = re.compile(r"\w{1,8}|[^\w\s]")
_BLOCK, _OWN = range(2)
"""Streams of words: named by a block, or by a request's seed."""

CountTokens = Callable[[str], int]


def about_tokens(text: str) -> int:
    """Return roughly the number of tokens of a text, where no tokenizer is at hand: one for up to eight letters of a
    word, and for each sign."""
    return len(_ABOUT.findall(text))


class PromptWriter:
    """Writes prompts whose tokens `count_tokens` counts, special tokens included. Keeps the blocks it wrote last."""

    def __init__(self, count_tokens: CountTokens):
        self._count = count_tokens
        texts = ("\n".join([item.prompt or "", *(m.content for m in item.messages)]) for item in load_workload().items)
        self._passages = [_WORD.findall(f"\n\n{text.strip()}") for text in texts]
        sample = "".join(word for passage in self._passages[:SAMPLE] for word in passage)
        self._per_word = max(count_tokens(sample) / len(sample.split()), 0.1)
        self._block = lru_cache(CACHED_BLOCKS)(self._written_block)

    def write(self, lengths: Lengths, seed: int) -> str:
        """Write a prompt of exactly `lengths.prompt_tokens` tokens, or of slightly fewer if the tokenizer has no
        one-token words to fill up with. It depends only on its blocks, or on the seed if there are none."""
        whole, end = lengths.blocks[:-1], lengths.blocks[-1:]
        start = "".join(self._block(name, lengths.block_tokens) for name in whole).lstrip()
        while start and self._count(start) > lengths.prompt_tokens:
            start = start[:-1]
        key = (_BLOCK, *end) if end else (_OWN, seed % 2**64)
        words = self._words(key)
        if not start:
            words.begin_bare()
        return start + self._continued(start, words, lengths.prompt_tokens)

    def _written_block(self, name: int, tokens: int) -> str:
        """Return the text of a block inside a prompt; it depends only on the block's name and tokens."""
        return self._continued(ANY_WORD, self._words((_BLOCK, name)), self._count(ANY_WORD) + tokens)

    def _continued(self, before: str, words: _Words, total: int) -> str:
        """Return the text that makes `before` `total` tokens long. A long text is counted as a whole only a few times:
        most words are guessed at once, and the last ones are fitted to its end alone."""
        count, have = self._guessed(before, words, total - SLACK)
        begun = before + words.text(0, count)
        near = begun[-CONTEXT_CHARACTERS:]
        end = self._fitted(near, words, count, self._count(near) + total - have)
        if self._count(begun + end) != total:
            end = self._fitted(begun, words, count, total)
        return words.text(0, count) + end

    def _guessed(self, before: str, words: _Words, aim: int) -> tuple[int, int]:
        """Return the number of words after which `before` has at most `aim` tokens and nearly that many, and how many
        it has."""
        base, per_word = self._count(before), self._per_word
        low, have, high = 0, base, None
        for _ in range(MOST_GUESSES):
            guess = low + max(1, round((aim - have) / per_word))
            if high is not None and guess >= high:
                guess = (low + high) // 2
            if aim - have < SLACK or guess == low:
                break
            found = self._count(before + words.text(0, guess))
            per_word = max((found - base) / guess, 0.1)
            if found <= aim:
                low, have = guess, found
            else:
                high = guess
        return low, have

    def _fitted(self, before: str, words: _Words, first: int, aim: int) -> str:
        """Return the words from `first` on after which `before` has `aim` tokens, or the next fewer; what is left is
        filled with words of one token."""
        last = first
        while self._count(before + words.text(first, last + 1)) <= aim and last - first < aim:
            last += 1
        text = words.text(first, last)
        missing = aim - self._count(before + text)
        if missing <= 0:
            return text
        counted = {filler: self._count(before + text + filler * missing) for filler in FILLERS}
        return text + max((f for f in FILLERS if counted[f] <= aim), key=counted.__getitem__, default="") * missing

    def _words(self, key: tuple[int, ...]) -> _Words:
        return _Words(self._stream(np.random.default_rng(key)))

    def _stream(self, rng: np.random.Generator) -> Iterator[str]:
        """Yield words without end, with the white space before them: a number, so that no other text begins alike, then
        from anywhere in a passage on, then passage after passage in an order of its own."""
        yield f" {rng.integers(10**6):06d}:"
        first = self._passages[rng.integers(len(self._passages))]
        begin = int(rng.integers(len(first)))
        yield " " + first[begin].lstrip()
        yield from first[begin + 1 :]
        while True:
            for number in rng.permutation(len(self._passages)).tolist():
                yield from self._passages[number]


class _Words:
    """Words of a stream by number."""

    def __init__(self, stream: Iterator[str]):
        self._stream = stream
        self._drawn: list[str] = []

    def begin_bare(self) -> None:
        """Take away the white space before the first word."""
        self._drawn = [next(self._stream).lstrip()]

    def text(self, first: int, last: int) -> str:
        self._drawn += islice(self._stream, max(0, last - len(self._drawn)))
        return "".join(self._drawn[first:last])
