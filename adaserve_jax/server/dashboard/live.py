"""Monitor of one server for the dashboard: ended choices, a sample of the engine each second, a snapshot of both.

It keeps numbers, names and request ids of the last quarter of an hour in bounded memory, and no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from adaserve_jax.engine.client import EngineInfo
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.results.records import slowest_part
from adaserve_jax.server.dashboard.requests import ChoiceHistory, ChoiceWindow, record_of
from adaserve_jax.server.dashboard.series import EngineHistory, EngineSeries, EngineWindow, LastMinute
from adaserve_jax.server.metrics import RATIO_EDGES
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.server.state import ServerState
from adaserve_jax.stats import LearningStats

INTERVAL_S = 1.0
WINDOWS_S = (60.0, 300.0, 900.0)
KEPT_REQUESTS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastRequest:
    """One ended choice. Times are milliseconds; None: unknown, or no such target."""

    ended_unix_s: float
    request_id: str
    index: int
    slo_class: str
    ending: str
    error_code: str | None
    cause: str | None
    met: bool | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    ttft_target_ms: float | None
    tpot_ms: float | None
    tpot_target_ms: float | None
    e2e_ms: float | None
    e2e_target_ms: float | None
    mean_accepted: float


@dataclass(frozen=True)
class ClassTargets:
    """Targets of a class in the server's configuration."""

    name: str
    tpot_target_ms: float | None
    ttft_target_ms: float | None
    e2e_target_ms: float | None


@dataclass(frozen=True)
class LearningDraft:
    """One draft that learns; None: not known yet.

    acceptance_rate: accepted / drafted tokens since the start. held_out_acceptance: mean of sum min(p, q) over held-out
    positions, of the version in force.
    """

    name: str
    version: int
    acceptance_rate: float | None
    held_out_acceptance: float | None
    loss: float | None
    updates: int
    refused: int
    rolled_back: int
    records: int


@dataclass(frozen=True)
class DashboardWindow:
    """Figures of choices and engine within a window."""

    ended: ChoiceWindow
    engine: EngineWindow


@dataclass(frozen=True)
class DashboardSnapshot:
    """All data of the page. docs/dashboard.md says what each field means."""

    started_unix_s: float
    now_unix_s: float
    status: str
    detail: str
    model: str | None
    policy: str | None
    device: str | None
    draft: str | None
    baseline_ms: float | None
    classes: list[ClassTargets]
    over_target_edges: list[float]
    in_flight: int
    ended_requests: int
    step_age_s: float
    compiles_after_ready: int
    preemptions: int
    swaps: dict[str, int]
    swap_s: dict[str, float]
    arms: dict[str, str]
    learning: list[LearningDraft]
    windows: list[DashboardWindow]
    last_requests: list[LastRequest]
    seq: int
    series: EngineSeries


