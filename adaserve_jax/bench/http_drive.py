"""Sends prepared requests to a URL at their due times, whatever the server does; waits a bounded time for the rest."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from adaserve_jax.bench.http_pool import ConnectionPool
from adaserve_jax.bench.http_probe import UrlProbe
from adaserve_jax.bench.http_requests import Prepared
from adaserve_jax.bench.open_loop import Due, LoopResult

SPIN_S = 0.0015
"""A timer of the event loop is up to a millisecond late; so long before a due time the loop turns without sleeping."""
SWITCH_S = 0.0005
"""Longest turn of another thread of this process, such as a progress bar's, before the client gets its own."""
SWEEP_S = 0.25
_UNREACHED = ("connection_refused", "connect_timeout", "connect_failed")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No pause for collecting garbage while times are taken, and short turns of this process's other threads."""
    enabled, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(min(switch_s, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.unfreeze()
        if enabled:
            gc.enable()


class UrlRun:
    """One open loop on one event loop. `stop()` ends it early, from the loop's own thread."""

    def __init__(
        self,
        pool: ConnectionPool,
        silence_timeout_s: float,
        on_progress: Callable[[int], None] | None = None,
        *,
        keep_texts: bool = False,
    ):
        self.probes: list[UrlProbe] = []
        self.waited_to_connect = self.resent = 0
        self._pool = pool
        self._silence_timeout_s = silence_timeout_s
        self._on_progress = on_progress or (lambda _: None)
        self._keep_texts = keep_texts
        self._in_flight = 0
        self._none_left = asyncio.Event()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self, due: Sequence[Due], drain_s: float) -> LoopResult:
        """Submit in order of due_s, then wait at most drain_s and cut off what is left, by closing connections."""
        await self._pool.fill()
        sweeper = asyncio.create_task(self._sweep())
        start_s = time.monotonic()
        for each in due:
            await self._until(start_s + each.due_s)
            if self._stopped.is_set():
                break
            self._submit(cast("Prepared", each.prepared), start_s + each.due_s)
        await self._drained(drain_s)
        sweeper.cancel()
        cut_off_s = time.monotonic()
        await asyncio.sleep(0)  # what was read just now is looked at first
        left = [probe for probe in self.probes if not probe.ended]
        for probe in left:
            probe.cut_off()
        self._pool.close_busy()
        gone = await self._server_gone()
        return LoopResult.of(
            self.probes, start_s, cut_off_s if left else None, interrupted=self._stopped.is_set(), engine_died=gone
        )

    def _submit(self, prepared: Prepared, due_at_s: float) -> None:
        probe = UrlProbe(prepared, due_at_s, self._ended, self._resend, keep_texts=self._keep_texts)
        self.probes.append(probe)
        self._in_flight += 1
        self._none_left.clear()
        probe.submitted_at_s = probe.heard_at_s = time.monotonic()
        self.waited_to_connect += self._pool.acquire(probe.send, probe.fail)
        self._on_progress(self._in_flight)

    def _resend(self, probe: UrlProbe) -> None:
        self.resent += 1
        self._pool.acquire(probe.send, probe.fail, fresh=True)

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._none_left.set()
        self._on_progress(self._in_flight)

    async def _until(self, when_s: float) -> None:
        while (left_s := when_s - time.monotonic()) > 0 and not self._stopped.is_set():
            await asyncio.sleep(min(left_s - SPIN_S, SWEEP_S) if left_s > SPIN_S else 0)

    async def _drained(self, drain_s: float) -> None:
        if not self._in_flight:
            return
        waits = [asyncio.create_task(event.wait()) for event in (self._none_left, self._stopped)]
        await asyncio.wait(waits, timeout=0 if self._stopped.is_set() else drain_s, return_when="FIRST_COMPLETED")
        for wait in waits:
            wait.cancel()

    async def _sweep(self) -> None:
        """Fail requests that hear nothing."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._silence_timeout_s / 4))
            oldest_s = time.monotonic() - self._silence_timeout_s
            for probe in [probe for probe in self.probes if not probe.ended and probe.heard_at_s < oldest_s]:
                probe.fail("timeout")

    async def _server_gone(self) -> bool:
        """Requests found nobody, and still nobody is there."""
        missed = any(probe.outcome[1] in _UNREACHED for probe in self.probes)
        return missed and not await self._pool.reachable()
