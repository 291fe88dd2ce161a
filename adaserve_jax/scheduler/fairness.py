"""Fair shares among the tenants of a class by virtual token counters.

Source: VTC, "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A *flow* is what one tenant sends in
one class. Its counter grows by what it is served: its prompts when they start, its output as it comes. The flow of the
lowest counter is served next, so flows that always have requests waiting are served equally many weighted tokens, and
one that asks for less than its share does not wait behind one that asks for more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import Sequence

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Virtual tokens of a prompt token and of an output token. Source: VTC, w_p and w_q."""


class TenantShares:
    """Virtual token counters of all flows, by index of the flow, and the number of open sequences of each."""

    def __init__(self) -> None:
        self.counters = np.zeros(0)
        """Virtual tokens that each flow was served, f64[F]; lifted where it was idle."""
        self._index: dict[tuple[str, str], int] = {}
        self._classes: list[str] = []
        self._open = np.zeros(0, np.int64)
        self._last_left: dict[str, int] = {}
        """The flow of each class that became idle last."""
        self._turn_s = np.zeros(0)

    def open(self, sequence: Sequence) -> int:
        """Count a new sequence and return the index of its flow.

        The counter of a flow that was idle is lifted to the least one of the active flows of its class, or without any
        to that of the flow that became idle last: time without requests saves up no share.
        """
        name = sequence.slo_class
        flow = self._index.setdefault((name, sequence.tenant), len(self._index))
        if flow == len(self._classes):
            self._classes.append(name)
            self.counters, self._open = np.append(self.counters, 0.0), np.append(self._open, 0)
            self._turn_s = np.append(self._turn_s, -np.inf)
        if not self._open[flow]:
            active = [other for other, of in enumerate(self._classes) if of == name and self._open[other]]
            if active:
                least = float(self.counters[active].min())
            else:
                least = float(self.counters[self._last_left.get(name, flow)])
            self.counters[flow] = max(float(self.counters[flow]), least)
        self._open[flow] += 1
        return flow

    def close(self, flow: int) -> None:
        """Count the end of a sequence."""
        self._open[flow] -= 1
        if not self._open[flow]:
            self._last_left[self._classes[flow]] = flow

    def start(self, state: SequenceState, now: float) -> None:
        """Charge the prompt of a sequence that starts for the first time; the next one of its flow has its turn."""
        self.counters[state.flow] += PROMPT_WEIGHT * state.prompt_len
        self._turn_s[state.flow] = now

    def charge(self, flows: np.ndarray, tokens: np.ndarray) -> None:
        """Charge output tokens (i64[n]) to flows (i64[n], which may repeat)."""
        self.counters += OUTPUT_WEIGHT * np.bincount(flows, tokens, len(self.counters))

    def next_of(self, heads: Iterable[SequenceState]) -> SequenceState | None:
        """Return which of the first waiting sequences, one of each flow, is served next; None without any.

        Inside a class the flow of the lowest counter goes first. Classes compete by the ranks of these sequences, each
        as if it had come when it became the first of its flow: else the backlog of a flow that asks for more than its
        share would be the oldest work of all, and go before every other class.
        """
        best: dict[str, SequenceState] = {}
        for head in heads:
            name = head.sequence.slo_class
            if name not in best or self._claim(head) < self._claim(best[name]):
                best[name] = head
        return min(best.values(), key=self._turn, default=None)

    def over_share(self, running: np.ndarray) -> np.ndarray:
        """Return bool[F], flows that run more than an equal part of all. running: i64[n], flow of each that runs."""
        return np.bincount(running, minlength=len(self.counters)) * np.count_nonzero(self._open) > len(running)

    def _claim(self, state: SequenceState) -> tuple[float, tuple[float, int]]:
        return float(self.counters[state.flow]), state.rank

    def _turn(self, head: SequenceState) -> tuple[float, int]:
        key, number = head.rank
        return key + max(float(self._turn_s[head.flow]) - head.sequence.arrival_s, 0.0), number
