"""Limits, quotas and measured times of a draft service, and validation of messages against them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from adaserve_jax.errors import ConfigError
from adaserve_jax.sampling import MAX_SEED
from adaserve_jax.star.messages import Draft, Hello, Open

MAX_ID = 2**63 - 1
"""Largest number of a session, an epoch or a round."""
MAX_I32 = 2**31 - 1
FEW_TOKENS = 32
"""Up to so many tokens are compared in Python, which is quicker than numpy."""


@dataclass(frozen=True)
class DraftLimits:
    """Abilities of one draft service.

    draft_version, vocabulary_hash, cells_hash: as in `messages.Hello`. vocabulary_size: token ids are below it.
    max_depth, max_width: of a search. max_context: tokens of a session, including its tree. max_rows: most sessions of
    one batch. max_feed: most tokens that one batch feeds, the largest bucket. lease_s, level_s, catchup_s: as in
    `messages.Welcome`; without times nothing is predicted.

    Raises:
        ConfigError: a value is out of its range.
    """

    draft_version: str
    vocabulary_hash: str
    cells_hash: str
    vocabulary_size: int
    max_depth: int
    max_width: int
    max_context: int
    max_rows: int
    max_feed: int
    lease_s: float = 60.0
    level_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    catchup_s: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "max_depth", "max_width", "max_context", "max_rows", "max_feed"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_feed < self.max_rows:
            raise ConfigError(
                f"max_feed must be at least max_rows, one token of every row; got {self.max_feed} and {self.max_rows}"
            )
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s must be above 0, got {self.lease_s}")


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

    Raises:
        ConfigError: a value is out of its range.
    """

    max_sessions: int = 64
    max_sessions_in_all: int = 256
    max_waiting: int = 64
    messages_per_s: float = 20_000.0
    messages_at_once: int = 20_000

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_sessions_in_all", "max_waiting", "messages_at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.messages_per_s > 0:
            raise ConfigError(f"messages_per_s must be above 0, got {self.messages_per_s}")


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


def problem_of_hello(hello: Hello) -> str:
    """Return the invalid value of a Hello, "" if there is none. Versions are not compared here."""
    for name in ("target_id", "vocabulary_hash", "cells_hash", "draft_version"):
        if not isinstance(getattr(hello, name), str):
            return f"{name} must be text, got {getattr(hello, name)!r:.50}"
    for name in ("verify_s", "plain_s"):
        if not _is_number(getattr(hello, name), 0.0, math.inf):
            return f"{name} must be seconds of at least 0, got {getattr(hello, name)!r:.50}"
    return ""


def problem_of_open(opened: Open, limits: DraftLimits) -> str:
    """Return the invalid value of an Open, "" if there is none. Its length is not checked here."""
    problem = _problem_of_ids(opened) or _problem_of_tokens(opened.tokens, limits)
    for name, least, most in (("seed", 0, MAX_SEED), ("choice", 0, MAX_I32), ("top_k", 0, MAX_I32)):
        if not _is_integer(getattr(opened, name), least, most):
            problem = problem or _outside(name, least, most, getattr(opened, name))
    for name, most in (("temperature", math.inf), ("min_p", 1.0)):
        if not _is_number(getattr(opened, name), 0.0, most) or getattr(opened, name) == math.inf:
            problem = problem or _outside(name, 0, most, getattr(opened, name))
    if not _is_number(opened.top_p, 0.0, 1.0) or opened.top_p == 0.0:
        problem = problem or f"top_p must be a number in (0, 1], got {opened.top_p!r:.50}"
    return problem


def problem_of_draft(draft: Draft, limits: DraftLimits) -> str:
    """Return the invalid value of a Draft, "" if there is none. Its length and its text are not checked here."""
    if _is_usual(draft, limits):
        return _problem_of_tokens(draft.tokens, limits)
    problem = _problem_of_ids(draft) or _problem_of_tokens(draft.tokens, limits)
    for name, low, high in (
        ("round", 0, MAX_ID),
        ("base", 0, MAX_I32),
        ("depth", 0, limits.max_depth),
        ("width", 0 if draft.depth == 0 else 1, limits.max_width),
    ):
        if not _is_integer(getattr(draft, name), low, high):
            problem = problem or _outside(name, low, high, getattr(draft, name))
    if not isinstance(draft.calibrated, bool):
        problem = problem or f"calibrated must be true or false, got {draft.calibrated!r:.50}"
    for name in ("due_s", "give_up_s"):
        if not _is_number(getattr(draft, name), -math.inf, math.inf) or getattr(draft, name) == -math.inf:
            problem = problem or f"{name} must be seconds, got {getattr(draft, name)!r:.50}"
    return problem


def _is_usual(draft: Draft, limits: DraftLimits) -> bool:
    """Return quickly whether all values except the tokens are valid and of the types that come from the wire."""
    whole = (draft.session, draft.epoch, draft.round, draft.base, draft.depth, draft.width)
    return (
        set(map(type, whole)) == {int}
        and type(draft.calibrated) is bool
        and type(draft.due_s) is float
        and type(draft.give_up_s) is float
        and 1 <= draft.session <= MAX_ID
        and 0 <= draft.epoch <= MAX_ID
        and 0 <= draft.round <= MAX_ID
        and 0 <= draft.base <= MAX_I32
        and 0 <= draft.depth <= limits.max_depth
        and (draft.depth == 0 or draft.width >= 1)
        and 0 <= draft.width <= limits.max_width
        and draft.due_s > -math.inf
        and draft.give_up_s > -math.inf
    )


def is_id(value: object) -> bool:
    """Return whether `value` can be the number of a session or an epoch."""
    return _is_integer(value, 0, MAX_ID)


def _problem_of_ids(message: Open | Draft) -> str:
    for name, least in (("session", 1), ("epoch", 0)):
        if not _is_integer(getattr(message, name), least, MAX_ID):
            return _outside(name, least, MAX_ID, getattr(message, name))
    return ""


def _problem_of_tokens(tokens: object, limits: DraftLimits) -> str:
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return "tokens must be one row of token ids"
    if not len(tokens):
        return ""
    ends = (tokens.min(), tokens.max()) if len(tokens) > FEW_TOKENS else tokens.tolist()
    if not (min(ends) >= 0 and max(ends) < limits.vocabulary_size):
        return f"token ids must be from 0 to {limits.vocabulary_size - 1}, got others"  # the tokens are somebody's text
    return ""


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object, least: float, most: float) -> bool:
    """Return whether `value` is a number in the range; NaN is not."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    return least <= float(value) <= most


def _outside(name: str, least: float, most: float, value: object) -> str:
    return f"{name} must be from {least} to {most}, got {value!r:.50}"
