"""Format a generation for each endpoint: engine chunks to deltas, deltas to the bodies of completions and chat."""

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

LEAST_LOGPROB = -9999.0
"""Value written for minus infinity, which JSON cannot express; OpenAI uses the same."""
Token = bytes | str
"""Bytes that a token spells, or the name of a special token (`Tokenizer.spelled`)."""
SpellToken = Callable[[int], Token]


@dataclass(frozen=True)
class SpelledLogprob:
    """Log probability of one output token.

    offset: characters of the output before the token. top: the likeliest tokens at its place, best first.
    """

    token: Token
    logprob: float
    offset: int
    top: tuple[tuple[Token, float], ...]


@dataclass(frozen=True)
class ChoiceDelta:
    """New text of one choice, or all of it in a full response.

    logprobs: one per token; None when the request did not ask for them.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: tuple[SpelledLogprob, ...] | None = None

    @property
    def shown_finish_reason(self) -> FinishedBy | None:
        return cast("FinishedBy | None", self.finish_reason)

    @property
    def is_text_only(self) -> bool:
        return bool(self.text) and self.finish_reason is None and self.logprobs is None

    @staticmethod
    def join(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
        """Concatenate deltas of one choice, in order."""
        first, last = deltas[0], deltas[-1]
        logprobs = None if first.logprobs is None else tuple(one for delta in deltas for one in delta.logprobs or ())
        return ChoiceDelta(first.index, "".join(delta.text for delta in deltas), last.finish_reason, logprobs)


class LogprobSpeller:
    """Add spellings and text offsets to the log probabilities of one choice's tokens, in order."""

    def __init__(self, spell: SpellToken):
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def add(self, item: TokenLogprob) -> SpelledLogprob:
        token, offset = self._spell(item.token_id), self._characters
        if isinstance(token, bytes):
            self._characters += len(self._decoder.decode(token))
        top = tuple((self._spell(other), max(value, LEAST_LOGPROB)) for other, value in item.top)
        return SpelledLogprob(token, max(item.logprob, LEAST_LOGPROB), offset, top)


@dataclass
class DeltaBuilder:
    """Build the deltas of one HTTP request's choices from the engine's chunks.

    A chunk without text, whose tokens end inside a character, is held back and joined with the next one.

    Args:
        choices_per_prompt: The request's `n`.
        echo: Prompt texts that are put before each of their choices, or none.
        spell: Spells tokens; None when no log probabilities were asked for.
    """

    choices_per_prompt: int = 1
    echo: tuple[str, ...] = ()
    spell: SpellToken | None = None
    _held: dict[int, ChoiceDelta] = field(default_factory=dict)
    _spellers: dict[int, LogprobSpeller] = field(default_factory=dict)

    def is_new(self, index: int) -> bool:
        """Return whether no chunk of this choice was added yet."""
        return index not in self._held

    def is_text_only(self, index: int, chunk: OutputChunk) -> bool:
        """Return whether the chunk's text is all that `add` would return for it, and there is nothing to hold back."""
        held = self._held.get(index)
        nothing_held = self.spell is None and held is not None and not held.text
        return nothing_held and bool(chunk.text) and chunk.finish_reason is None

    def add(self, index: int, chunk: OutputChunk) -> ChoiceDelta | None:
        """Return the delta to show now, held chunks included; None when this chunk is held back."""
        logprobs = None
        if self.spell is not None:
            speller = self._spellers.setdefault(index, LogprobSpeller(self.spell))
            logprobs = tuple(speller.add(item) for item in chunk.logprobs)
        held = self._held.get(index)
        if held is None:
            prompt = self.echo[index // self.choices_per_prompt] if self.echo else ""
            held = ChoiceDelta(index, prompt, logprobs=None if self.spell is None else ())
        delta = ChoiceDelta.join([held, ChoiceDelta(index, chunk.text, chunk.finish_reason, logprobs)])
        if not chunk.text and chunk.finish_reason is None:
            self._held[index] = delta
            return None
        self._held[index] = ChoiceDelta(index, "", logprobs=None if logprobs is None else ())
        return delta


class ResponseFormatter(Protocol):
    """Format of one endpoint's responses."""

    @property
    def id(self) -> str: ...

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        """Return the event that precedes a choice's first text, if the endpoint has one. extras: see `event`."""
        ...

    def event(self, deltas: list[ChoiceDelta], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        """Return one event of a stream. extras: usage and metrics, written only when given."""
        ...

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """Return the whole response as one body."""
        ...


@dataclass(frozen=True)
class CompletionFormatter:
    """Format of /v1/completions."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        return None

    def event(self, deltas: list[ChoiceDelta], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        choices = [
            CompletionChoice(
                index=d.index, text=d.text, logprobs=_completion_logprobs(d), finish_reason=d.shown_finish_reason
            )
            for d in deltas
        ]
        return Completion.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        return self.event(choices, usage=usage, metrics=metrics)


@dataclass(frozen=True)
class ChatFormatter:
    """Format of /v1/chat/completions."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        delta = Delta(role="assistant", content="")
        return self._chunk([ChatChunkChoice(index=index, delta=delta, finish_reason=None)], **extras)

    def event(self, deltas: list[ChoiceDelta], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return self._chunk([
            ChatChunkChoice(
                index=d.index, delta=Delta(content=d.text) if d.text else Delta(), logprobs=_chat_logprobs(d),
                finish_reason=d.shown_finish_reason,
            )
            for d in deltas
        ], **extras)  # fmt: skip

    def _chunk(self, choices: list[ChatChunkChoice], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return ChatChunk.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        answers = [
            ChatChoice(
                index=d.index,
                message=AssistantMessage(content=d.text),
                logprobs=_chat_logprobs(d),
                finish_reason=d.shown_finish_reason or "stop",
            )
            for d in choices
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=answers, usage=usage, metrics=metrics
        )


def to_json(model: BaseModel) -> str:
    """Return the JSON of a response, with usage and metrics only where they were set."""
    return model.model_dump_json(exclude={"usage", "metrics"} - model.model_fields_set)


def _completion_logprobs(delta: ChoiceDelta) -> CompletionLogprobs | None:
    if delta.logprobs is None:
        return None
    asked = any(item.top for item in delta.logprobs)
    return CompletionLogprobs(
        tokens=[token_text(item.token, "bytes:") for item in delta.logprobs],
        token_logprobs=[item.logprob for item in delta.logprobs],
        top_logprobs=[
            {token_text(token, "bytes:"): value for token, value in (*item.top, (item.token, item.logprob))}
            for item in delta.logprobs
        ] if asked else None,
        text_offset=[item.offset for item in delta.logprobs],
    )  # fmt: skip


def _chat_logprobs(delta: ChoiceDelta) -> ChatLogprobs | None:
    if delta.logprobs is None:
        return None
    return ChatLogprobs(content=[
        ChatLogprob(
            token=token_text(item.token), logprob=item.logprob, bytes=_numbers(item.token),
            top_logprobs=[TopLogprob(token=token_text(t), logprob=value, bytes=_numbers(t)) for t, value in item.top],
        )
        for item in delta.logprobs
    ])  # fmt: skip


def _numbers(token: Token) -> list[int] | None:
    return list(token) if isinstance(token, bytes) else None


def token_text(token: Token, prefix: str = "") -> str:
    """Return a token as text; where its bytes are not whole characters, in hexadecimal behind `prefix`."""
    if isinstance(token, str):
        return token
    try:
        return token.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)
