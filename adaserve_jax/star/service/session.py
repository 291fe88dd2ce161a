"""One session of a draft service: its text, how much of it the draft's KV holds, and the Draft that waits.

No thread, clock or device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import numpy as np

from adaserve_jax.star.messages import Draft, Open, SessionSampling, Tree
from adaserve_jax.star.service.limits import RateLimiter


class MessageOutcome(Enum):
    """Effect of an Open or a Draft on its session."""

    APPLIED = "applied"
    """The text is as the message says; a Draft with depth waits for its tree."""
    STALE = "stale"
    """The message's epoch or round is over."""
    DUPLICATE = "duplicate"
    """The same message came before; nothing changed."""
    ANSWERED = "answered"
    """The same Draft came before and was answered: the answer can be sent again."""
    GAP = "gap"
    """The message does not follow the text; nothing changed, except that a waiting Draft was dropped."""
    CONFLICT = "conflict"
    """Another message with the same number came before."""


@dataclass(frozen=True, eq=False)
class PendingDraft:
    """Draft that waits for its tree. Times are the core's clock. deadline_s: when its tree should be ready; give_up_s:
    until when its target waits; order: of arrival."""

    draft: Draft
    received_s: float
    deadline_s: float
    give_up_s: float
    order: int


class TargetState:
    """One target that sent Hello. connected: its stream is open. connected_s: when the latest one began. last_turn: the
    turn in which it was served last."""

    def __init__(self, target_id: str, rate_limiter: RateLimiter):
        self.id = target_id
        self.rate_limiter = rate_limiter
        self.sessions: dict[int, DraftSession] = {}
        self.connected = True
        self.connected_s = 0.0
        self.last_turn = -1


class DraftSession:
    """One session.

    key: its id in the KV allocator, never used again. computed: tokens of the text whose KV is there. pending: the
    Draft that waits for its tree. answer: the last answered Draft of the present text, and its tree. answered_s: when
    its target got that tree; inf if it had given up before. running: a batch with the session is on the device.
    closed: it has ended. needs_feed: a message brought tokens that the KV lacks, or asked for them. feed_deadline_s:
    deadline of a Draft that was given up because of this lag; the text goes on being fed by it. last_message_s: for the
    lease.
    """

    def __init__(self, target: TargetState, opened: Open, key: int, now: float):
        self.target = target
        self.number = opened.session
        self.key = key
        self.epoch = opened.epoch
        self.sampling: SessionSampling = opened.sampling
        self.length = len(opened.tokens)
        self._tokens = np.zeros(max(64, self.length), np.int32)
        self._tokens[: self.length] = opened.tokens
        self.computed = 0
        self.round = -1
        self.pending: PendingDraft | None = None
        self.answer: tuple[Draft, Tree] | None = None
        self.answered_s = now
        self.running = False
        self.closed = False
        self.needs_feed = self.length > 0
        self.feed_deadline_s: float | None = None
        self.last_message_s = now
        self._last: Draft | None = None

    @property
    def text(self) -> np.ndarray:
        """The tokens, i32[length]: a view, valid until the next message."""
        return self._tokens[: self.length]

    @property
    def lag(self) -> int:
        """Number of tokens that the KV lacks."""
        return self.length - self.computed

    @property
    def search_from(self) -> int:
        """Position from which tokens are fed before a search: at least the last token, whose logits start the tree."""
        return min(self.computed, self.length - 1)

    @property
    def search_feed(self) -> int:
        """Number of tokens that are fed before a search."""
        return self.length - self.search_from

    @property
    def urgency(self) -> tuple[float, int]:
        """Sort key of the waiting Draft; the least is the most urgent."""
        assert self.pending is not None
        return self.pending.deadline_s, self.pending.order

    # ---- messages ----

    def reopen(self, opened: Open) -> MessageOutcome:
        """Replace the text if the epoch is higher; the KV of the common prefix stays."""
        epoch, tokens, sampling = opened.epoch, opened.tokens, opened.sampling
        if epoch < self.epoch:
            return MessageOutcome.STALE
        if epoch == self.epoch:
            both = min(len(tokens), self.length)
            same = sampling == self.sampling and np.array_equal(tokens[:both], self._tokens[:both])
            return MessageOutcome.DUPLICATE if same else MessageOutcome.CONFLICT
        self.epoch, self.sampling = epoch, sampling
        self.pending = self.answer = self._last = self.feed_deadline_s = None
        self._write(0, tokens)
        return MessageOutcome.APPLIED

    def apply_draft(self, draft: Draft) -> MessageOutcome:
        """Set the text to what a Draft says; the caller sets `pending`."""
        if draft.epoch < self.epoch:
            return MessageOutcome.STALE
        if draft.epoch == self.epoch and draft.round <= self.round:
            return self._repeated(draft)
        self.pending = None
        if draft.epoch > self.epoch:
            return MessageOutcome.GAP
        base, end = draft.base, draft.base + len(draft.tokens)
        both = min(end, self.length)
        differs = base < both and not np.array_equal(draft.tokens[: both - base], self._tokens[base:both])
        if base > self.length or differs:
            return MessageOutcome.GAP
        self.round, self._last, self.answer = draft.round, draft, None
        self._write(base, draft.tokens)
        return MessageOutcome.APPLIED

    def _repeated(self, draft: Draft) -> MessageOutcome:
        if draft.round < self.round or self._last is None:
            return MessageOutcome.STALE
        if not same_draft(draft, self._last):
            return MessageOutcome.CONFLICT
        return MessageOutcome.ANSWERED if self.answer is not None else MessageOutcome.DUPLICATE

    def _write(self, base: int, tokens: np.ndarray) -> None:
        """Set the text to its first `base` tokens and `tokens`; `computed` falls back to the first difference."""
        end = base + len(tokens)
        same = base + _common_prefix(self._tokens[base : min(end, self.computed)], tokens)
        if end > len(self._tokens):
            grown = np.zeros(max(end, 2 * len(self._tokens)), np.int32)
            grown[: self.length] = self.text
            self._tokens = grown
        self._tokens[base:end] = tokens
        self.length = end
        self.computed = min(self.computed, end, same)
        self.needs_feed = self.computed < end

    # ---- KV ----

    def commit_kv(self, start: int, tokens: np.ndarray) -> None:
        """Count the KV that a batch wrote for `tokens` from `start` on; the text may have changed meanwhile."""
        if self.computed < start:
            return  # the KV before `start` is not of this text any more
        self.computed = start + _common_prefix(self.text[start:], tokens)
        if self.computed >= self.length:
            self.needs_feed, self.feed_deadline_s = False, None

    def drop_kv(self, start: int = 0) -> None:
        """Note that the KV from position `start` on is lost; it is fed anew at the session's next message."""
        self.computed = min(self.computed, start)
        self.needs_feed, self.feed_deadline_s = False, None


def same_draft(one: Draft, other: Draft) -> bool:
    """Return whether two Drafts are equal in every field."""
    return all(np.array_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(Draft))


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens that both begin with."""
    both = min(len(one), len(other))
    if not both:
        return 0
    differs = one[:both] != other[:both]
    first = int(differs.argmax())
    return first if differs[first] else both
