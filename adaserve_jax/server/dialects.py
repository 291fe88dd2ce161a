"""How each endpoint spells the same generation: text completions and chat. Pure functions of texts and counts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel

from adaserve_jax.server.pieces import Piece, Token
from adaserve_jax.server.responses import (
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
    ResponseMetrics,
    TopLogprob,
    Usage,
)


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
