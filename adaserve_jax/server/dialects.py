"""How each endpoint spells the same generation: text completions and chat. Pure functions of texts and counts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Protocol, cast

from pydantic import BaseModel

from adaserve_jax.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    FinishedBy,
    ResponseMetrics,
    Usage,
)


@dataclass(frozen=True)
class Piece:
    """Text of one choice: a part of it in a stream, all of it in a full response."""

    index: int
    text: str
    finish_reason: str | None = None

    @property
    def reason(self) -> FinishedBy | None:
        return cast("FinishedBy | None", self.finish_reason)


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
        choices = [CompletionChoice(index=p.index, text=p.text, finish_reason=p.reason) for p in pieces]
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
            ChatChunkChoice(index=p.index, delta=Delta(content=p.text) if p.text else Delta(), finish_reason=p.reason)
            for p in pieces
        ], **extras)  # fmt: skip

    def _event(self, choices: list[ChatChunkChoice], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return ChatChunk.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, pieces: list[Piece], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        choices = [
            ChatChoice(index=p.index, message=AssistantMessage(content=p.text), finish_reason=p.reason or "stop")
            for p in pieces
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage, metrics=metrics
        )


def to_json(model: BaseModel) -> str:
    """JSON of a response; usage and metrics only where they were set."""
    return model.model_dump_json(exclude={"usage", "metrics"} - model.model_fields_set)
