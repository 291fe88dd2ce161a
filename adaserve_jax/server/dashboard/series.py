"""Samples of the engine's statistics, one a second for a quarter of an hour, as series and as figures of a window.

A sample holds what changed since the one before. A total that fell means that a new engine counts from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

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
class EngineSample:
    """State of the engine and its work since the sample before.

    Attributes:
        seq: Number of the sample, from 1.
        at_s: Time on the caller's clock.
        span_s: Seconds since the sample before.
        depth: Depth of the last step's beam search; None where there was no step since the sample before.
        width: Its width.
        budget: Its tree tokens.
        base_cached: Pages that no request holds.
    """

    seq: int
    at_s: float
    unix_s: float
    span_s: float
    running: int
    waiting: int
    depth: int | None
    width: int | None
    budget: int | None
    draft_resident: bool
    base_used: int
    base_cached: int
    base_free: int
    extension_used: int
    extension_cached: int
    extension_free: int
    swaps: int
    steps: int
    generation_tokens: int
    prompt_tokens: int
    draft_tokens: int
    accepted_tokens: int
    cache_queried_tokens: int
    cache_hit_tokens: int
    last_minute: LastMinute


@dataclass(frozen=True)
class EngineSeries:
    """Samples as columns, for charts.

    Rates are per second; a share of nothing is None; the last four columns are `LastMinute`.
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


class EngineHistory:
    """Newest samples, oldest first."""

    def __init__(self, length: int = KEPT_SAMPLES):
        self._samples: deque[EngineSample] = deque(maxlen=length)
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
        stepped = totals["steps"] > before["steps"]
        base_cached = stats.pages_cached - stats.extension_cached
        self._samples.append(EngineSample(
            seq=self._seq, at_s=now_s, unix_s=round(unix_s, 3), span_s=span_s,
            running=stats.running, waiting=stats.waiting,
            depth=stats.last_depth if stepped else None,
            width=stats.last_width if stepped else None,
            budget=stats.last_verified_tree_tokens if stepped else None,
            draft_resident=stats.draft_resident,
            base_used=stats.pages_used, base_cached=base_cached,
            base_free=stats.pages_total - stats.pages_used - base_cached,
            extension_used=stats.extension_used, extension_cached=stats.extension_cached,
            extension_free=stats.extension_total - stats.extension_used - stats.extension_cached,
            last_minute=last_minute,
            **{name: totals[name] - before[name] for name in totals},
        ))  # fmt: skip

    def series(self, since: int) -> EngineSeries:
        """Return the samples after number `since`; all of them where there is no such sample yet."""
        samples = [sample for sample in self._samples if sample.seq > since or since > self._seq]
        columns = {name: [getattr(sample, name) for sample in samples] for name in _SAMPLE_COLUMNS}
        last_minute = {f.name: [getattr(sample.last_minute, f.name) for sample in samples] for f in fields(LastMinute)}
        return EngineSeries(
            **columns,
            **last_minute,
            generation_tps=[_rate([sample], "generation_tokens") for sample in samples],
            prompt_tps=[_rate([sample], "prompt_tokens") for sample in samples],
            acceptance_rate=[_share([sample], "accepted_tokens", "draft_tokens") for sample in samples],
            cache_hit_rate=[_share([sample], "cache_hit_tokens", "cache_queried_tokens") for sample in samples],
        )

    def window(self, now_s: float, window_s: float) -> EngineWindow:
        """Return the figures of the last `window_s` seconds."""
        samples = [sample for sample in self._samples if sample.at_s > now_s - window_s]
        return EngineWindow(
            throughput_tps=_rate(samples, "generation_tokens"),
            prompt_tps=_rate(samples, "prompt_tokens"),
            acceptance_rate=_share(samples, "accepted_tokens", "draft_tokens"),
            cache_hit_rate=_share(samples, "cache_hit_tokens", "cache_queried_tokens"),
        )


_SAMPLE_COLUMNS = tuple(f.name for f in fields(EngineSeries) if f.name in {f.name for f in fields(EngineSample)})


def _total(samples: Iterable[EngineSample], name: str) -> float:
    return sum(getattr(sample, name) for sample in samples)


def _rate(samples: list[EngineSample], name: str) -> float:
    """Return a total per second."""
    span_s = _total(samples, "span_s")
    return round(_total(samples, name) / span_s, 3) if span_s > 0 else 0.0


def _share(samples: list[EngineSample], part: str, whole: str) -> float | None:
    total = _total(samples, whole)
    return round(_total(samples, part) / total, 6) if total else None
