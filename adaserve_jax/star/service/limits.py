"""Limits, quotas and measured times of a draft service."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DraftLimits:
    """Abilities of one draft service.

    draft_version, vocabulary_hash, cells_hash: as in `messages.Hello`. max_depth, max_width: of a search. max_context:
    tokens of a session, including its tree. max_rows: most sessions of one batch. max_feed: most tokens that one batch
    feeds, the largest bucket. lease_s, level_s, catchup_s: as in `messages.Welcome`; without times nothing is
    predicted.
    """

    draft_version: str
    vocabulary_hash: str
    cells_hash: str
    max_depth: int
    max_width: int
    max_context: int
    max_rows: int
    max_feed: int
    lease_s: float = 60.0
    level_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    catchup_s: Mapping[int, float] = field(default_factory=dict)


class BatchTimes:
    """Predicted seconds of batches, from times measured on an idle device; 0.0 without any."""

    def __init__(self, limits: DraftLimits):
        self._max_feed = limits.max_feed
        self._level_s = dict(limits.level_s)
        self._catchup_s = [limits.catchup_s[edge] for edge in sorted(limits.catchup_s)]
        self._edges = sorted(limits.catchup_s)
        self._one_level_s: dict[tuple[int, int], float] = {}

    def feed_s(self, tokens: int) -> float:
        """Return the seconds of feeding `tokens` tokens in chunks of max_feed."""
        chunks, rest = divmod(tokens, self._max_feed)
        return chunks * self._chunk_s(self._max_feed) + (self._chunk_s(rest) if rest else 0.0)

    def search_s(self, rows: int, depth: int, width: int) -> float:
        """Return the seconds of a search, by the least entry that holds rows and width, else the largest one."""
        known = self._one_level_s.get((rows, width))
        if known is None:
            fitting = [key for key in self._level_s if key[0] >= rows and key[1] >= width]
            largest = max(self._level_s, default=None)
            known = self._level_s[min(fitting)] if fitting else self._level_s[largest] if largest else 0.0
            self._one_level_s[rows, width] = known
        return depth * known

    def _chunk_s(self, tokens: int) -> float:
        at = min(bisect_left(self._edges, tokens), len(self._edges) - 1)
        return self._catchup_s[at] if at >= 0 else 0.0


@dataclass(frozen=True)
class Quotas:
    """Limits per target.

    max_sessions: open sessions of one target; max_sessions_in_all: of all targets. max_waiting: waiting Drafts of one
    target. messages_per_s: sustained rate of messages of one target; messages_at_once: its burst.
    """

    max_sessions: int = 64
    max_sessions_in_all: int = 256
    max_waiting: int = 64
    messages_per_s: float = 20_000.0
    messages_at_once: int = 20_000


class RateLimiter:
    """A token bucket of `at_once` tokens, full at first and refilled at `per_s`."""

    def __init__(self, per_s: float, at_once: int, now: float):
        self._per_s, self._at_once = per_s, float(at_once)
        self._left, self._at = float(at_once), now

    def take(self, now: float) -> float:
        """Take one token and return 0.0, or take none and return the seconds until there is one."""
        self._refill(now)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_s

    def owe(self, count: int, now: float) -> float:
        """Take `count` tokens, even more than there are; return the seconds until the debt is refilled."""
        self._refill(now)
        self._left -= count
        return max(-self._left, 0.0) / self._per_s

    def _refill(self, now: float) -> None:
        self._left = min(self._at_once, self._left + max(now - self._at, 0.0) * self._per_s)
        self._at = max(self._at, now)
