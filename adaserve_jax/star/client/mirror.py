"""The texts of a target's rows, as a draft service has to know them: one session for the request in each slot.

Knows no link and no message; `star.remote` says what is told to whom. Imports no jax.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaserve_jax.types import RowSampling, StepPlan

_LEAST = 256
"""Tokens that a text has room for at first."""


class Sampling(NamedTuple):
    """Of one request: what its noise and its distribution depend on."""

    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, rows: RowSampling, row: int) -> Sampling:
        """The parameters of one row of a step."""
        return cls(*(getattr(rows, name)[row].item() for name in cls._fields))


class Session:
    """One request at the draft services. number: its name there; epoch, round: those last used, see `star.messages`.

    length: tokens of its text. told: how many of them its service has. place: number of that service, None before the
    first; stream: which stream of it the session was opened in, -1 when it has to be opened anew. refused: services
    that refused it, and when each may be asked again.
    """

    __slots__ = (
        "_tokens", "epoch", "length", "number", "place", "refused", "round", "sampling", "stream", "told",
    )  # fmt: skip

    def __init__(self, number: int, sampling: Sampling) -> None:
        self.number = number
        self.sampling = sampling
        self.epoch = 0
        self.round = 0
        self.length = 0
        self.told = 0
        self.place: int | None = None
        self.stream = -1
        self.refused: dict[int, float] = {}
        self._tokens = np.empty(_LEAST, np.int32)

    def tokens(self, start: int = 0) -> np.ndarray:
        """A copy of the text from `start` on, i32[length - start]."""
        return self._tokens[start : self.length].copy()

    def write(self, start: int, tokens: np.ndarray) -> None:
        """Let the text be its first `start` <= length tokens, then these. Where the service was told another text, or a
        longer one, the session has to be opened anew."""
        end = start + len(tokens)
        same = start
        if start < self.length:
            overlap = min(end, self.length)
            differs = np.flatnonzero(self._tokens[start:overlap] != tokens[: overlap - start])
            same = start + int(differs[0]) if len(differs) else overlap
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(end, 2 * len(self._tokens)))
        self._tokens[start:end] = tokens
        self.length = end
        if self.told > same:
            self.stream = -1

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether the whole text is how these tokens begin."""
        return len(tokens) >= self.length and np.array_equal(self._tokens[: self.length], tokens[: self.length])


class Mirror:
    """Sessions by slot, slots from 0 to max_rows - 1."""

    def __init__(self, max_rows: int) -> None:
        self._sessions: list[Session | None] = [None] * max_rows
        self._opened = 0

    def follow(self, plan: StepPlan) -> tuple[list[Session | None], list[Session]]:
        """Take in what a step feeds the draft. Returns the session of each row, None where nothing is fed or where the
        text is not known whole; and the sessions that are no more, whose slots have got other requests.

        A row that is fed from its beginning is another request, unless it has the sampling of the slot's session and
        all of its text: then it is the same one, fed anew, and its session goes on.
        """
        draft = plan.draft
        assert draft is not None
        rows: list[Session | None] = []
        gone: list[Session] = []
        start = 0
        columns = (plan.slots.tolist(), draft.draft_ctx.tolist(), draft.catchup_counts.tolist())
        for row, (slot, known, count) in enumerate(zip(*columns, strict=True)):
            if not count:
                rows.append(None)
                continue
            tokens = draft.catchup_tokens[start : start + count]
            start += count
            session = self._sessions[slot]
            if session is not None and (known > session.length or known == 0):
                again = known == 0 and session.begins(tokens) and session.sampling == Sampling.of(plan.sampling, row)
                if not again:
                    gone.append(session)
                    session = self._sessions[slot] = None
            if session is None and known == 0:
                self._opened += 1
                session = self._sessions[slot] = Session(self._opened, Sampling.of(plan.sampling, row))
            if session is not None:
                session.write(known, tokens)
            rows.append(session)
        return rows, gone

    def drop(self, slot: int) -> Session | None:
        """The session of a slot whose request has ended, which is no more; None where there is none."""
        session, self._sessions[slot] = self._sessions[slot], None
        return session

    def sessions(self) -> list[Session]:
        """All that there are."""
        return [session for session in self._sessions if session is not None]
