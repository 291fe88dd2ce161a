"""Submits requests at their due times whatever the engine does, and waits a bounded time for the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve_jax.bench.probe import RequestProbe
from adaserve_jax.engine.client import EngineClient, GenerateRequest
from adaserve_jax.errors import EngineDeadError


@dataclass(frozen=True)
class DueRequest:
    """A request ready to submit, due_s seconds after the start."""

    due_s: float
    request: GenerateRequest


@dataclass(frozen=True)
class LoopResult:
    """One open-loop run. start_s: time.monotonic at its start. wall_s: from there to the last end, or to the cut-off
    when requests were cut off. late_*_s: how far behind its own schedule the client submitted."""

    probes: tuple[RequestProbe, ...]
    start_s: float
    wall_s: float
    late_max_s: float
    late_p99_s: float
    interrupted: bool
    engine_died: bool


class _Outstanding:
    """Counts requests submitted and not yet ended; ends come from the engine's thread."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1

    def remove(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_none(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count <= 0, timeout_s)


def drive(
    client: EngineClient, requests: Sequence[DueRequest], *, drain_s: float, settle_s: float = 10.0
) -> LoopResult:
    """Submit `requests` (in order of due_s) on time, then wait at most `drain_s` for those in flight.

    What is left then is aborted and has `settle_s` to end. Ctrl-C stops submitting and cuts off likewise; requests
    not yet submitted are not part of the result.
    """
    outstanding = _Outstanding()
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
