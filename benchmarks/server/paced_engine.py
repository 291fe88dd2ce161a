"""A server over an engine that steps at a fixed pace and computes nothing: what is left is the cost of the front end.

    python -m benchmarks.server.paced_engine STEPS_PER_SECOND PORT

Each step gives every open choice one token whose text is the time of the step's end, by CLOCK_MONOTONIC, which all
processes of a machine share; it is handed out then, and a timer that is late counts as the front end's. All else is
what `adaserve serve` runs: an engine process, its messages, the server.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk, Sink
from adaserve_jax.engine.process_engine import ProcessEngine
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.serve import WarmUpBar, serve
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.stats import StepStats

VOCAB = 256
READY_BEFORE_S = 0.003
"""What a step has for its requests is made this long before its end: making it is the engine's work."""


class Bytes:
    """A tokenizer: one token per byte."""

    longest_token = 1
    chat_template = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def spelled(self, token_id: int) -> bytes:
        return bytes([token_id])

    def id_of(self, text: str) -> int | None:
        return None

    def apply_chat_template(self, messages: Sequence[object], prompt: object = None) -> list[int]:
        return [1]


class PacedEngine:
    """An `EngineClient`; its steps per second are the configuration's `seed`."""

    def __init__(self, config: EngineConfig, progress: object = None):
        self._config = config
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Sink, GenerateRequest, int, float]] = {}
        self._alive = False
        self._steps = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self._config.target, None, "paced", "none", "none", 4096, 4096, VOCAB, 1 / self._config.seed)

    def start(self) -> None:
        self._alive = True
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        if not self._alive:
            raise EngineDeadError("the engine was closed")
        with self._lock:
            self._open[request.request_id] = (sink, request, 0, time.monotonic())

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(StepStats(steps=self._steps, running=len(self._open)))

    def is_alive(self) -> bool:
        return self._alive

    def close(self) -> None:
        self._alive = False

    def _run(self) -> None:
        due = time.monotonic()
        while self._alive:
            due = max(due + 1 / self._config.seed, time.monotonic() + READY_BEFORE_S)
            time.sleep(max(due - READY_BEFORE_S - time.monotonic(), 0.0))
            with self._lock:
                ready = self._step(due)
                time.sleep(max(due - time.monotonic(), 0.0))
                for sink, chunk in ready:
                    sink(chunk)

    def _step(self, end: float) -> list[tuple[Sink, OutputChunk]]:
        """What a step that ends then has for whom."""
        ready: list[tuple[Sink, OutputChunk]] = []
        self._steps += bool(self._open)
        for name, (sink, request, sent, arrival_s) in list(self._open.items()):
            done = sent + 1 == request.sampling.max_tokens
            metrics = None
            if done:
                del self._open[name]
                metrics = RequestMetrics(arrival_s, arrival_s, arrival_s, end, output_tokens=sent + 1)
            else:
                self._open[name] = (sink, request, sent + 1, arrival_s)
            ready.append((sink, OutputChunk(name, 0, f"{end:.6f} ", [65], "length" if done else None, metrics)))
        return ready


def main(steps_per_s: int, port: int) -> None:
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    bar = WarmUpBar(Console(stderr=True))
    engine = ProcessEngine(
        EngineConfig(target="paced", seed=steps_per_s), factory="benchmarks.server.paced_engine:PacedEngine"
    )
    serve(ServerSettings(port=port), engine, Bytes, bar)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
