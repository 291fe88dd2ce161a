"""Judges every message of a target: tells sessions what was said, and answers what can be answered at once.

No thread, clock or device. Who is there, and what ends, is registry.py's; trees are core.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from adaserve_jax.star.service.admission import Admission
from adaserve_jax.star.service.limits import (
    DraftLimits,
    Quotas,
    is_id,
    problem_of_draft,
    problem_of_hello,
    problem_of_open,
)
from adaserve_jax.star.service.registry import Registry
from adaserve_jax.star.service.session import Asked, CoreStats, Heard, Session, Target

RETRY_S = 1.0
"""When what was refused for a quota is worth asking again; a target that is one too many: FULL_RETRY_S."""
FULL_RETRY_S = 5.0
_STOPPING = "the draft service is shutting down; decode without it"


class Reception:
    """Of one service. longest: most tokens of a session, its tree included."""

    def __init__(
        self, registry: Registry, limits: DraftLimits, quotas: Quotas, longest: int, stats: CoreStats,
        admission: Admission | None,
    ):  # fmt: skip
        self._registry = registry
        self._limits = limits
        self._quotas = quotas
        self._longest = longest
        self._stats = stats
        self._admission = admission
        self._arrivals = 0
        self._stopped = False

    def receive(self, target_id: str, messages: Sequence[FromTarget], now: float) -> list[FromService]:
        """Take one frame of a target in, which came at `now`; returns what to answer at once. Never raises."""
        answers = (self._hear(target_id, message, now) for message in messages)
        return [answer for answer in answers if answer is not None]

    def gone(self, target_id: str) -> None:
        """Its stream has ended: what it waits for is dropped, and it no longer counts for admission."""
        self._registry.gone(target_id)
        if self._admission is not None:
            self._admission.leave(target_id)

    def stop(self) -> Refused:
        """From now on nothing is taken on; returns what to tell the connected targets."""
        self._stopped = True
        return Refused("shutting_down", _STOPPING)

    # ---- targets ----

    def _hear(self, target_id: str, message: FromTarget, now: float) -> FromService | None:
        """Every message is paid for before it is looked at; one that there was no allowance for does little."""
        target = self._registry.find(target_id)
        if target is None:
            if isinstance(message, Hello):
                return self._hello(target_id, message, now)
            return self._refusal("invalid", "say Hello first", retry_after_s=RETRY_S)
        wait_s = target.allowance.take(now)
        if isinstance(message, Hello):
            self._stats.duplicates += 1  # once for each stream
            return None
        if isinstance(message, Close):
            self._registry.end_number(target, message.session)
            return None
        if isinstance(message, (Open, Draft)):
            if wait_s:
                most = self._quotas.messages_per_s
                return self._of_one("rate", f"more than {most:g} messages per second of one target", message, wait_s)
            return self._of_session(target, message, now)
        return self._refusal("invalid", f"a target says Hello, Open, Draft or Close, got {message!r:.50}")

    def _hello(self, target_id: str, hello: Hello, now: float) -> FromService:
        refusal = self._why_not(target_id, hello)
        if refusal is not None:
            return refusal
        self._registry.come(target_id, now)
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

    def _why_not(self, target_id: str, hello: Hello) -> Refused | None:
        limits = self._limits
        problem = problem_of_hello(hello)
        if problem or hello.target_id != target_id:
            return self._refusal("invalid", problem or f"this stream is of target {target_id}, not {hello.target_id}")
        if self._stopped:
            return self._refusal("shutting_down", _STOPPING)
        for code, what, held, said in (
            ("protocol_version", "protocol version", PROTOCOL_VERSION, hello.protocol_version),
            ("vocabulary", "vocabulary", limits.vocabulary_hash, hello.vocabulary_hash),
            ("draft_version", "draft version", limits.draft_version, hello.draft_version or limits.draft_version),
            ("cells", "cells of the acceptance table", limits.cells_hash, hello.cells_hash),
        ):
            if held != said:
                return self._refusal(code, f"{what}: the draft service has {held}, the target {said!r:.80}")
        if self._admission is None:
            return None
        plain_s, verify_s = float(hello.plain_s), float(hello.verify_s)
        requests = self._registry.num_sessions_connected
        why = self._admission.admit(target_id, plain_s=plain_s, verify_s=verify_s, requests=requests)
        return self._refusal("full", why, retry_after_s=FULL_RETRY_S) if why else None

    # ---- sessions ----

    def _of_session(self, target: Target, message: Open | Draft, now: float) -> FromService | None:
        """An Open or a Draft: checked, then taken."""
        is_open = isinstance(message, Open)
        problem = problem_of_open(message, self._limits) if is_open else problem_of_draft(message, self._limits)
        if problem:
            return self._invalid(target, message, problem)
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

    def _open(self, target: Target, opened: Open, now: float) -> FromService | None:
        session = target.sessions.get(opened.session)
        if session is None:
            refusal = self._why_no_more(target, opened, now)
            if refusal is not None:
                return refusal
            session = self._registry.open(target, opened, now)
        else:
            session.heard_s = now
            heard = session.reopen(opened)
            if heard is not Heard.TAKEN:
                return self._not_taken(session, heard, opened)
        self._registry.note(session)
        return None

    def _why_no_more(self, target: Target, opened: Open, now: float) -> Refused | None:
        """Why this target cannot have one session more. Where there are too many, targets that are gone lose theirs
        before their leases end."""
        registry, most = self._registry, self._quotas.max_sessions_in_all
        if registry.num_sessions >= most:
            registry.expire(now)
        if len(target.sessions) >= self._quotas.max_sessions:
            why = f"{len(target.sessions)} sessions of this target are open, as many as one may have"
            return self._refusal("quota", why, opened, RETRY_S)
        if registry.num_sessions >= most and not registry.end_one_of_who_is_gone():
            why = f"{registry.num_sessions} sessions are open, as many as there may be"
            return self._refusal("quota", why, opened, RETRY_S)
        return None

    def _draft(self, target: Target, draft: Draft, now: float) -> FromService | None:
        session = target.sessions.get(draft.session)
        if session is None:
            return self._resync(draft)
        session.heard_s = now
        answered, before = session.answered, session.length
        heard = session.hear(draft)
        self._registry.note(session)
        if heard is not Heard.TAKEN:
            return self._not_taken(session, heard, draft)
        follows = answered is not None and len(answered[1].index) > 0 and draft.round == answered[0].round + 1
        if self._admission is not None and answered is not None and follows:
            emitted = min(session.length - before, answered[0].depth + 1)
            if emitted > 0:
                self._admission.verified(target.id, emitted, now - session.answered_s)
        return self._ask(target, session, draft, now) if draft.depth else None

    def _ask(self, target: Target, session: Session, draft: Draft, now: float) -> FromService | None:
        if len(target.sessions) > self._quotas.max_waiting and self._is_waiting_enough(target):
            waiting = self._quotas.max_waiting
            return self._refusal("quota", f"{waiting} drafts of this target wait, as many as may", draft, RETRY_S)
        deadline_s = now + max(min(float(draft.due_s), float(draft.give_up_s)), 0.0)  # what is overdue is due now
        asked = Asked(draft, now, deadline_s, now + float(draft.give_up_s), self._arrivals)
        self._arrivals += 1
        self._registry.ask(session, asked)
        return None

    def _is_waiting_enough(self, target: Target) -> bool:
        """Whether no more of its Drafts may wait."""
        return sum(other.asked is not None for other in target.sessions.values()) >= self._quotas.max_waiting

    def _not_taken(self, session: Session, heard: Heard, message: Open | Draft) -> FromService | None:
        """Of a message that did not change the text."""
        if heard is Heard.GAP:
            return self._resync(message)
        if heard is Heard.CONFLICT:
            return self._invalid(session.target, message, "said before under the same number, and otherwise")
        if heard is Heard.STALE:
            self._stats.stale += 1
            return None
        self._stats.duplicates += 1
        if heard is Heard.ANSWERED and session.answered is not None:
            self._stats.trees += 1
            return session.answered[1]
        return None

    # ---- ends and refusals ----

    def _resync(self, message: Open | Draft) -> Resync:
        self._stats.resyncs += 1
        return Resync(message.session, message.epoch)

    def _invalid(self, target: Target, message: Open | Draft, problem: str) -> FromService | None:
        """Ends the session that the message names."""
        self._registry.end_number(target, message.session)
        return self._of_one("invalid", problem, message)

    def _of_one(self, code: str, why: str, of: Open | Draft, retry_after_s: float = 0.0) -> Refused | None:
        """Refused, where the message names a session; where it names none, nobody is answered."""
        refusal = self._refusal(code, why, of, retry_after_s)
        return refusal if refusal.session else None

    def _refusal(self, code: str, why: str, of: Open | Draft | None = None, retry_after_s: float = 0.0) -> Refused:
        self._stats.refused[code] += 1
        session, epoch = (of.session, of.epoch) if of is not None else (0, 0)
        return Refused(code, why, session if is_id(session) else 0, epoch if is_id(epoch) else 0, retry_after_s)
