"""Samples of the engine's statistics, one a second for a quarter of an hour, as series and as figures of a window.

A sample holds what changed since the one before. A total that fell means that a new engine counts from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from adaserve_jax.stats import StepStats

KEPT_SAMPLES = 900
_TOTALS = (
    "steps", "generation_tokens", "prompt_tokens", "draft_tokens", "accepted_tokens", "cache_queried_tokens",
    "cache_hit_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class LastMinute:
    """Figures of the choices that ended within the minute before a sample."""

    attainment: float | None
    goodput_tps: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None


@dataclass(frozen=True)
class EngineSeries:
    """Samples as columns, for charts.

    seq: numbers of the samples, from 1. depth, width, budget: of the last step's beam search and tree; None where there
    was no step since the sample before. base_cached: pages that no request holds. Rates are per second; a share of
    nothing is None; the last four columns are `LastMinute`.
    """

    seq: list[int]
    unix_s: list[float]
    running: list[int]
    waiting: list[int]
    depth: list[int | None]
    width: list[int | None]
    budget: list[int | None]
    draft_resident: list[bool]
    base_used: list[int]
    base_cached: list[int]
    base_free: list[int]
    extension_used: list[int]
    extension_cached: list[int]
    extension_free: list[int]
    swaps: list[int]
    generation_tps: list[float]
    prompt_tps: list[float]
    acceptance_rate: list[float | None]
    cache_hit_rate: list[float | None]
    attainment: list[float | None]
    goodput_tps: list[float]
    ttft_p50_ms: list[float | None]
    ttft_p99_ms: list[float | None]


@dataclass(frozen=True)
class EngineWindow:
    """Figures of the engine within a window.

    acceptance_rate: accepted / drafted tokens. cache_hit_rate: share of the prompt tokens.
    """

    throughput_tps: float
    prompt_tps: float
    acceptance_rate: float | None
    cache_hit_rate: float | None


@dataclass(frozen=True)
class _Work:
    """Growth of the totals since the sample before, `span_s` seconds earlier. at_s: on the caller's clock."""

    at_s: float
    span_s: float
    totals: Mapping[str, int]


class EngineHistory:
    """Newest samples, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[tuple[_Work, dict[str, Any]]] = deque(maxlen=KEPT_SAMPLES)  # with a value for each column
        self._seq = 0
        self._before: dict[str, int] | None = None
        self._before_s = 0.0

    @property
    def seq(self) -> int:
        """Number of the newest sample; 0 before the first."""
        return self._seq

    def add(self, now_s: float, unix_s: float, stats: StepStats, last_minute: LastMinute) -> None:
        """Add a sample. The first one has no change."""
        totals = {name: getattr(stats, name) for name in _TOTALS} | {"swaps": sum(stats.elastic_moves.values())}
        before = totals if self._before is None else self._before
        if any(totals[name] < before[name] for name in totals):
            before = dict.fromkeys(totals, 0)
        span_s = 0.0 if self._before is None else now_s - self._before_s
        self._before, self._before_s = totals, now_s
        self._seq += 1
        work = _Work(now_s, span_s, {name: totals[name] - before[name] for name in totals})
        rates, stepped = _figures([work]), work.totals["steps"] > 0
        base_cached = stats.pages_cached - stats.extension_cached
        self._samples.append((work, dict(
            seq=self._seq, unix_s=round(unix_s, 3), running=stats.running, waiting=stats.waiting,
            depth=stats.last_depth if stepped else None,
            width=stats.last_width if stepped else None,
            budget=stats.last_verified_tree_tokens if stepped else None,
            draft_resident=stats.draft_resident,
            base_used=stats.pages_used, base_cached=base_cached,
            base_free=stats.pages_total - stats.pages_used - base_cached,
            extension_used=stats.extension_used, extension_cached=stats.extension_cached,
            extension_free=stats.extension_total - stats.extension_used - stats.extension_cached,
            swaps=work.totals["swaps"], generation_tps=rates.throughput_tps, prompt_tps=rates.prompt_tps,
            acceptance_rate=rates.acceptance_rate, cache_hit_rate=rates.cache_hit_rate, **vars(last_minute),
        )))  # fmt: skip

    def series(self, since: int) -> EngineSeries:
        """Return the samples after number `since`; all of them where there is no such sample yet."""
        rows = [row for _, row in self._samples if row["seq"] > since or since > self._seq]
        return EngineSeries(**{column.name: [row[column.name] for row in rows] for column in fields(EngineSeries)})

    def window(self, now_s: float, window_s: float) -> EngineWindow:
        """Return the figures of the last `window_s` seconds."""
        return _figures([work for work, _ in self._samples if work.at_s > now_s - window_s])


def _figures(done: Sequence[_Work]) -> EngineWindow:
    span_s = sum(work.span_s for work in done)
    totals = {name: sum(work.totals[name] for work in done) for name in _TOTALS}

    def rate(name: str) -> float:
        return round(totals[name] / span_s, 3) if span_s > 0 else 0.0

    def share(part: str, whole: str) -> float | None:
        return round(totals[part] / totals[whole], 6) if totals[whole] else None

    return EngineWindow(
        throughput_tps=rate("generation_tokens"),
        prompt_tps=rate("prompt_tokens"),
        acceptance_rate=share("accepted_tokens", "draft_tokens"),
        cache_hit_rate=share("cache_hit_tokens", "cache_queried_tokens"),
    )
