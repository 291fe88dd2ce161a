"""What options have shown at some sizes of batch, beside what was predicted of them: ratios that correct predictions.

Knows no option, clock or table.
"""

from __future__ import annotations

import numpy as np

MEAN_SHARE = 0.35
"""Of the plain mean in a blended ratio; the moving average, which follows changes, has the rest."""
RATIO_LIMIT = 4.0
"""A single ratio counts as no larger than this, and no smaller than its inverse."""


class Ratios:
    """Measured over predicted of O options. factor: f64[O], 1 for an option that has shown nothing, kept up to date.

    noise: how far a factor may be from 1 and correct nothing. prior: weight of the prediction itself. lately: weight
    over which the moving average forgets all but 1 / e; memory: most weight that the mean stands for.
    """

    def __init__(self, options: int, *, noise: float, prior: float, lately: float, memory: float):
        self.factor = np.ones(options)
        self._noise = noise
        self._correcting: set[int] = set()
        self._prior, self._lately_weight, self._memory = prior, lately, memory
        self._weight = [0.0] * options
        self._mean = [1.0] * options
        self._lately = [1.0] * options

    def learn(self, option: int, ratio: float, weight: float) -> None:
        """One measurement of that weight."""
        ratio = min(max(ratio, 1 / RATIO_LIMIT), RATIO_LIMIT)
        total = self._weight[option] + weight
        self._mean[option] += weight / total * (ratio - self._mean[option])
        rate = max(weight / total, weight / (weight + self._lately_weight))
        self._lately[option] += rate * (ratio - self._lately[option])
        self._weight[option] = min(total, self._memory)
        self._set(option)

    @property
    def corrects(self) -> bool:
        """Whether any factor is not 1."""
        return bool(self._correcting)

    def doubt(self, option: int) -> float:
        """Share of the prediction in the factor: 1 for an option that has shown nothing."""
        return self._prior / (self._prior + self._weight[option])

    def fade(self, share: float) -> None:
        """Let all that was shown weigh `share` of what it did."""
        for option, weight in enumerate(self._weight):
            if weight:
                self._weight[option] = weight * share
                self._set(option)

    def _set(self, option: int) -> None:
        blended = MEAN_SHARE * self._mean[option] + (1 - MEAN_SHARE) * self._lately[option]
        off = (1 - self.doubt(option)) * (blended - 1)
        corrects = abs(off) > self._noise
        self.factor[option] = 1 + off if corrects else 1.0
        (self._correcting.add if corrects else self._correcting.discard)(option)
