"""The interface between a bench run and an engine: open-loop runs, changes of policy, and facts for the rows.

An engine is in this process (`local_client.py`) or behind a URL (`http_load.py`); the runner cannot tell which.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from adaserve_jax.engine.client import EngineClient, GenerateRequest, OutputChunk
from adaserve_jax.errors import SLO_INFEASIBLE, EngineDeadError, QueueFullError, RequestError
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.sim.acceptance import AcceptanceRecorder
from adaserve_jax.stats import StepStats
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem


@dataclass(frozen=True)
class AtPoint:
    """The values that all records of a point share. start_s: time.monotonic at the loop's start. baseline_s: seconds
    per token that relative targets multiply."""

    run_id: str
    point: str
    policy: str
    rate_rps: float
    start_s: float
    baseline_s: float


class Probe(ABC):
    """One request, from when it was due; times are time.monotonic. token_times_s: of each output token."""

    def __init__(self, due_at_s: float) -> None:
        self.due_at_s = self.submitted_at_s = due_at_s
        self.ended_at_s: float | None = None
        self.token_times_s: list[float] = []

    @property
    def late_s(self) -> float:
        """Seconds between due and submitted."""
        return max(0.0, self.submitted_at_s - self.due_at_s)

    @property
    def ended(self) -> bool:
        return self.ended_at_s is not None

    @abstractmethod
    def record(self, at: AtPoint) -> RequestRecord:
        """Return the request's line of requests.jsonl."""

    def _observed(
        self, slo: SLO, slo_class: str, at: AtPoint, code: str | None, *, prompt_tokens: int,
        reported: RequestMetrics | None = None,
    ) -> RequestMetrics:  # fmt: skip
        """Return the metrics with times as seen here. reported: metrics of the engine, which the rest is taken from."""
        times = self.token_times_s
        return replace(
            reported or RequestMetrics(0.0),
            arrival_s=self.submitted_at_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            prompt_tokens=prompt_tokens,
            output_tokens=len(times),
            tpot_slo_s=slo.tpot_s(at.baseline_s),
            ttft_slo_s=slo.ttft_s,
            e2e_slo_s=slo.e2e_s,
            slo_class=slo_class,
            slo_feasible=False if code == SLO_INFEASIBLE else reported and reported.slo_feasible,
        )

    def _record_of(
        self, metrics: RequestMetrics, at: AtPoint, request_id: str, status: Status, code: str | None
    ) -> RequestRecord:
        times = self.token_times_s
        return RequestRecord.of(
            metrics,
            run_id=at.run_id,
            point=at.point,
            policy=at.policy,
            rate_rps=at.rate_rps,
            request_id=request_id,
            status=status,
            error_code=code,
            due_s=round(self.due_at_s - at.start_s, 6),
            late_s=round(self.late_s, 6),
            token_offsets_s=tuple(round(t - times[0], 6) for t in times),
        )


class RequestProbe(Probe):
    """The sink of one request. The engine's thread calls it, so it only notes times (time.monotonic, seconds)."""

    def __init__(self, request: GenerateRequest, due_at_s: float, on_end: Callable[[], None]):
        super().__init__(due_at_s)
        self.request = request
        self._on_end = on_end
        self._last: OutputChunk | None = None
        self._refusal: tuple[Status, str | None] | None = None
        self._cut_off = False

    def submit(self, client: EngineClient) -> None:
        """Submit now; a refusal ends the request here. Passes on EngineDeadError and Ctrl-C, noted."""
        self.submitted_at_s = time.monotonic()
        try:
            client.submit(self.request, self)
        except QueueFullError:
            self._refuse("rejected", "queue_full")
        except RequestError as error:
            self._refuse("rejected", error.code)
        except EngineDeadError:
            self._refuse("failed", "engine_dead")
            raise
        except KeyboardInterrupt:
            self.cut_off(client)
            self._refuse("unfinished", None)
            raise

    def __call__(self, chunk: OutputChunk) -> None:
        now = time.monotonic()
        self.token_times_s.extend([now] * len(chunk.token_ids))
        if chunk.finish_reason is not None:
            self._last = chunk
            self._end(now)

    def cut_off(self, client: EngineClient) -> None:
        """Stop the request at the end of the run; unless it ends by itself first, it counts as unfinished."""
        self._cut_off = True
        client.abort(self.request.request_id)

    def record(self, at: AtPoint) -> RequestRecord:
        """Return the request's record, with the engine's times if it gave them, else those seen here."""
        status, code = self._status()
        metrics = None if self._last is None else self._last.metrics
        if metrics is None:
            prompt_tokens = len(self.request.prompt_ids)
            metrics = self._observed(self.request.slo, self.request.slo_class, at, code, prompt_tokens=prompt_tokens)
        return self._record_of(metrics, at, self.request.request_id, status, code)

    def _refuse(self, status: Status, code: str | None) -> None:
        self._refusal = (status, code)
        self._end(time.monotonic())

    def _end(self, now: float) -> None:
        if self.ended_at_s is None:
            self.ended_at_s = now
            self._on_end()

    def _status(self) -> tuple[Status, str | None]:
        if self._refusal is not None:
            return self._refusal
        reason = None if self._last is None else self._last.finish_reason
        if reason in ("stop", "length"):
            return "finished", None
        if reason == "error":
            code = (self._last and self._last.error_code) or "engine_error"
            return "rejected" if code in (SLO_INFEASIBLE, QueueFullError.code) else "failed", code
        return ("unfinished", None) if self._cut_off else ("failed", "aborted")


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
        """Count what became of the requests. cut_off_s: when those left were cut off; None: none was."""
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

    def change(self, by: int) -> None:
        with self._changed:
            self._count += by
            if self._on_change is not None:
                self._on_change(self._count)
            self._changed.notify_all()

    def wait_none(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count <= 0, timeout_s)


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
    on_end = partial(outstanding.change, -1)
    probes: list[RequestProbe] = []
    interrupted = engine_died = False
    start_s = time.monotonic()
    try:
        for due in requests:
            time.sleep(max(0.0, start_s + due.due_s - time.monotonic()))
            probes.append(RequestProbe(cast(GenerateRequest, due.prepared), start_s + due.due_s, on_end))
            outstanding.change(+1)
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


