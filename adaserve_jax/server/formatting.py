"""How each endpoint spells the same generation: text completions and chat. Pure functions of texts and counts."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from pydantic import BaseModel

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.server.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishedBy,
    ResponseMetrics,
    TopLogprob,
    Usage,
)
from adaserve_jax.types import TokenLogprob

# From the engine's chunks to what a client is shown: prompts echoed, log probabilities with the bytes they
# stand for.
#
# Knows no endpoint's spelling and no HTTP.

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value."""
Token = bytes | str
"""The bytes that a token spells, or the name of one that spells nothing, as of Tokenizer.spelled."""
Spelled = Callable[[int], Token]


@dataclass(frozen=True)
class SpelledLogprob:
    """One output token. offset: characters of the output before it. top: the likeliest in its place, best first."""

    token: Token
    logprob: float
    offset: int
    top: tuple[tuple[Token, float], ...]


@dataclass(frozen=True)
class Piece:
    """Text of one choice: a part of it in a stream, all of it in a full response. logprobs: one
    per token; None: they were not asked for."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: tuple[SpelledLogprob, ...] | None = None

    @property
    def reason(self) -> FinishedBy | None:
        return cast("FinishedBy | None", self.finish_reason)

    @property
    def is_plain(self) -> bool:
        """Whether there is only text."""
        return bool(self.text) and self.finish_reason is None and self.logprobs is None

    @staticmethod
    def joined(parts: Sequence[Piece]) -> Piece:
        """Pieces of one choice, in order, as one."""
        logprobs = None if parts[0].logprobs is None else tuple(one for part in parts for one in part.logprobs or ())
        return Piece(parts[0].index, "".join(part.text for part in parts), parts[-1].finish_reason, logprobs)


class Speller:
    """Adds spellings and offsets to the log probabilities of one choice's tokens, in order."""

    def __init__(self, spelled: Spelled):
        self._spelled = spelled
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def spell(self, given: Sequence[TokenLogprob]) -> tuple[SpelledLogprob, ...]:
        return tuple(self._one(item) for item in given)

    def _one(self, item: TokenLogprob) -> SpelledLogprob:
        token, offset = self._spelled(item.token_id), self._characters
        if isinstance(token, bytes):
            self._characters += len(self._decoder.decode(token))
        top = tuple((self._spelled(other), max(value, LEAST_LOGPROB)) for other, value in item.top)
        return SpelledLogprob(token, max(item.logprob, LEAST_LOGPROB), offset, top)


@dataclass
class Pieces:
    """The choices of one HTTP request. echo: the prompts' texts, to be shown before each of their choices, or none.
    spelled: where log probabilities were asked for."""

    choices_per_prompt: int = 1
    echo: tuple[str, ...] = ()
    spelled: Spelled | None = None
    _held: dict[int, Piece] = field(default_factory=dict)
    _spellers: dict[int, Speller] = field(default_factory=dict)

    def opens(self, index: int) -> bool:
        """No chunk of this choice has come yet."""
        return index not in self._held

    def shows_as_is(self, index: int, chunk: OutputChunk) -> bool:
        """Whether this chunk is a plain piece by itself, as most are: then `take` would only say its text."""
        held = self._held.get(index)
        as_is = self.spelled is None and held is not None and not held.text
        return as_is and bool(chunk.text) and chunk.finish_reason is None

    def take(self, index: int, chunk: OutputChunk) -> Piece | None:
        """What to show now: this chunk, and with it what was held back before. None: its tokens end inside a
        character, and it is held back."""
        logprobs = None
        if self.spelled is not None:
            speller = self._spellers.setdefault(index, Speller(self.spelled))
            logprobs = speller.spell(chunk.logprobs)
        piece = Piece(index, chunk.text, chunk.finish_reason, logprobs)
        before = self._held.get(index) or self._opening(index)
        whole = Piece.joined([before, piece])
        if not chunk.text and chunk.finish_reason is None:
            self._held[index] = whole
            return None
        self._held[index] = Piece(index, "", logprobs=None if logprobs is None else ())
        return whole

    def _opening(self, index: int) -> Piece:
        text = self.echo[index // self.choices_per_prompt] if self.echo else ""
        return Piece(index, text, logprobs=None if self.spelled is None else ())


class Dialect(Protocol):
    @property
    def id(self) -> str: ...

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        """The event that comes before a choice's first text, if the endpoint has one. extras: as of `event`."""
        ...

    def event(self, pieces: list[Piece], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        """One event of a stream. extras: usage and metrics, written only when given."""
        ...

    def full(self, pieces: list[Piece], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """The whole response in one body."""
        ...


@dataclass(frozen=True)
class CompletionDialect:
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        return None

    def event(self, pieces: list[Piece], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        choices = [
            CompletionChoice(index=p.index, text=p.text, logprobs=_completion_logprobs(p), finish_reason=p.reason)
            for p in pieces
        ]
        return Completion.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, pieces: list[Piece], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        return self.event(pieces, usage=usage, metrics=metrics)


@dataclass(frozen=True)
class ChatDialect:
    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        delta = Delta(role="assistant", content="")
        return self._event([ChatChunkChoice(index=index, delta=delta, finish_reason=None)], **extras)

    def event(self, pieces: list[Piece], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return self._event([
            ChatChunkChoice(
                index=p.index, delta=Delta(content=p.text) if p.text else Delta(), logprobs=_chat_logprobs(p),
                finish_reason=p.reason,
            )
            for p in pieces
        ], **extras)  # fmt: skip

    def _event(self, choices: list[ChatChunkChoice], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return ChatChunk.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, pieces: list[Piece], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        choices = [
            ChatChoice(
                index=p.index,
                message=AssistantMessage(content=p.text),
                logprobs=_chat_logprobs(p),
                finish_reason=p.reason or "stop",
            )
            for p in pieces
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage, metrics=metrics
        )


def to_json(model: BaseModel) -> str:
    """JSON of a response; usage and metrics only where they were set."""
    return model.model_dump_json(exclude={"usage", "metrics"} - model.model_fields_set)


def _completion_logprobs(piece: Piece) -> CompletionLogprobs | None:
    if piece.logprobs is None:
        return None
    asked = any(item.top for item in piece.logprobs)
    return CompletionLogprobs(
        tokens=[shown(item.token, "bytes:") for item in piece.logprobs],
        token_logprobs=[item.logprob for item in piece.logprobs],
        top_logprobs=[
            {shown(token, "bytes:"): value for token, value in (*item.top, (item.token, item.logprob))}
            for item in piece.logprobs
        ] if asked else None,
        text_offset=[item.offset for item in piece.logprobs],
    )  # fmt: skip


def _chat_logprobs(piece: Piece) -> ChatLogprobs | None:
    if piece.logprobs is None:
        return None
    return ChatLogprobs(content=[
        ChatLogprob(
            token=shown(item.token), logprob=item.logprob, bytes=_numbers(item.token),
            top_logprobs=[TopLogprob(token=shown(t), logprob=value, bytes=_numbers(t)) for t, value in item.top],
        )
        for item in piece.logprobs
    ])  # fmt: skip


def _numbers(token: Token) -> list[int] | None:
    return list(token) if isinstance(token, bytes) else None


def shown(token: Token, prefix: str = "") -> str:
    """A token as text; its bytes in hexadecimal, behind `prefix`, where they are no whole characters."""
    if isinstance(token, str):
        return token
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
