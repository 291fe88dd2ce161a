"""The engine's numbers, looked at once a second: what changed since the look before, kept for a quarter of an hour.

Knows no HTTP. Totals that fall mean that another engine counts from zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from adaserve_jax.stats import StepStats

LENGTH = 900
"""Looks kept."""
_TOTALS = (
    "steps", "generation_tokens", "prompt_tokens", "draft_tokens", "accepted_tokens", "cache_queried_tokens",
    "cache_hit_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Rolling:
    """Of the choices that ended within the minute before a look."""

    attainment: float | None
    goodput_tps: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None


@dataclass(frozen=True)
class Look:
    """One look. at_s: when, on the caller's clock; span_s: seconds since the one before, which totals are over.
    seq counts looks from 1.

    depth, width, budget: of the last step, None where there was none. cached pages are held by no request.
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
    rolling: Rolling


@dataclass(frozen=True)
class Series:
    """Looks as columns, for drawing. Rates per second; shares of nothing are None; the last four are over a minute."""

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
    """The engine's work within a window. acceptance_rate: accepted / drafted; cache_hit_rate: by prompt tokens."""

    throughput_tps: float
    prompt_tps: float
    acceptance_rate: float | None
    cache_hit_rate: float | None


class Looks:
    """The newest looks, oldest first."""

    def __init__(self, length: int = LENGTH):
        self._looks: deque[Look] = deque(maxlen=length)
        self._seq = 0
        self._before: dict[str, int] | None = None
        self._before_s = 0.0

    @property
    def seq(self) -> int:
        """Of the newest look; 0 before the first."""
        return self._seq

    def add(self, now_s: float, unix_s: float, stats: StepStats, rolling: Rolling) -> None:
        """Look at the totals. The first look sees no change."""
        totals = {name: getattr(stats, name) for name in _TOTALS} | {"swaps": sum(stats.elastic_moves.values())}
        before = totals if self._before is None else self._before
        if any(totals[name] < before[name] for name in totals):
            before = dict.fromkeys(totals, 0)
        span_s = 0.0 if self._before is None else now_s - self._before_s
        self._before, self._before_s = totals, now_s
        self._seq += 1
        stepped = totals["steps"] > before["steps"]
        base_cached = stats.pages_cached - stats.extension_cached
        self._looks.append(Look(
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
            rolling=rolling,
            **{name: totals[name] - before[name] for name in totals},
        ))  # fmt: skip

    def series(self, since: int) -> Series:
        """Looks after number `since`; all of them where there was no such look yet."""
        looks = [look for look in self._looks if look.seq > since or since > self._seq]
        columns = {name: [getattr(look, name) for look in looks] for name in _TAKEN}
        rolling = {f.name: [getattr(look.rolling, f.name) for look in looks] for f in fields(Rolling)}
        return Series(
            **columns,
            **rolling,
            generation_tps=[_rate([look], "generation_tokens") for look in looks],
            prompt_tps=[_rate([look], "prompt_tokens") for look in looks],
            acceptance_rate=[_share([look], "accepted_tokens", "draft_tokens") for look in looks],
            cache_hit_rate=[_share([look], "cache_hit_tokens", "cache_queried_tokens") for look in looks],
        )

    def window(self, now_s: float, window_s: float) -> EngineWindow:
        """What the looks of the last `window_s` seconds saw."""
        looks = [look for look in self._looks if look.at_s > now_s - window_s]
        return EngineWindow(
            throughput_tps=_rate(looks, "generation_tokens"),
            prompt_tps=_rate(looks, "prompt_tokens"),
            acceptance_rate=_share(looks, "accepted_tokens", "draft_tokens"),
            cache_hit_rate=_share(looks, "cache_hit_tokens", "cache_queried_tokens"),
        )


_TAKEN = tuple(f.name for f in fields(Series) if f.name in {f.name for f in fields(Look)})


def _total(looks: Iterable[Look], name: str) -> float:
    return sum(getattr(look, name) for look in looks)


def _rate(looks: list[Look], name: str) -> float:
    """Per second."""
    span_s = _total(looks, "span_s")
    return round(_total(looks, name) / span_s, 3) if span_s > 0 else 0.0


def _share(looks: list[Look], part: str, whole: str) -> float | None:
    total = _total(looks, whole)
    return round(_total(looks, part) / total, 6) if total else None
