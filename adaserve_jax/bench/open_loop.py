"""Submits requests at their due times whatever the engine does, and waits a bounded time for the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve_jax.bench.probe import RequestProbe
from adaserve_jax.engine.client import EngineClient, GenerateRequest
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.results.records import RequestRecord


@dataclass(frozen=True)
class DueRequest:
    """A request ready to submit, due_s seconds after the start."""

    due_s: float
    request: GenerateRequest


class Probe(Protocol):
    """What a client noted of one request."""

    @property
    def token_times_s(self) -> Sequence[float]:
        """time.monotonic of each output token."""
        ...

    @property
    def late_s(self) -> float:
        """How much later than due it was submitted."""
        ...

    @property
    def ended(self) -> bool: ...

    def record(
        self, *, run_id: str, point: str, policy: str, rate_rps: float, start_s: float, baseline_s: float
    ) -> RequestRecord:
        """Its line of requests.jsonl. start_s: of the loop."""
        ...


@dataclass(frozen=True)
class LoopResult:
    """One open-loop run. start_s: time.monotonic at its start. wall_s: from there to the last end, or to the cut-off
    when requests were cut off. late_*_s: how far behind its own schedule the client submitted."""

    probes: tuple[Probe, ...]
    start_s: float
    wall_s: float
    late_max_s: float
    late_p99_s: float
    interrupted: bool
    engine_died: bool


class _Outstanding:
    """Counts requests submitted and not yet ended, and says so; ends come from the engine's thread."""

    def __init__(self, on_change: Callable[[int], None] | None) -> None:
        self._count = 0
        self._on_change = on_change
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._say()

    def remove(self) -> None:
        with self._changed:
            self._count -= 1
            self._say()
            self._changed.notify_all()

    def wait_none(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count <= 0, timeout_s)

    def _say(self) -> None:
        if self._on_change is not None:
            self._on_change(self._count)


def drive(
    client: EngineClient, requests: Sequence[DueRequest], *, drain_s: float, settle_s: float = 10.0,
    on_progress: Callable[[int], None] | None = None,
) -> LoopResult:  # fmt: skip
    """Submit `requests` (in order of due_s) on time, then wait at most `drain_s` for those in flight.

    What is left then is aborted and has `settle_s` to end. Ctrl-C stops submitting and cuts off likewise; requests
    not yet submitted are not part of the result. on_progress: told how many are in flight whenever that changes, from
    any thread; it must be quick.
    """
    outstanding = _Outstanding(on_progress)
    probes: list[RequestProbe] = []
    interrupted = engine_died = False
    start_s = time.monotonic()
    try:
        for due in requests:
            _sleep_until(start_s + due.due_s)
            probes.append(RequestProbe(due.request, start_s + due.due_s, outstanding.remove))
            outstanding.add()
            probes[-1].submit(client)
        outstanding.wait_none(drain_s)
    except KeyboardInterrupt:
        interrupted = True
    except EngineDeadError:
        engine_died = True
    cut_off_s = time.monotonic()
    left = [probe for probe in probes if not probe.ended]
    for probe in left:
        probe.cut_off(client)
    outstanding.wait_none(settle_s)
    ends = [cut_off_s] if left else [probe.ended_at_s for probe in probes if probe.ended_at_s is not None]
    late = np.array([probe.late_s for probe in probes] or [0.0])
    return LoopResult(
        probes=tuple(probes),
        start_s=start_s,
        wall_s=max(ends, default=start_s) - start_s,
        late_max_s=float(late.max()),
        late_p99_s=float(np.percentile(late, 99)),
        interrupted=interrupted,
        engine_died=engine_died or not client.is_alive(),
    )


def _sleep_until(when_s: float) -> None:
    remaining = when_s - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)
