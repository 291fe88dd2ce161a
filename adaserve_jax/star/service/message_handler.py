"""Handles every message of a target: applies it to its session, and answers what can be answered at once.

Fields are valid: `wire` has checked them. No thread, clock or device.
"""

from __future__ import annotations

from adaserve_jax.star.messages import (
    PROTOCOL_VERSION,
    Close,
    Draft,
    FromService,
    FromTarget,
    Hello,
    Open,
    Refused,
    Resync,
    Welcome,
)
from adaserve_jax.star.service.admission import TargetAdmission
from adaserve_jax.star.service.limits import DraftLimits, Quotas
from adaserve_jax.star.service.registry import TargetRegistry
from adaserve_jax.star.service.session import DraftSession, MessageOutcome, PendingDraft, TargetState
from adaserve_jax.star.service.stats import CoreStats

RETRY_S = 1.0
"""`retry_after_s` after a refusal for a quota."""
FULL_RETRY_S = 5.0
"""`retry_after_s` for a target that admission refused."""
_STOPPING = "the draft service is shutting down; decode without it"


class MessageHandler:
    """Handler of one service. longest: most tokens of a session, including its tree."""

    def __init__(
        self, registry: TargetRegistry, limits: DraftLimits, quotas: Quotas, longest: int, stats: CoreStats,
        admission: TargetAdmission | None,
    ):  # fmt: skip
        self._registry = registry
        self._limits = limits
        self._quotas = quotas
        self._longest = longest
        self._stats = stats
        self._admission = admission
        self._arrivals = 0
        self._stopped = False

    def stop(self) -> Refused:
        """Accept no more work; return the refusal for the connected targets."""
        self._stopped = True
        return Refused("shutting_down", _STOPPING)

    # ---- targets ----

    def handle(self, target_id: str, message: FromTarget, now: float) -> FromService | None:
        """Handle one message that came at `now`, and return the immediate answer. Never raises.

        Each message counts against the rate limit first; above the limit little is done.
        """
        target = self._registry.find(target_id)
        if target is None:
            if isinstance(message, Hello):
                return self._hello(target_id, message, now)
            return self._refusal("invalid", "say Hello first", retry_after_s=RETRY_S)
        wait_s = target.rate_limiter.take(now)
        if isinstance(message, Hello):
            self._stats.duplicates += 1  # a stream has one Hello
            return None
        if isinstance(message, Close):
            self._registry.end_number(target, message.session)
            return None
        if wait_s:
            most = self._quotas.messages_per_s
            return self._refusal("rate", f"more than {most:g} messages per second of one target", message, wait_s)
        return self._session_message(target, message, now)

    def _hello(self, target_id: str, hello: Hello, now: float) -> FromService:
        refusal = self._hello_refusal(target_id, hello)
        if refusal is not None:
            return refusal
        self._registry.connect(target_id, now)
        limits = self._limits
        return Welcome(
            limits.draft_version,
            limits.max_depth,
            limits.max_width,
            self._longest,
            self._quotas.max_sessions,
            limits.lease_s,
            dict(limits.level_s),
            dict(limits.catchup_s),
        )

    def _hello_refusal(self, target_id: str, hello: Hello) -> Refused | None:
        limits = self._limits
        if hello.target_id != target_id:
            return self._refusal("invalid", f"this stream is of target {target_id}, not {hello.target_id}")
        if self._stopped:
            return self._refusal("shutting_down", _STOPPING)
        for code, what, own, given in (
            ("protocol_version", "protocol version", PROTOCOL_VERSION, hello.protocol_version),
            ("vocabulary", "vocabulary", limits.vocabulary_hash, hello.vocabulary_hash),
            ("draft_version", "draft version", limits.draft_version, hello.draft_version or limits.draft_version),
            ("cells", "cells of the acceptance table", limits.cells_hash, hello.cells_hash),
        ):
            if own != given:
                return self._refusal(code, f"{what}: the draft service has {own}, the target {given!r:.80}")
        if self._admission is None:
            return None
        why = self._admission.admit(
            target_id, plain_s=hello.plain_s, verify_s=hello.verify_s, requests=self._registry.num_sessions_connected
        )
        return self._refusal("full", why, retry_after_s=FULL_RETRY_S) if why else None

    # ---- sessions ----

    def _session_message(self, target: TargetState, message: Open | Draft, now: float) -> FromService | None:
        """Apply an Open or a Draft if there is room for its text and its tree."""
        is_open = isinstance(message, Open)
        if self._stopped:
            return self._refusal("shutting_down", _STOPPING, message)
        length = len(message.tokens) if is_open else message.base + len(message.tokens)
        needed = length if is_open else length + message.depth
        if needed > self._longest:
            self._registry.end_number(target, message.session)
            return self._refusal("too_long", f"{needed} tokens with the tree, the most are {self._longest}", message)
        if is_open:
            return self._open(target, message, now)
        if message.depth and not length:
            return self._invalid(target, message, "a tree grows from a token, and there is none")
        return self._draft(target, message, now)

    def _open(self, target: TargetState, opened: Open, now: float) -> FromService | None:
        session = target.sessions.get(opened.session)
        if session is None:
            refusal = self._quota_refusal(target, opened, now)
            if refusal is not None:
                return refusal
            session = self._registry.open(target, opened, now)
        else:
            session.last_message_s = now
            outcome = session.reopen(opened)
            if outcome is not MessageOutcome.APPLIED:
                return self._not_applied(session, outcome, opened)
        self._registry.update_busy(session)
        return None

    def _quota_refusal(self, target: TargetState, opened: Open, now: float) -> Refused | None:
        """Refuse one more session of this target if a quota is used up.

        At a quota, sessions whose stream has ended make room before their leases end.
        """
        registry, most = self._registry, self._quotas.max_sessions_in_all
        if registry.num_sessions >= most:
            registry.expire(now)
        own = target.sessions.values()
        if len(own) >= self._quotas.max_sessions and not registry.end_oldest_left(own):
            why = f"{len(own)} sessions of this target are open, as many as one may have"
            return self._refusal("quota", why, opened, RETRY_S)
        if registry.num_sessions >= most and not registry.end_oldest_left(registry.sessions):
            why = f"{registry.num_sessions} sessions are open, as many as there may be"
            return self._refusal("quota", why, opened, RETRY_S)
        return None

    def _draft(self, target: TargetState, draft: Draft, now: float) -> FromService | None:
        session = target.sessions.get(draft.session)
        if session is None:
            return self._resync(draft)
        session.last_message_s = now
        answer, length_before = session.answer, session.length
        outcome = session.apply_draft(draft)
        self._registry.update_busy(session)
        if outcome is not MessageOutcome.APPLIED:
            return self._not_applied(session, outcome, draft)
        follows = answer is not None and len(answer[1].index) > 0 and draft.round == answer[0].round + 1
        waited_s = now - session.answered_s  # below 0 if the target went on without the tree
        if self._admission is not None and answer is not None and follows and waited_s >= 0:
            emitted = min(session.length - length_before, answer[0].depth + 1)
            if emitted > 0:
                self._admission.record_round(target.id, emitted, waited_s)
        return self._set_pending(target, session, draft, now) if draft.depth else None

    def _set_pending(self, target: TargetState, session: DraftSession, draft: Draft, now: float) -> FromService | None:
        most = self._quotas.max_waiting
        sessions = target.sessions.values()
        if len(sessions) > most and sum(other.pending is not None for other in sessions) >= most:
            return self._refusal("quota", f"{most} drafts of this target wait, as many as may", draft, RETRY_S)
        deadline_s = now + max(min(draft.due_s, draft.give_up_s), 0.0)  # an overdue one is due now
        pending = PendingDraft(draft, now, deadline_s, now + draft.give_up_s, self._arrivals)
        self._arrivals += 1
        session.pending, session.feed_deadline_s = pending, None
        self._registry.update_busy(session)
        return None

    def _not_applied(self, session: DraftSession, outcome: MessageOutcome, message: Open | Draft) -> FromService | None:
        """Answer a message that did not change the text."""
        if outcome is MessageOutcome.GAP:
            return self._resync(message)
        if outcome is MessageOutcome.CONFLICT:
            return self._invalid(session.target, message, "said before under the same number, and otherwise")
        if outcome is MessageOutcome.STALE:
            self._stats.stale += 1
            return None
        self._stats.duplicates += 1
        if outcome is MessageOutcome.ANSWERED and session.answer is not None:
            self._stats.trees += 1
            return session.answer[1]
        return None

    # ---- refusals ----

    def _resync(self, message: Open | Draft) -> Resync:
        self._stats.resyncs += 1
        return Resync(message.session, message.epoch)

    def _invalid(self, target: TargetState, message: Open | Draft, problem: str) -> FromService | None:
        """End the session that an invalid message names."""
        self._registry.end_number(target, message.session)
        return self._refusal("invalid", problem, message)

    def _refusal(self, code: str, why: str, message: Open | Draft | None = None, retry_after_s: float = 0.0) -> Refused:
        self._stats.refused[code] += 1
        session, epoch = (message.session, message.epoch) if message is not None else (0, 0)
        return Refused(code, why, session, epoch, retry_after_s)
