"""Two engines of one process that step in turns, so that whatever else runs on the machine meets both alike.

Each completes a batch of its own in a thread of its own; while one steps, the other waits. What counts is the time of
an engine's own steps, planning and commit included. Knows no policy and no ratios.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.engine.core import EngineCore
from benchmarks.engine.throughput_systems import Batch, Engine, Measured


class Turns:
    """Stands before the steps of two engines from now on. Use from one thread."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines = list(engines)
        self._changed = threading.Condition()
        self._running: set[Engine] = set()
        self._next = self._engines[0]
        self._seconds: dict[Engine, list[float]] = {engine: [] for engine in engines}
        for engine in engines:
            self._stand_before(engine)

    def run(self, policy: str, batch: Batch, first: Engine) -> dict[Engine, Measured]:
        """Complete the batch by both. wall_s and the steps' ended_s count seconds of the engine's own steps."""
        self._next = first
        self._running = set(self._engines)
        self._seconds = {engine: [] for engine in self._engines}
        with ThreadPoolExecutor(len(self._engines)) as threads:
            runs = {engine: threads.submit(self._complete, engine, policy, batch) for engine in self._engines}
            return {engine: self._in_own_time(engine, run.result()) for engine, run in runs.items()}

    def _complete(self, engine: Engine, policy: str, batch: Batch) -> Measured:
        try:
            return engine.run(policy, batch, 0)
        finally:
            with self._changed:
                self._running.discard(engine)
                self._changed.notify_all()

    def _in_own_time(self, engine: Engine, measured: Measured) -> Measured:
        ended, steps = 0.0, []
        for step, seconds in zip(measured.steps, self._seconds[engine], strict=True):
            ended += seconds
            steps.append(replace(step, ended_s=ended))
        return replace(measured, steps=tuple(steps), wall_s=ended)

    def _stand_before(self, engine: Engine) -> None:
        """Every core that the engine builds, one per policy, steps in its turn only."""
        build = engine.local.assembly.build_core

        def build_waiting(config: EngineConfig) -> EngineCore:
            core = build(config)
            step = core.step

            def step_in_turn() -> list[OutputChunk]:
                self._wait_for_turn(engine)
                began = time.perf_counter()
                chunks = step()
                if len(engine.noted_steps) > len(self._seconds[engine]):  # it ran something
                    self._seconds[engine].append(time.perf_counter() - began)
                self._pass_on(engine)
                return chunks

            core.step = step_in_turn
            return core

        engine.local.assembly.build_core = build_waiting

    def _wait_for_turn(self, engine: Engine) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is engine or self._running <= {engine})

    def _pass_on(self, engine: Engine) -> None:
        with self._changed:
            self._next = next(other for other in self._engines if other is not engine)
            self._changed.notify_all()
