"""The suffix source: candidate trees of what followed the last tokens of a text when they stood somewhere before.

It looks in the row's own prompt and output, and in texts that ended lately under the same salt. Nothing is computed on
a device. Source: SuffixDecoding (arXiv 2411.04975) and prompt lookup; kernels.py says how occurrences are found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve_jax.suffix.kernels import (
    BINS,
    CONTEXTS,
    DEPTH_CLASSES,
    KINDS,
    index_tokens,
    propose_rows,
)
from adaserve_jax.types import CandidateTrees

WIDEST_LEVELS = (4, 4, 4, 3, 3, 2, 2, 2)
"""Most nodes of the first levels of a tree; deeper levels have one, the likeliest."""
MOST_SALTS = 4096
"""Salts that are remembered before those without a text in the store are dropped."""
GREEDY_CHANCE = (0.35, 0.50, 0.65, 0.78, 0.88, 0.93, 0.96, 0.98)
"""Chance by bin of match length that an undisputed continuation is right at temperature 0. These tables are rounded
from outcomes of the tasks of `benchmarks/engine/draft_sources.py`, and lower for short matches, which open text has
more of.
"""
KIND_FACTOR = (1.0, 0.6, 0.35, 0.18, 0.1, 0.95, 0.4, 0.2, 0.12, 0.1)
"""Factors on it: first choice with nearly all, most, or less of the occurrences, second, later; then the same in other
texts."""
NOISE_CHANCE = (0.10, 0.35, 0.52, 0.65, 0.76, 0.84, 0.89, 0.95)
"""Chance by bin of perturbed log-odds that a first choice is drawn at temperatures above 0."""
LATER_FACTOR = 0.4
"""Factor on it for later choices: the first one was not drawn."""


def prior_chances() -> np.ndarray:
    """Return the chances that are assumed before anything was verified, f32[2, DEPTH_CLASSES, KINDS, BINS]."""
    factor = np.array(KIND_FACTOR)[:, None]
    greedy = np.broadcast_to(np.array(GREEDY_CHANCE) * factor, (DEPTH_CLASSES, KINDS, BINS))
    later = np.where(np.arange(KINDS) % 5 > 2, LATER_FACTOR, 1.0)[:, None]
    coupled = np.broadcast_to(np.array(NOISE_CHANCE) * later, (DEPTH_CLASSES, KINDS, BINS))
    return np.stack([greedy, coupled]).astype(np.float32, order="C")  # another layout compiles the kernels anew


def level_widths(depth: int) -> np.ndarray:
    """Return the most nodes of each of `depth` levels, i64[depth]."""
    return np.array([*WIDEST_LEVELS[:depth], *([1] * (depth - len(WIDEST_LEVELS)))], np.int64)


def source_bytes(slots: int, longest: int, kept_tokens: int) -> int:
    """Return the host memory of a source: `slots` texts of up to `longest` tokens, and `kept_tokens` of ended texts."""
    contexts = len(CONTEXTS)
    own = slots * contexts * 8 * (longest + _heads(longest))
    capacity = _capacity(kept_tokens)
    return own + (capacity * (8 + contexts * 8) + contexts * 8 * _heads(capacity) if capacity else 0)


@dataclass(frozen=True, eq=False)
class TextRows:
    """Rows of a step and their sampling. text: i32[S, W], tokens by slot. number: i64[R], of the sequence in the slot.

    slots, num_tokens: i64[R]. most_depth: i64[R], deepest node that a row can use, 0 for none. seed: u64[R]; choice:
    i32[R]; temperature: f32[R]. salts: [R].
    """

    text: np.ndarray
    slots: np.ndarray
    number: np.ndarray
    num_tokens: np.ndarray
    most_depth: np.ndarray
    seed: np.ndarray
    choice: np.ndarray
    temperature: np.ndarray
    salts: list[str]


class SuffixSource:
    """Indexes of the running texts, by slot, and a bounded store of ended ones. Not thread-safe."""

    def __init__(self, slots: int, depth: int, kept_tokens: int):
        """Set up without texts.

        depth: most levels of a tree. kept_tokens: most tokens of ended texts that are kept, rounded up to a power of
        two, one place behind each text included; 0: none. The oldest go first: a text that is used again is written
        again by the request that used it.
        """
        self.widths = level_widths(depth)
        self._depths = np.repeat(np.arange(1, depth + 1, dtype=np.int32), self.widths)
        self._number = np.full(slots, -1, np.int64)
        self._indexed = np.zeros(slots, np.int64)
        self._head = self._prev = np.zeros((slots, len(CONTEXTS), 1), np.int64)
        capacity = _capacity(kept_tokens)
        self._ring = np.full(max(capacity, 1), -1, np.int32)
        self._ring_salts = np.full(max(capacity, 1), -1, np.int32)
        self._ring_head = np.zeros((len(CONTEXTS), _heads(capacity)), np.int64)
        self._ring_prev = np.zeros((len(CONTEXTS), max(capacity, 1)), np.int64)
        self._capacity = capacity
        self._newest = 1
        self._salts: dict[str, tuple[int, int]] = {}
        self._most_salts = MOST_SALTS
        self._next_salt = 0
        self.prior = prior_chances()
        """Chances that are assumed before anything was verified, f32[2, DEPTH_CLASSES, KINDS, BINS]: at temperature 0,
        and above. What is learned never falls along bins, which are of growing confidence."""

    @property
    def kept_tokens(self) -> int:
        """Places of the store that are taken: tokens of ended texts, and one more behind each text."""
        return min(self._newest - 1, self._capacity)

    def propose(self, rows: TextRows, chance: np.ndarray) -> CandidateTrees:
        """Return the trees of all rows. chance: f32[2, DEPTH_CLASSES, KINDS, BINS], the table in force.

        `cell`, which a candidate's chance is learned by, indexes [DEPTH_CLASSES, KINDS, BINS], flattened; `log_q` is
        the log of a token's share of the occurrences.
        """
        self._follow(rows)
        shape = (len(rows.slots), len(self._depths))
        token, parent, cell = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        log_f, log_q = np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
        salts = np.array([self._salts.get(salt, (-1, 0))[0] for salt in rows.salts], np.int64)
        propose_rows(
            rows.text, rows.slots, rows.num_tokens, rows.most_depth, rows.seed, rows.choice, rows.temperature, salts,
            self._head, self._prev, self._indexed, self._ring, self._ring_salts, self._ring_head, self._ring_prev,
            self._oldest, self._newest, np.ascontiguousarray(chance), self.prior, self.widths,
            token, parent, log_f, cell, log_q,
        )  # fmt: skip
        return CandidateTrees(token, parent, log_f, self._depths, cell, log_q)

    def keep(self, token_ids: np.ndarray, salt: str) -> None:
        """Keep an ended text, i32[n], for rows of the same salt; of a text longer than the store, its end."""
        token_ids = token_ids[-(self._capacity - 1) :] if self._capacity else token_ids[:0]
        if len(token_ids) < 2:
            return
        number = self._salts.get(salt, (self._next_salt, 0))[0]
        self._next_salt = max(self._next_salt, number + 1)
        mask, start, end = self._capacity - 1, self._newest, self._newest + len(token_ids)
        places = np.arange(start, end + 1) & mask
        self._ring[places[:-1]] = token_ids
        self._ring[places[-1]] = -1
        self._ring_salts[places] = number
        index_tokens(self._ring, mask, self._ring_head, self._ring_prev, start, start, end, number)
        self._newest = end + 1
        self._salts[salt] = number, self._newest
        if len(self._salts) > self._most_salts:
            self._salts = {each: found for each, found in self._salts.items() if found[1] > self._oldest}
            self._most_salts = max(MOST_SALTS, 2 * len(self._salts))

    @property
    def _oldest(self) -> int:
        """Position behind which the store still has every token."""
        return max(self._newest - self._capacity, 0) if self._capacity else self._newest

    def _follow(self, rows: TextRows) -> None:
        """Make room for the rows' texts, and start anew in slots that have another sequence than before."""
        width = rows.text.shape[1]
        if self._prev.shape[2] != width:
            slots = len(self._number)
            self._prev = np.zeros((slots, len(CONTEXTS), width), np.int64)
            self._head = np.zeros((slots, len(CONTEXTS), _heads(width)), np.int64)
            self._number[:] = -1
        changed = rows.slots[self._number[rows.slots] != rows.number]
        if len(changed):
            self._head[changed] = 0
            self._indexed[changed] = 0
            self._number[rows.slots] = rows.number


def _heads(tokens: int) -> int:
    """Return how many chains index so many tokens: a power of two."""
    return 1 << max(4, (max(tokens, 2) // 2 - 1).bit_length())


def _capacity(kept_tokens: int) -> int:
    """Return the power of two that holds so many tokens; 0 for none."""
    return 1 << (kept_tokens - 1).bit_length() if kept_tokens > 1 else 0