class DashboardMonitor:
    """Monitor of one server, used from the event loop only.

    `observe` is an observer of choices; `run` samples the engine until it is cancelled.
    """

    def __init__(
        self, state: ServerState, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ):
        self.state = state
        self._clock, self._wall = clock, wall
        self._started_unix_s = wall()
        self._choices = ChoiceHistory(list(state.classes))
        self._history = EngineHistory()
        self._last: deque[LastRequest] = deque(maxlen=KEPT_REQUESTS)
        self._windows: list[DashboardWindow] = []
        self._windows_at_s = -INTERVAL_S

    def observe(self, choice: EndedChoice) -> None:
        """Add a choice that ended."""
        record = record_of(choice)
        cause = self._choices.add(self._clock(), record)
        metrics = choice.metrics
        tpot_slo_s, tpot_s = slowest_part(record.tpot_parts)
        self._last.append(LastRequest(
            ended_unix_s=round(choice.ended_unix_s, 3), request_id=choice.origin.request_id, index=choice.index,
            slo_class=choice.slo_class, ending=choice.ending, error_code=choice.error_code, cause=cause,
            met=record.slo_met, prompt_tokens=record.prompt_tokens,
            cached_tokens=metrics.cached_tokens if metrics is not None else 0, output_tokens=record.output_tokens,
            queue_ms=_ms(record.queue_s), ttft_ms=_ms(record.ttft_s), ttft_target_ms=_ms(record.ttft_slo_s),
            tpot_ms=_ms(tpot_s), tpot_target_ms=_ms(tpot_slo_s),
            e2e_ms=_ms(record.e2e_s), e2e_target_ms=_ms(record.e2e_slo_s),
            mean_accepted=round(metrics.mean_accepted, 3) if metrics is not None else 0.0,
        ))  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Sample the engine for as long as the application lives."""
        sampling = asyncio.ensure_future(self.run())
        try:
            yield
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    async def run(self) -> None:
        """Sample the engine once a second; a failure is logged."""
        due_s = self._clock()
        while True:
            try:
                self.sample()
            except Exception:
                _log.exception("the dashboard could not look at the engine")
            due_s = max(due_s + INTERVAL_S, self._clock())
            await asyncio.sleep(due_s - self._clock())

    def sample(self) -> None:
        """Add a sample of the engine; none while there is no engine."""
        if self._info() is None:
            return
        now_s = self._clock()
        self._choices.begin(now_s)
        minute = self._choices.window(now_s, WINDOWS_S[0])
        ttft_ms = minute.ttft_ms
        last_minute = LastMinute(
            minute.attainment[0].attainment, minute.goodput_tps,
            None if ttft_ms is None else ttft_ms.p50, None if ttft_ms is None else ttft_ms.p99,
        )  # fmt: skip
        self._history.add(now_s, self._wall(), self.state.client.stats().scheduler, last_minute)

    def snapshot(self, since: int = 0) -> DashboardSnapshot:
        """Return the data of now, with the samples after number `since`; windows are computed at most once a second."""
        now_s = self._clock()
        if now_s - self._windows_at_s >= INTERVAL_S:
            self._windows = [
                DashboardWindow(self._choices.window(now_s, window_s), self._history.window(now_s, window_s))
                for window_s in WINDOWS_S
            ]
            self._windows_at_s = now_s
        state, health, info, stats = self.state, self.state.health(), self._info(), self.state.client.stats()
        steps = stats.scheduler
        return DashboardSnapshot(
            started_unix_s=self._started_unix_s, now_unix_s=self._wall(), status=health.status, detail=health.detail,
            model=state.model_name if info is not None else None,
            policy=info.policy if info is not None else None,
            device=info.device if info is not None else None,
            draft=info.draft if info is not None else None,
            baseline_ms=_ms(info.baseline_s) if info is not None else None,
            classes=[
                ClassTargets(name, slo.tpot_ms, slo.ttft_ms, slo.e2e_ms) for name, slo in state.classes.items()
            ],
            over_target_edges=list(RATIO_EDGES), in_flight=state.slots.used, ended_requests=len(self._choices),
            step_age_s=round(stats.step_age_s, 3), compiles_after_ready=stats.compiles_after_ready,
            preemptions=steps.preemptions, swaps=dict(steps.elastic_moves), swap_s=dict(steps.elastic_s),
            arms=dict(steps.arms),
            learning=learning_drafts(stats.learning), windows=self._windows,
            last_requests=list(reversed(self._last)), seq=self._history.seq, series=self._history.series(since),
        )  # fmt: skip

    def _info(self) -> EngineInfo | None:
        try:
            return self.state.info
        except EngineDeadError:
            return None


def _ms(seconds: float | None) -> float | None:
    """Return milliseconds with three decimals."""
    return None if seconds is None else round(seconds * 1e3, 3)


def learning_drafts(stats: LearningStats) -> list[LearningDraft]:
    """Return the drafts in the engine's order; none where nothing learns."""
    drafts: list[LearningDraft] = []
    for name, version in stats.version.items():
        drafted = stats.drafted_tokens.get(name, 0)
        rate = stats.accepted_tokens.get(name, 0) / drafted if drafted else None
        drafts.append(LearningDraft(
            name=name, version=version, acceptance_rate=_rounded(rate),
            held_out_acceptance=_rounded(stats.held_out_acceptance.get(name)), loss=_rounded(stats.loss.get(name)),
            updates=stats.updates.get(name, 0), refused=stats.refused.get(name, 0),
            rolled_back=stats.rolled_back.get(name, 0), records=stats.records.get(name, 0),
        ))  # fmt: skip
    return drafts


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
