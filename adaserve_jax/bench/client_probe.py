"""Watches one request from the client's side: when it was due, submitted, when each token came, how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from adaserve_jax.bench.probe import AtPoint, Probe
from adaserve_jax.engine.client import EngineClient, GenerateRequest, OutputChunk
from adaserve_jax.errors import SLO_INFEASIBLE, EngineDeadError, QueueFullError, RequestError
from adaserve_jax.results.records import RequestRecord, Status
from adaserve_jax.types import RequestMetrics


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
        """The request's record; times by the engine's metrics where it gave them, else as seen here."""
        status, code = self._status()
        metrics = self._last.metrics if self._last is not None and self._last.metrics is not None else None
        return self._record_of(metrics or self._observed(at.baseline_s), at, self.request.request_id, status, code)

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
            refused = self._last is not None and self._last.error_code == SLO_INFEASIBLE
            return ("rejected", SLO_INFEASIBLE) if refused else ("failed", "engine_error")
        return ("unfinished", None) if self._cut_off else ("failed", "aborted")

    def _observed(self, baseline_s: float) -> RequestMetrics:
        times = self.token_times_s
        return RequestMetrics(
            arrival_s=self.submitted_at_s,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            prompt_tokens=len(self.request.prompt_ids),
            output_tokens=len(times),
            tpot_slo_s=self.request.slo.tpot_s(baseline_s),
            ttft_slo_s=self.request.slo.ttft_s,
            slo_class=self.request.slo_class,
            slo_feasible=False if self._status()[1] == SLO_INFEASIBLE else None,
        )
