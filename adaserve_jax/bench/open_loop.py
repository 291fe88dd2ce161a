"""Submits requests at their due times whatever the engine does, and waits a bounded time for the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from adaserve_jax.bench.client_probe import RequestProbe
from adaserve_jax.bench.probe import Probe
from adaserve_jax.engine.client import EngineClient, GenerateRequest
from adaserve_jax.errors import EngineDeadError


@dataclass(frozen=True)
class Due:
    """A request that is ready, due_s seconds after the start. prepared: what the engine's `prepare` made of it."""

    due_s: float
    prepared: object


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

    @classmethod
    def of(
        cls, probes: Sequence[Probe], start_s: float, cut_off_s: float | None, *, interrupted: bool, engine_died: bool
    ) -> LoopResult:
        """cut_off_s: when what was left was cut off; None: nothing was."""
        ends = [each.ended_at_s for each in probes if each.ended_at_s is not None] if cut_off_s is None else [cut_off_s]
        late = np.array([each.late_s for each in probes] or [0.0])
        wall_s = max(ends, default=start_s) - start_s
        late_max_s, late_p99_s = float(late.max()), float(np.percentile(late, 99))
        return cls(tuple(probes), start_s, wall_s, late_max_s, late_p99_s, interrupted, engine_died)


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
    client: EngineClient, requests: Sequence[Due], *, drain_s: float, settle_s: float = 10.0,
    on_progress: Callable[[int], None] | None = None,
) -> LoopResult:  # fmt: skip
    """Submit `requests` (GenerateRequests, in order of due_s) on time, then wait at most `drain_s` for those in flight.

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
            probes.append(RequestProbe(cast(GenerateRequest, due.prepared), start_s + due.due_s, outstanding.remove))
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
    return LoopResult.of(
        probes, start_s, cut_off_s if left else None,
        interrupted=interrupted, engine_died=engine_died or not client.is_alive(),
    )  # fmt: skip


def _sleep_until(when_s: float) -> None:
    remaining = when_s - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)
