"""When the tokens of simulated requests came, taken in a step at a time and not a request at a time."""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.updates import StepUpdates

_NONE = -1


class TokenTimes:
    """Requests are known by `StepUpdates.sequence`, their number in the order in which the scheduler got them.

    A request that has tokens owns a row of times and counts, one column per step that brought some, until `pop`.
    """

    def __init__(self) -> None:
        self._row = np.full(1024, _NONE, np.int64)  # by sequence
        self._free: list[int] = []
        self._times_s = np.zeros((0, 64))
        self._counts = np.zeros((0, 64), np.int32)
        self._steps = np.zeros(0, np.int64)  # columns in use, by row

    def take(self, updates: StepUpdates, now: float) -> None:
        """Every request of `updates` got its new tokens at `now`."""
        sequence = updates.sequence
        try:
            rows = self._row[sequence]
        except IndexError:
            more = np.full(max(len(self._row), int(sequence.max()) + 1), _NONE, np.int64)
            self._row = np.concatenate([self._row, more])
            rows = self._row[sequence]
        new = rows == _NONE
        if np.count_nonzero(new):
            for each in sequence[new].tolist():
                self._row[each] = self._free_row()
            rows = self._row[sequence]
        steps = self._steps[rows]
        if np.count_nonzero(steps == self._times_s.shape[1]):
            self._times_s = np.concatenate([self._times_s, np.zeros_like(self._times_s)], axis=1)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._times_s[rows, steps] = now
        self._counts[rows, steps] = updates.counts
        self._steps[rows] = steps + 1

    def pop(self, sequence: int) -> tuple[float, ...]:
        """Seconds of each token of a request since its first one; tokens of one step share their time."""
        row = int(self._row[sequence]) if sequence < len(self._row) else _NONE
        if row == _NONE:
            return ()
        steps = int(self._steps[row])
        times_s = self._times_s[row, :steps] - self._times_s[row, 0]
        self._row[sequence] = _NONE
        self._steps[row] = 0
        self._free.append(row)
        return tuple(np.repeat(times_s, self._counts[row, :steps]).tolist())

    def _free_row(self) -> int:
        if not self._free:
            rows = len(self._steps)
            more = max(rows, 64)
            self._free = list(range(rows + more - 1, rows - 1, -1))
            self._times_s = np.concatenate([self._times_s, np.zeros((more, self._times_s.shape[1]))])
            self._counts = np.concatenate([self._counts, np.zeros((more, self._counts.shape[1]), np.int32)])
            self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
        return self._free.pop()
