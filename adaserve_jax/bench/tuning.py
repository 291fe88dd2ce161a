"""Finds the best setting of a fixed policy for one point: draft length x prefill chunk x most running requests.

A fixed policy is only as good as its setting, and the best setting differs from load to load; so that what is compared
with is as strong as it can be, it gets the best one of each point. Knows nothing of how a setting is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

Score = tuple[float, float]
"""Joint attainment, then goodput in tokens per second."""


@dataclass(frozen=True, order=True)
class Setting:
    """draft_tokens: k of `spec:<k>`. prefill_tokens: most prompt tokens of a step. max_requests: most that run."""

    draft_tokens: int
    prefill_tokens: int
    max_requests: int


@dataclass(frozen=True)
class Grid:
    """Increasing values of each part of a setting."""

    draft_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    prefill_tokens: tuple[int, ...] = (64, 128, 256, 512)
    max_requests: tuple[int, ...] = (28, 32, 36, 42, 48, 56, 64)

    def settings(self) -> list[Setting]:
        return [Setting(*values) for values in product(self.draft_tokens, self.prefill_tokens, self.max_requests)]


@dataclass(frozen=True)
class Tuned:
    """tried: how many settings were judged."""

    setting: Setting
    score: Score
    tried: int


def tune(evaluate: Callable[[Setting], Score], grid: Grid, *, exhaustive: bool = False) -> Tuned:
    """The setting of the highest score; of equals the smallest.

    Without `exhaustive`: a coarse grid over all three (ends and middle of the draft's length, ends of the others);
    then, from its best with the shortest chunk and from its best with the longest, every value of one part with the
    others held, part by part, until a whole round brings nothing better.
    """
    scores: dict[Setting, Score] = {}

    def best_of(settings: Iterable[Setting]) -> Setting:
        tried = list(settings)
        for setting in tried:
            if setting not in scores:
                scores[setting] = evaluate(setting)
        return min(tried, key=lambda setting: (-scores[setting][0], -scores[setting][1], setting))

    if exhaustive:
        best_of(grid.settings())
    else:
        lengths, chunks, caps = grid.draft_tokens, grid.prefill_tokens, grid.max_requests
        coarse_lengths = (lengths[0], lengths[(len(lengths) - 1) // 2], lengths[-1])
        starts = [
            best_of(Setting(*values) for values in product(coarse_lengths, (chunk,), _ends(caps)))
            for chunk in dict.fromkeys(_ends(chunks))
        ]
        for best in starts:
            before = None
            while best != before:
                before = best
                best = best_of(replace(best, max_requests=cap) for cap in caps)
                best = best_of(replace(best, draft_tokens=k) for k in lengths)
                best = best_of(replace(best, prefill_tokens=chunk) for chunk in chunks)
    best = best_of(scores)
    return Tuned(best, scores[best], len(scores))


def _ends(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[-1]
