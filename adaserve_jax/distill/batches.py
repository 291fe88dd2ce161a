"""Records packed into arrays of one size, so that each piece of training costs the same. NumPy only.

Axes: T packed tokens, N = T rows, K tokens of the target per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from adaserve_jax.distill.records import Record

PADDING = -1
"""Segment of tokens that belong to no text."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts side by side, and the rows that are learned from.

    tokens, position, segment: i32[T]; position counts from 0 in each text, segment says which text, PADDING none.
    at: i32[N], where in `tokens` the token of a row is, the one that was fed when the target scored its successor.
    ids: i32[N, K] and log_p: f32[N, K], the target's likeliest successors. weight: f32[N]; 0: no row, and then nothing
    of it has any effect.
    """

    tokens: np.ndarray
    position: np.ndarray
    segment: np.ndarray
    at: np.ndarray
    ids: np.ndarray
    log_p: np.ndarray
    weight: np.ndarray

    @property
    def arrays(self) -> tuple[Any, ...]:
        """In the order of the fields, as programs take them."""
        return (self.tokens, self.position, self.segment, self.at, self.ids, self.log_p, self.weight)

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self.weight))


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens [start, stop) of a record's text, and rows [first_row, last_row) of it, which lie in there."""

    record: Record
    start: int
    stop: int
    first_row: int
    last_row: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def pack(records: Sequence[Record], num_tokens: int, rng: np.random.Generator) -> list[Batch]:
    """Every row of every record once, in as few batches as first fit finds, windows in an order drawn by rng.

    Texts longer than num_tokens become several windows; a row of one has at least a quarter of a window before it, or
    all that there is. What follows a text's last row is left out: nothing depends on it. All records have one K.
    """
    windows = [window for record in records for window in _windows(record, num_tokens)]
    bins: list[list[Window]] = []
    left: list[int] = []
    for index in rng.permutation(len(windows)):
        window = windows[index]
        place = next((i for i, room in enumerate(left) if room >= window.num_tokens), None)
        if place is None:
            place = len(bins)
            bins.append([])
            left.append(num_tokens)
        bins[place].append(window)
        left[place] -= window.num_tokens
    return [_batch(each, num_tokens) for each in bins]


def _windows(record: Record, num_tokens: int) -> Iterator[Window]:
    position, row = record.position, 0
    while row < len(position):
        before = max(int(position[row]) - num_tokens // 4, 0)
        stop = min(int(position[-1]) + 1, before + num_tokens)
        end = int(np.searchsorted(position, stop))
        stop = int(position[end - 1]) + 1
        yield Window(record, max(0, stop - num_tokens), stop, row, end)
        row = end


def _batch(windows: Sequence[Window], num_tokens: int) -> Batch:
    top = windows[0].record.ids.shape[1]
    batch = Batch(
        tokens=np.zeros(num_tokens, np.int32),
        position=np.zeros(num_tokens, np.int32),
        segment=np.full(num_tokens, PADDING, np.int32),
        at=np.zeros(num_tokens, np.int32),
        ids=np.zeros((num_tokens, top), np.int32),
        log_p=np.zeros((num_tokens, top), np.float32),
        weight=np.zeros(num_tokens, np.float32),
    )
    token = row = 0
    for segment, window in enumerate(windows):
        record, count, rows = window.record, window.num_tokens, window.last_row - window.first_row
        here, taken = slice(token, token + count), slice(window.first_row, window.last_row)
        batch.tokens[here] = record.tokens[window.start : window.stop]
        batch.position[here] = np.arange(count)
        batch.segment[here] = segment
        into = slice(row, row + rows)
        batch.at[into] = record.position[taken] - window.start + token
        batch.ids[into] = record.ids[taken]
        batch.log_p[into] = record.log_p[taken]
        batch.weight[into] = 1
        token, row = token + count, row + rows
    return batch
