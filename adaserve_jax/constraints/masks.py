"""Masks of allowed tokens: bit v % 32 of word v // 32 stands for token v."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def all_but(vocab_size: int, tokens: Iterable[int] = ()) -> np.ndarray:
    """Return a mask, u32[ceil(V / 32)], of all tokens except these; ids beyond the vocabulary are ignored."""
    bits = np.ones(vocab_size, np.uint8)
    bits[[token for token in tokens if token < vocab_size]] = 0
    packed = np.zeros(4 * num_words(vocab_size), np.uint8)
    packed[: -(-vocab_size // 8)] = np.packbits(bits, bitorder="little")
    return packed.view("<u4")


def forbid(mask: np.ndarray, token: int) -> None:
    """Clear one token's bit of a mask, u32[ceil(V / 32)]."""
    mask[token >> 5] &= ~np.uint32(1 << (token & 31))


def allow(mask: np.ndarray, token: int) -> None:
    """Set one token's bit of a mask, u32[ceil(V / 32)]."""
    mask[token >> 5] |= np.uint32(1 << (token & 31))


def has(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask, u32[ceil(V / 32)], allows a token; a draft may have more rows than the target."""
    return token < 32 * len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & 1)
