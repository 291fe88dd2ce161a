"""Residency of the draft: when its memory becomes KV pages and when it comes back.

Decides by triggers, minimum stays and waits after failures; counts steps and pages. Source: Nightjar, section 6.1, with
the changes that docs/architecture/scheduler.md lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from adaserve_jax.errors import ConfigError

State = Literal["resident", "expanded", "loading"]
"""State of the draft: on the device; away, with KV pages in its memory; or on its way back, with neither there."""
Transition = Literal["expand", "contract", "reload"]
"""Transitions: give the draft's memory to pages; take it back and begin to load the draft; ask whether it is loaded."""

TAU_LOW = 0.1
"""Share of the base pages that must be free: the paper's best."""
T_PERSIST = 16
"""Steps that pages must be short before an expansion, with speculation off if the policy goes by that. The paper
gives none; docs/nightjar/tables.md has the comparison.
"""
MIN_STAY = 64
"""Fewest steps that the draft stays where it is. A move there and back takes as long as some 5 to 10 steps, and the
draft's KV has to be computed anew.
"""
LONGEST_WAIT = 4096
"""Most steps between two attempts of a transition that failed. The first wait is MIN_STAY; each is twice the one
before.
"""


@dataclass(frozen=True)
class ElasticRule:
    """Parameters of the residency.

    tau_low: share of the base pages that must be free. persist_steps: T_persist. min_stay_steps: fewest steps that the
    draft stays, or stays away while there are requests. Raises ConfigError for a share outside (0, 1) or steps below 1.
    """

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
class PagePressure:
    """Demand for pages after a step.

    free_pages: pages that admission may give away; below 0 if not all running sequences can grow by a page.
    blocked_on_pages: the last plan kept a sequence from starting, or preempted one, only because pages were short.
    waiting, running: sequences.
    """

    free_pages: int
    blocked_on_pages: bool
    waiting: int
    running: int


class Residency:
    """State machine of the draft's memory. Ask `due` once after each step; report how a transition went."""

    def __init__(self, rule: ElasticRule, base_pages: int, extension_pages: int):
        """Start with the draft resident. base_pages: K_boundary of the paper; extension_pages: its N_draft."""
        self._rule = rule
        self._extension_pages = extension_pages
        self.tau_low_pages = math.ceil(rule.tau_low * base_pages)
        self.state: State = "resident"
        self._short_steps = 0
        self._stay = rule.min_stay_steps
        """Steps in this state so far; the start is no transition, so its minimum stay counts as over."""
        self._wait = 0
        """Steps until a transition that failed may be tried again."""
        self.failures = 0
        """Transitions that failed since the last one that did not."""

    @property
    def draft_is_here(self) -> bool:
        """True while the draft is resident."""
        return self.state == "resident"

    def due(
        self, pressure: PagePressure, speculates: bool | None, pages_pay: Callable[[], bool] | None = None
    ) -> Transition | None:
        """Return the transition to make now, or None. Each call counts as a step.

        speculates: whether speculation was on in the step; None if it had no decode rows, so that nothing was decided.
        pages_pay: returns whether pages are worth more than the draft. If given, it is asked after each T_persist steps
        of short pages, and whether speculation was on does not matter.
        """
        self._stay += 1
        self._wait = max(self._wait - 1, 0)
        if self.state == "loading":
            return None if self._wait else "reload"
        if self.state == "resident":
            decided = speculates is not None
            self._count(pressure, bool(speculates) and pages_pay is None, decided)
            return "expand" if self._may_change and self._wants_pages(decided, pages_pay) else None
        idle = not pressure.waiting and not pressure.running
        # while idle this flag is stale: the sequence that was blocked has left
        short = pressure.blocked_on_pages and not idle
        wants_draft = not short and pressure.free_pages > self._extension_pages + self.tau_low_pages
        return "contract" if wants_draft and not self._wait and (idle or self._may_change) else None

    def succeeded(self, transition: Transition) -> None:
        """Record that a transition was made; "reload" means that the draft is resident."""
        following: dict[Transition, State] = {"expand": "expanded", "contract": "loading", "reload": "resident"}
        self.state = following[transition]
        self._stay = self._short_steps = self._wait = self.failures = 0

    def failed(self) -> None:
        """Record that a transition failed: the state stays, and the next attempt waits, longer each time."""
        self._wait = min(self._rule.min_stay_steps << min(self.failures, LONGEST_WAIT.bit_length()), LONGEST_WAIT)
        self.failures += 1

    @property
    def _may_change(self) -> bool:
        return not self._wait and self._stay >= self._rule.min_stay_steps

    def _count(self, pressure: PagePressure, needed: bool, decided: bool) -> None:
        """Count a step of short pages. needed: the step used the draft; decided: it had decode rows."""
        short = pressure.blocked_on_pages or pressure.free_pages < self.tau_low_pages
        self._short_steps = self._short_steps + decided if short and not needed else 0

    def _wants_pages(self, decided: bool, pages_pay: Callable[[], bool] | None) -> bool:
        steps = self._rule.persist_steps
        if pages_pay is None:
            return self._short_steps >= steps
        return decided and self._short_steps >= steps and self._short_steps % steps == 0 and pages_pay()
