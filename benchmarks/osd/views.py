"""Read results of benchmarks/osd/online_learning.py: acceptance by requests, and what was gained while served.

Knows what its files hold, and neither files nor papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

START, SHIPPED, OFFLINE, ONLINE = "start", "shipped", "offline", "online"
EQUAL_STEPS = "offline_equal_steps"
"""Distilled offline in about as many optimiser steps, of about as many tokens, as online learning takes."""
ONE, TAG, TOPIC = "one", "tag", "topic"
Result = Mapping[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """A stretch of requests of one domain: [first, stop). before, after: acceptance on this domain when it begins and
    when it ends; last: when all was served."""

    domain: str
    first: int
    stop: int
    before: float
    after: float
    last: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def way(run: Run) -> str:
    """Return how a run learned or was routed: `lora` of `code/lora`."""
    return run["name"].partition("/")[2]


def runs_by_way(result: Result) -> dict[str, Run]:
    return {way(run): run for run in result["runs"]}


def curve(run: Run, domain: str) -> dict[int, float]:
    """Return the acceptance by requests served."""
    return {point["requests"]: point["acceptance"][domain] for point in run["points"]}


def last(run: Run, domain: str) -> float:
    return run["points"][-1]["acceptance"][domain]


def once_served(run: Run, domain: str, requests: int) -> float | None:
    """Return the acceptance at the first point with at least so many requests; None where there is none."""
    return next((value for at, value in curve(run, domain).items() if at >= requests), None)


def phases(result: Result) -> list[Phase]:
    """Return the stretches of the first run, in order.

    Acceptance at a boundary is that of the nearest point: waves of requests may go beyond it.
    """
    run = result["runs"][0]
    found, first = [], 0
    for domain, asked in groupby(result["order"]):
        stop = first + sum(1 for _ in asked)
        accepted = curve(run, domain)
        before, after = (accepted[min(accepted, key=lambda at: abs(at - edge))] for edge in (first, stop))
        found.append(Phase(domain, first, stop, before, after, last(run, domain)))
        first = stop
    return found
