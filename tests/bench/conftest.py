"""A scripted engine: tokens come at stated times from a thread of its own, as from a real one. No jax."""

from __future__ import annotations

import gc
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from adaserve_jax.bench.local_client import ClientEngine
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk, Sink
from adaserve_jax.errors import EngineDeadError, QueueFullError, RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.stats import StepStats
from adaserve_jax.types import FinishReason
from adaserve_jax.workloads.items import WorkloadItem

BASELINE_S = 0.004


@pytest.fixture(autouse=True, scope="module")
def no_collection_of_all_garbage() -> Iterator[None]:
    """It comes before each measurement, and takes long in a process that holds every library of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        yield


@dataclass(frozen=True)
class Script:
    """How the engine behaves. hang: classes that never end. capacity: most requests in flight. dies_after: submissions.
    submit_s: seconds that each call of submit takes (a client that cannot keep up). adapters: names of LoRA adapters.
    """

    ttft_s: float = 0.004
    tpot_s: float = 0.002
    hang: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    fail: tuple[str, ...] = ()
    capacity: int = 10_000
    dies_after: int = 10_000
    submit_s: float = 0.0
    adapters: tuple[str, ...] = ()


class ScriptedEngine:
    """Implements EngineClient; notes what was asked of it."""

    def __init__(self, script: Script, policy: str = "ar"):
        self.script = script
        self.policies = [policy]
        self.submitted: list[GenerateRequest] = []
        self.submit_times: list[float] = []
        self.in_flight: dict[str, tuple[GenerateRequest, Sink, float]] = {}
        self.alive, self.closed = True, False
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def info(self) -> EngineInfo:
        adapters = self.script.adapters
        return EngineInfo(
            "scripted", None, self.policies[-1], "cpu: fake", "0", 64, 8, 100, BASELINE_S, adapters=adapters
        )

    def set_policy(self, name: str) -> None:
        assert not self.in_flight, "set_policy needs an idle engine"
        self.policies.append(name)

    def start(self) -> None: ...

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        time.sleep(self.script.submit_s)
        if len(self.submitted) >= self.script.dies_after:
            self.alive = False
            raise EngineDeadError("scripted death")
        self.submitted.append(request)
        self.submit_times.append(time.monotonic())
        if request.slo_class in self.script.refuse:
            raise RequestError("scripted refusal", param="prompt", code="context_length_exceeded")
        if len(self.in_flight) >= self.script.capacity:
            raise QueueFullError("scripted: full")
        self.in_flight[request.request_id] = (request, sink, time.monotonic())
        if request.slo_class not in self.script.hang:
            self._schedule(request)

    def abort(self, request_id: str) -> None:
        self._at(time.monotonic(), lambda: self._finish(request_id, "abort", 0))

    def stats(self) -> EngineStats:
        return EngineStats(StepStats())

    def is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.closed = True
        with self._changed:
            self._changed.notify()

    def _schedule(self, request: GenerateRequest) -> None:
        start, tokens = time.monotonic() + self.script.ttft_s, request.sampling.max_tokens
        request_id = request.request_id
        if request.slo_class in self.script.fail:
            self._at(start, lambda: self._finish(request_id, "error", 0))
            return
        for i in range(tokens - 1):
            self._at(start + i * self.script.tpot_s, lambda: self._send(OutputChunk(request_id, 0, "x", [1])))
        self._at(start + (tokens - 1) * self.script.tpot_s, lambda: self._finish(request_id, "length", tokens))

    def _send(self, chunk: OutputChunk) -> None:
        if chunk.request_id in self.in_flight:
            self.in_flight[chunk.request_id][1](chunk)

    def _finish(self, request_id: str, reason: FinishReason, tokens: int) -> None:
        if request_id not in self.in_flight:
            return
        request, sink, arrival_s = self.in_flight.pop(request_id)
        first_s = arrival_s + self.script.ttft_s if tokens else None
        metrics = RequestMetrics(
            arrival_s=arrival_s,
            first_scheduled_s=arrival_s + self.script.ttft_s / 2,
            first_token_s=first_s,
            last_token_s=None if first_s is None else first_s + (tokens - 1) * self.script.tpot_s,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=tokens,
            verify_steps=tokens,
            tpot_slo_s=request.slo.tpot_s(BASELINE_S),
            ttft_slo_s=request.slo.ttft_s,
            slo_class=request.slo_class,
        )
        sink(OutputChunk(request_id, 0, "", [1] if tokens else [], reason, metrics))

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (when_s, next(self._ticket), action))
            self._changed.notify()

    def _run(self) -> None:
        while not self.closed:
            with self._changed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else 1.0
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, _, action = heapq.heappop(self._due)
            action()


def encode(item: WorkloadItem, seed: int) -> list[int]:
    """A token for each character."""
    return list((item.prompt or "chat").encode())


class ScriptedBench(ClientEngine):
    """A scripted engine as a bench run has it."""

    client: ScriptedEngine

    def __init__(self, client: ScriptedEngine, max_prefill_tokens: int = 0):
        super().__init__(
            client, encode, client.set_policy, parameters=(1234, None), max_prefill_tokens=max_prefill_tokens
        )


@pytest.fixture
def make_engine():
    """make_engine(**script): a running scripted engine; all are closed after the test."""
    made: list[ScriptedEngine] = []

    def make(policy: str = "ar", **script: object) -> ScriptedEngine:
        made.append(ScriptedEngine(Script(**script), policy))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_bench(make_engine):
    """make_bench(**script): a scripted engine as a bench run has it; `client` is the engine."""
    return lambda policy="ar", **script: ScriptedBench(make_engine(policy, **script))
