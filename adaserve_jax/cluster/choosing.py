"""Which target a request goes to: the routers of the simulator (`bench/routers.py`) over what is known of real servers.

The seconds of a step, which they reckon with, are those of a measured profile; without one, a guess around the time of
one token that a target says of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from adaserve_jax.bench.machines import Machine, load_machine
from adaserve_jax.bench.routers import Assigned, Router, find_router
from adaserve_jax.scheduler.cost import CostTable

GUESSED_BASELINE_S = 0.02
GUESSED_REQUESTS = 16
TOKENS_THAT_DOUBLE_A_STEP = 64
"""A guess: a step of so many packed tokens takes twice as long as one of a single token."""
LEVEL_SHARE = 0.1
"""A guess: of the time of one token, what a level of the draft's search takes."""
GUESSED_DEPTH = 4
REAL_CHANGE = 0.25
"""Of the time of one token, by its share; less is how it scatters from start to start."""


def guessed_machine(baseline_s: float, max_requests: int) -> Machine:
    """A machine that takes baseline_s for one token, and otherwise what is guessed above."""
    tokens = max(max_requests * (GUESSED_DEPTH + 1), TOKENS_THAT_DOUBLE_A_STEP)
    most = -(-tokens // TOKENS_THAT_DOUBLE_A_STEP) * TOKENS_THAT_DOUBLE_A_STEP
    base_ms = baseline_s * 1e3
    return Machine(
        name="guessed", about="from the time of one token",
        verify_ms={1: base_ms, most: base_ms * (1 + most / TOKENS_THAT_DOUBLE_A_STEP)},
        draft_level_ms=LEVEL_SHARE * base_ms, max_depth=GUESSED_DEPTH, max_width=1, max_requests=max_requests,
        max_tree_tokens=most, max_batch_tokens=most, token_step=16, max_context=2**15, acceptance={"default": 0.7},
    )  # fmt: skip


class Chooser:
    """A router by name, over targets that may come and go. profile: path of a measured one, or None. Raises
    ConfigError."""

    def __init__(self, name: str, profile: str | None):
        self._name = name
        self._machine = None if profile is None else load_machine(profile)
        self._learned: tuple[float, int] | None = None
        self._router = self._build(self._machine or guessed_machine(GUESSED_BASELINE_S, GUESSED_REQUESTS))

    def learn(self, baseline_s: float, max_requests: int) -> None:
        """What a target says of itself, both above 0; without effect where there is a measured profile, and where it is
        what was said before but for how such times scatter: a new router has forgotten how long outputs are."""
        if self._machine is not None:
            return
        before_s, before = self._learned or (0.0, 0)
        if max_requests != before or abs(baseline_s - before_s) > REAL_CHANGE * before_s:
            self._learned = (baseline_s, max_requests)
            self._router = self._build(guessed_machine(baseline_s, max_requests))

    def choose(self, request: Assigned, targets: Sequence[list[Assigned]], now: float) -> int:
        """Index of the target that gets `request`. targets: what each has, at least one of them."""
        return 0 if len(targets) == 1 else self._router.choose(request, targets, now)

    def ended(self, request: Assigned) -> None:
        """received: its whole output."""
        self._router.ended(request)

    def _build(self, machine: Machine) -> Router:
        limits = machine.limits()
        return find_router(self._name)(CostTable(machine.samples(limits), limits), limits)
