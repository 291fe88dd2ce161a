"""Loops of the simulated texts over rows and nodes, compiled by numba: draws, the draft's search, the target's walk."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaserve_jax.compiled import compiled

_SEED, _CHOICE = np.uint64(0xD1342543DE82EF95), np.uint64(0xA0761D6478BD642F)
_POSITION, _KIND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xE7037ED1A0B428DB)
"""A word moves on by _POSITION for the next position, and by _KIND for each of the other draws there: what the draft
gets right, and how well it does.
"""
LEAST_F = float(np.finfo(np.float64).tiny)
"""Least f of a node that is there: 0 is the f of an absent one."""


@compiled
def _word(seed: Any, choice: Any) -> Any:
    """Return the word of the text of one sequence, u64; arguments u64."""
    return seed * _SEED + choice * _CHOICE


@compiled
def _mixed(value: Any) -> Any:
    """Return a u64 mixed by splitmix64's last steps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def draw_tokens(seed: Any, choice: Any, root: Any, vocab_size: Any, tokens: Any) -> None:
    """Enter `text.tokens_after` into tokens, i32[R, count]."""
    for row in range(len(seed)):
        word = _word(np.uint64(seed[row]), np.uint64(choice[row]))
        for level in range(tokens.shape[1]):
            draw = _mixed(word + np.uint64(root[row] + level + 1) * _POSITION)
            tokens[row, level] = draw % np.uint64(vocab_size)


@compiled
def draw_luck(seed: Any, choice: Any, root: Any, luck: Any, mood: Any) -> None:
    """Enter what the draft gets right into luck, f64[R, depth], and how well it does into mood, f64[R, depth]."""
    for row in range(len(seed)):
        word = _word(np.uint64(seed[row]), np.uint64(choice[row]))
        for level in range(luck.shape[1]):
            drawn = word + np.uint64(root[row] + level + 1) * _POSITION + _KIND
            luck[row, level] = (_mixed(drawn) >> np.uint64(11)) * 2.0**-53
            mood[row, level] = (_mixed(drawn + _KIND) >> np.uint64(11)) * 2.0**-53


@compiled
def search(
    target: Any, luck: Any, a: Any, said: Any, decay: Any, width: Any, vocab_size: Any, f: Any, token: Any, parent: Any
) -> None:  # fmt: skip
    """Enter `text.search` into f, token and parent, [R, C] each. said: f64[R, depth], a as the draft states it."""
    chance, tried, true = np.empty(width), np.empty(width, np.int64), np.empty((2, width), np.bool_)
    for row in range(a.shape[0]):
        for level in range(a.shape[1]):
            picked, choice_a, missed = 0, a[row, level], 1 - a[row, level]
            while picked < width and luck[row, level] >= 1 - missed:
                choice_a *= decay
                missed *= 1 - choice_a
                picked += 1
            chance[0] = choice_a = said[row, level]
            for rank in range(1, width):
                chance[rank] = chance[rank - 1] * (1 - choice_a) * decay
                choice_a *= decay
            first, above = level * width, (level - 1) * width
            tried[:] = 0
            for rank in range(width):
                best, most = 0, -1.0
                for node in range(width if level else 1):  # a node's children are in order: its best one left
                    if tried[node] < width:
                        path = f[row, above + node] * chance[tried[node]] if level else chance[tried[node]]
                        if path > most:
                            best, most = node, path
                child = tried[best]
                tried[best] += 1
                is_true = child == picked and (level == 0 or true[(level - 1) % 2, best])
                true[level % 2, rank] = is_true
                f[row, first + rank] = max(most, LEAST_F)
                right = target[row, level]
                token[row, first + rank] = right if is_true else (right + 1 + rank) % vocab_size
                parent[row, first + rank] = above + best if level else -1


@compiled
def walk(row: Any, token: Any, parent: Any, depth: Any, root_token: Any, target: Any, walked: Any, counts: Any) -> Any:
    """Enter `text.walk` into walked and counts; return False where it returns None. row, token, parent, depth: as of
    `DraftTrees`.
    """
    roots = 0
    for node in range(len(row)):
        at = row[node]
        if parent[node] < 0:
            if at != roots or roots == len(root_token) or token[node] != root_token[roots]:
                return False
            roots += 1
            walked[node] = True
            counts[at] = 1
        else:
            walked[node] = walked[parent[node]] and token[node] == target[at, depth[node] - 1]
            counts[at] += walked[node]
    return roots == len(root_token)
