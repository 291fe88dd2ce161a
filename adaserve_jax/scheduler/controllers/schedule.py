"""When bandits explore: Nightjar's blocks and bins. Knows no arm. Source: Nightjar, algorithm 1."""

from __future__ import annotations

from math import isqrt


class Schedule:
    """When to explore: blocks of H = 1, 2, 4, ... of isqrt(H) bins of isqrt(H) steps each."""

    def __init__(self) -> None:
        self.block = 1
        """j."""
        self.bin = 1
        """k."""
        self.step = 1
        """tau."""

    @property
    def bin_steps(self) -> int:
        """Steps of a bin, and bins of a block."""
        return isqrt(1 << (self.block - 1))

    def advance(self) -> bool:
        """One step on; whether it ended a block."""
        self.step += 1
        if self.step > self.bin_steps:
            self.bin, self.step = self.bin + 1, 1
        if self.bin <= self.bin_steps:
            return False
        self.block, self.bin = self.block + 1, 1
        return True