OnFlight = Callable[[int], None]
"""on_flight(requests in flight), called often and from any thread: it notes the number and returns."""


@dataclass(frozen=True)
class EngineAbout:
    """Facts about a ready engine, for the rows. system: this package, or the name given to a URL. policies: those that
    it can serve; None: any of this package. baseline_s: seconds of one token, alone, without speculation.
    synthetic_acceptance: as the column."""

    system: str
    device: str
    jax_version: str
    target: str
    draft: str | None
    target_params: int | None
    draft_params: int | None
    deterministic: bool
    max_requests: int
    max_context: int
    baseline_s: float
    max_prefill_tokens: int = 0
    synthetic_acceptance: str | None = None
    policies: tuple[str, ...] | None = None

    def columns(self) -> dict[str, Any]:
        """Return the columns that are the same in all rows of a run."""
        return {name: value for name, value in vars(self).items() if name not in ("system", "baseline_s", "policies")}


@dataclass(frozen=True)
class Ask:
    """One request to make ready. seed: of its sampling, the item's own where that counts. cache_salt: requests of other
    salts share no cached KV with it. max_tokens: the item's, or fewer for a warm-up. number: its place among the
    arrivals."""

    request_id: str
    item: WorkloadItem
    seed: int
    slo: SLO
    cache_salt: str
    max_tokens: int
    number: int = 0


class BenchEngine(Protocol):
    """One ready engine that serves every policy of a run in turn."""

    @property
    def about(self) -> EngineAbout: ...

    def prepare(self, ask: Ask) -> object:
        """Tokenise or encode ahead, so that the client does nothing but submit during a run."""
        ...

    def drive(self, due: Sequence[Due], *, drain_s: float, on_progress: OnFlight | None = None) -> LoopResult:
        """Submit in order of due_s and on time, whatever the engine does; then wait at most drain_s, cut off what is
        left. Ctrl-C stops submitting and cuts off likewise."""
        ...

    def set_policy(self, name: str, /) -> None:
        """Serve by `name` from now on; called only while no request is in flight. Raises ConfigError: no such policy
        here."""
        ...

    def stats(self) -> StepStats | None:
        """Return the scheduler's statistics, or None if they cannot be seen from here."""
        ...

    @property
    def token_source(self) -> str:
        """Source of the token counts of the last `drive` (column `token_source`)."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences on the last `drive` that people should read."""
        ...

    def compiles_after_ready(self) -> int:
        """Return the number of programs compiled while serving; 0 where unknown."""
        ...

    def close(self) -> None: ...


class RecordingEngine(BenchEngine, Protocol):
    """An engine that was opened to note acceptance."""

    @property
    def recorder(self) -> AcceptanceRecorder:
        """Return what notes the outcomes of verifications; `take` returns those since the last call."""
        ...


OpenEngine = Callable[[], BenchEngine]
"""Returns a started engine, which stays its owner's to close."""
