"""Samples an engine while a point is measured, from a thread of its own: what becomes samples.jsonl."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from adaserve_jax.results.samples import SAMPLE_S, Sample
from adaserve_jax.stats import StepStats


class Sampler:
    """Reads `stats` when its context begins, every SAMPLE_S in it, and when it ends. Where `stats` gives None it takes
    none. A reading is a copy of some forty numbers, and is made at most ten times a second. What `stats` raises is
    raised when the context ends.

    now: seconds of a clock. wait(seconds): waits, at most until the context ends, and says whether it has.
    """

    def __init__(
        self, stats: Callable[[], StepStats | None], *, now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ):  # fmt: skip
        self._stats, self._now = stats, now
        self._error: BaseException | None = None
        self._since: StepStats | None = None
        self._taken: list[tuple[float, StepStats]] = []
        self._over = threading.Event()
        self._wait = wait or self._over.wait
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._since = self._stats()
        if self._since is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._since is not None:
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def samples(self, *, run_id: str, point: str, start_s: float) -> list[Sample]:
        """What was taken since start_s, by time.monotonic."""
        if self._since is None:
            return []
        return [
            Sample.of(stats, self._since, run_id=run_id, point=point, t_s=at_s - start_s)
            for at_s, stats in self._taken
            if at_s >= start_s
        ]

    def _run(self) -> None:
        try:
            self._take_all()
        except Exception as error:  # of a thread nobody would see it
            self._error = error

    def _take_all(self) -> None:
        """Late once, on time again: no sample is made up for."""
        due_s = self._now() + SAMPLE_S
        while not self._wait(max(0.0, due_s - self._now())):
            self._take()
            due_s += SAMPLE_S * max(1, math.ceil((self._now() - due_s) / SAMPLE_S))
        self._take()

    def _take(self) -> None:
        stats = self._stats()
        if stats is not None:
            self._taken.append((self._now(), stats))
