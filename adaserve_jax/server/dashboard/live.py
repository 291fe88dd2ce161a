"""What is going on now, for the dashboard: choices as they end, the engine once a second, and one snapshot of both.

Holds numbers, names and request ids of the last quarter of an hour in bounded memory, never a text. Does nothing
unless the dashboard is on. Used from the event loop only.
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
from adaserve_jax.server.dashboard.requests import EndedChoices, EndedWindow, record_of
from adaserve_jax.server.dashboard.series import EngineWindow, Looks, Rolling, Series
from adaserve_jax.server.metrics import RATIO_EDGES
from adaserve_jax.server.observers import EndedChoice
from adaserve_jax.server.state import ServerState
from adaserve_jax.stats import LearningStats

# What the dashboard shows of drafts that learn. Knows no HTTP.


@dataclass(frozen=True)
class LearningDraft:
    """One draft that learns. acceptance_rate: accepted / drafted tokens since the start; held_out_acceptance: of the
    version in force, by sum min(p, q); None: nothing of it is known yet."""

    name: str
    version: int
    acceptance_rate: float | None
    held_out_acceptance: float | None
    loss: float | None
    updates: int
    refused: int
    rolled_back: int
    records: int


def learning_drafts(stats: LearningStats) -> list[LearningDraft]:
    """The drafts in the engine's order; none where nothing learns."""
    return [_draft(stats, name, version) for name, version in stats.version.items()]


def _draft(stats: LearningStats, name: str, version: int) -> LearningDraft:
    drafted = stats.drafted_tokens.get(name, 0)
    return LearningDraft(
        name=name, version=version,
        acceptance_rate=round(stats.accepted_tokens.get(name, 0) / drafted, 6) if drafted else None,
        held_out_acceptance=_rounded(stats.held_out_acceptance.get(name)), loss=_rounded(stats.loss.get(name)),
        updates=stats.updates.get(name, 0), refused=stats.refused.get(name, 0),
        rolled_back=stats.rolled_back.get(name, 0), records=stats.records.get(name, 0),
    )  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


INTERVAL_S = 1.0
WINDOWS_S = (60.0, 300.0, 900.0)
KEPT_REQUESTS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastRequest:
    """One choice that ended. Times are milliseconds; None: unknown, or no such target."""

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
    mean_accepted: float


@dataclass(frozen=True)
class ClassTargets:
    """A class of the server's configuration and its targets."""

    name: str
    tpot_target_ms: float | None
    ttft_target_ms: float | None


@dataclass(frozen=True)
class Window:
    """What choices and engine did within a window."""

    ended: EndedWindow
    engine: EngineWindow


@dataclass(frozen=True)
class Snapshot:
    """Everything that the page shows. docs/dashboard.md says what each field means."""

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
    windows: list[Window]
    last_requests: list[LastRequest]
    seq: int
    series: Series


class Live:
    """Watches one server. `ended` is an observer of choices; `run` looks at the engine until it is cancelled."""

    def __init__(
        self, state: ServerState, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ):
        self._state = state
        self._clock, self._wall = clock, wall
        self._started_unix_s = wall()
        self._choices = EndedChoices(list(state.classes))
        self._looks = Looks()
        self._last: deque[LastRequest] = deque(maxlen=KEPT_REQUESTS)
        self._windows: list[Window] = []
        self._windows_at_s = -INTERVAL_S

    def ended(self, choice: EndedChoice) -> None:
        """Take in a choice that has ended."""
        record = record_of(choice)
        cause = self._choices.add(self._clock(), record)
        metrics = choice.metrics
        self._last.append(LastRequest(
            ended_unix_s=round(choice.ended_unix_s, 3), request_id=choice.request_id, index=choice.index,
            slo_class=choice.slo_class, ending=choice.ending, error_code=choice.error_code, cause=cause,
            met=record.slo_met, prompt_tokens=record.prompt_tokens,
            cached_tokens=metrics.cached_tokens if metrics is not None else 0, output_tokens=record.output_tokens,
            queue_ms=_ms(record.queue_s), ttft_ms=_ms(record.ttft_s), ttft_target_ms=_ms(record.ttft_slo_s),
            tpot_ms=_ms(record.tpot_s), tpot_target_ms=_ms(record.tpot_slo_s),
            mean_accepted=round(metrics.mean_accepted, 3) if metrics is not None else 0.0,
        ))  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Look at the engine for as long as the application lives."""
        looking = asyncio.ensure_future(self.run())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    async def run(self) -> None:
        """Look once a second. A look that fails is logged; the next one comes all the same."""
        due_s = self._clock()
        while True:
            try:
                self.look()
            except Exception:
                _log.exception("the dashboard could not look at the engine")
            due_s = max(due_s + INTERVAL_S, self._clock())
            await asyncio.sleep(due_s - self._clock())

    def look(self) -> None:
        """Note the engine's numbers now; nothing while there is no engine."""
        if self._info() is None:
            return
        now_s = self._clock()
        self._choices.begin(now_s)
        minute = self._choices.window(now_s, WINDOWS_S[0])
        ttft_ms = minute.ttft_ms
        rolling = Rolling(
            minute.attainment[0].attainment, minute.goodput_tps,
            None if ttft_ms is None else ttft_ms.p50, None if ttft_ms is None else ttft_ms.p99,
        )  # fmt: skip
        self._looks.add(now_s, self._wall(), self._state.client.stats().scheduler, rolling)

    def snapshot(self, since: int = 0) -> Snapshot:
        """Now, with the looks after number `since`; windows are worked out at most once a second."""
        now_s = self._clock()
        if now_s - self._windows_at_s >= INTERVAL_S:
            self._windows = [
                Window(self._choices.window(now_s, window_s), self._looks.window(now_s, window_s))
                for window_s in WINDOWS_S
            ]
            self._windows_at_s = now_s
        state, health, info, stats = self._state, self._state.health(), self._info(), self._state.client.stats()
        steps = stats.scheduler
        return Snapshot(
            started_unix_s=self._started_unix_s, now_unix_s=self._wall(), status=health.status, detail=health.detail,
            model=state.model_name if info is not None else None,
            policy=info.policy if info is not None else None,
            device=info.device if info is not None else None,
            draft=info.draft if info is not None else None,
            baseline_ms=_ms(info.baseline_s) if info is not None else None,
            classes=[ClassTargets(name, slo.tpot_ms, slo.ttft_ms) for name, slo in state.classes.items()],
            over_target_edges=list(RATIO_EDGES), in_flight=state.slots.used, ended_requests=len(self._choices),
            step_age_s=round(stats.step_age_s, 3), compiles_after_ready=stats.compiles_after_ready,
            preemptions=steps.preemptions, swaps=dict(steps.elastic_moves), swap_s=dict(steps.elastic_s),
            arms=dict(steps.arms),
            learning=learning_drafts(stats.learning), windows=self._windows,
            last_requests=list(reversed(self._last)), seq=self._looks.seq, series=self._looks.series(since),
        )  # fmt: skip

    def _info(self) -> EngineInfo | None:
        try:
            return self._state.info
        except EngineDeadError:
            return None


def _ms(seconds: float | None) -> float | None:
    """To the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)
