"""When the draft gives its memory to KV pages, and when it gets it back: triggers, minimum stays, waits after failures.

Host side; counts steps and pages, and knows neither requests nor devices. Source: Nightjar, section 6.1, with what
docs/architecture/scheduler.md says about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.errors import ConfigError

State = Literal["resident", "expanded", "loading"]
"""Of the draft: on the device; away, its memory being KV pages; on its way back, where neither is there."""
Transition = Literal["expand", "contract", "reload"]
"""What may be due: give the draft's memory to pages; take it back and begin to load the draft; see whether it is
there."""

TAU_LOW = 0.1
"""Share of the base pages that must be spare: the paper's best."""
T_PERSIST = 16
"""Steps that pages must be short, and speculation off where the policy goes by that. The paper gives none;
docs/architecture/scheduler.md has what was compared."""
MIN_STAY = 64
"""Steps that the draft stays where it is at least: a swap there and back takes as long as some 5 to 10 steps, and the
draft's KV has to be computed anew."""
LONGEST_WAIT = 4096
"""Most steps between two tries of a swap that failed; the first wait is MIN_STAY, and each is twice the one before."""


@dataclass(frozen=True)
class ElasticRule:
    """tau_low: share of the base pages. persist_steps: T_persist. min_stay_steps: that the draft
    stays, or stays away while there are requests.

    Raises ConfigError: a share outside (0, 1), or steps below 1."""

    tau_low: float = TAU_LOW
    persist_steps: int = T_PERSIST
    min_stay_steps: int = MIN_STAY

    def __post_init__(self) -> None:
        if not 0 < self.tau_low < 1:
            raise ConfigError(f"tau_low must be a share of the base pages above 0 and below 1, got {self.tau_low}")
        if min(self.persist_steps, self.min_stay_steps) < 1:
            raise ConfigError(
                "persist_steps and min_stay_steps must be at least 1, got "
                f"{self.persist_steps} and {self.min_stay_steps}"
            )


@dataclass(frozen=True)
class Pressure:
    """Demand for pages after a step. spare: free pages that admission may give away, at least; below 0 when not even
    those that run can all grow by a page. turned_away: whether pages alone kept the next request from running, or took
    them from one that ran. waiting, running: requests."""

    spare: int
    turned_away: bool
    waiting: int
    running: int


class Residency:
    """Where the draft is, and which swap is due. Ask `due` once after each step; tell it how one that was due went."""

    def __init__(self, rule: ElasticRule, base_pages: int, extension_pages: int):
        """base_pages: K_boundary. extension_pages: N_draft."""
        self._rule = rule
        self._extension_pages = extension_pages
        self.tau_low_pages = math.ceil(rule.tau_low * base_pages)
        self.state: State = "resident"
        self._short_steps = 0
        self._stay = rule.min_stay_steps
        """Steps of this state so far; a start is no swap, so it counts as long over."""
        self._wait = 0
        """Steps until a swap that failed may be tried again."""
        self.failures = 0
        """Swaps that failed since the last one that did not."""

    @property
    def draft_is_here(self) -> bool:
        return self.state == "resident"

    def due(
        self, pressure: Pressure, speculates: bool | None, pages_pay: Callable[[], bool] | None = None
    ) -> Transition | None:
        """The swap to do now, once a step. speculates: whether speculation was on in it; None: it had no decode rows,
        so that nothing was decided. pages_pay: whether pages are worth more than the draft; where it is given, it is
        asked after each T_persist steps of short pages, and whether speculation was on in them does not matter."""
        self._stay += 1
        self._wait = max(self._wait - 1, 0)
        if self.state == "loading":
            return None if self._wait else "reload"
        if self.state == "resident":
            self._count(pressure, bool(speculates) and pages_pay is None, speculates is not None)
            return "expand" if self._may_change and self._wants_pages(pages_pay) else None
        idle = not pressure.waiting and not pressure.running
        short = pressure.turned_away and not idle  # the last step's word, which a request that left may have caused
        wants_draft = not short and pressure.spare > self._extension_pages + self.tau_low_pages
        return "contract" if wants_draft and not self._wait and (idle or self._may_change) else None

    def succeeded(self, swap: Transition) -> None:
        """`swap` was done. For "reload": the draft is there."""
        following: dict[Transition, State] = {"expand": "expanded", "contract": "loading", "reload": "resident"}
        self.state = following[swap]
        self._stay = self._short_steps = self._wait = self.failures = 0

    def failed(self) -> None:
        """A swap that was due failed: the state is what it was, and the next try waits, longer each time."""
        self._wait = min(self._rule.min_stay_steps << min(self.failures, LONGEST_WAIT.bit_length()), LONGEST_WAIT)
        self.failures += 1

    @property
    def _may_change(self) -> bool:
        return not self._wait and self._stay >= self._rule.min_stay_steps

    def _count(self, pressure: Pressure, needed: bool, decided: bool) -> None:
        """needed: whether the step speaks for the draft. decided: whether it says anything."""
        short = pressure.turned_away or pressure.spare < self.tau_low_pages
        self._short_steps = self._short_steps + decided if short and not needed else 0

    def _wants_pages(self, pages_pay: Callable[[], bool] | None) -> bool:
        steps = self._rule.persist_steps
        if pages_pay is None:
            return self._short_steps >= steps
        return self._short_steps >= steps and self._short_steps % steps == 0 and pages_pay()
