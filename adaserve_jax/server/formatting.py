"""Format a generation for each endpoint: engine chunks to deltas, deltas to the bodies of completions and chat."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from pydantic import BaseModel

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.sampling import ANSWERING, BEFORE_THINKING, Thinking, ToolCalls
from adaserve_jax.server.prompt_logprobs import PromptReport
from adaserve_jax.server.schema import (
    LEAST_LOGPROB,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinishedBy,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishedBy,
    FunctionCall,
    PromptLogprob,
    PromptLogprobs,
    ResponseMetrics,
    ToolCall,
    ToolCallPiece,
    TopLogprob,
    Usage,
)
from adaserve_jax.server.tool_parser import ToolCallDelta, ToolCallParser
from adaserve_jax.types import TokenLogprob

Token = bytes | str
"""Bytes that a token spells, or the name of a special token (`Tokenizer.spelled`)."""
SpellToken = Callable[[int], Token]


@dataclass(frozen=True)
class SpelledLogprob:
    """Log probability of one token of the output, or of the prompt that is put before it.

    logprob: None for the first of a prompt. offset: characters of the text before the token. top: the likeliest tokens
    at its place, best first.
    """

    token: Token
    logprob: float | None
    offset: int
    top: tuple[tuple[Token, float], ...]


@dataclass(frozen=True)
class ChoiceDelta:
    """New text of one choice, or all of it in a full response.

    logprobs: one per token; None when the request did not ask for them. tool_calls: beginnings and arguments of calls,
    which the text does not have. prompt_logprobs: like logprobs, of the prompt. reasoning: what was thought, which the
    text does not have either. stop_reason: as of `OutputChunk`.
    """

    index: int
    text: str
    finish_reason: ChatFinishedBy | None = None
    logprobs: tuple[SpelledLogprob, ...] | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: tuple[dict[str, PromptLogprob] | None, ...] | None = None
    reasoning: str = ""
    stop_reason: int | str | None = None

    @property
    def is_text_only(self) -> bool:
        nothing_else = self.logprobs is None and not self.tool_calls and not self.reasoning
        return bool(self.text) and self.finish_reason is None and nothing_else

    @staticmethod
    def join(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
        """Concatenate deltas of one choice, in order."""
        first, last = deltas[0], deltas[-1]
        logprobs = None if first.logprobs is None else tuple(one for delta in deltas for one in delta.logprobs or ())
        of_prompt = first.prompt_logprobs
        if of_prompt is not None:
            of_prompt = tuple(one for delta in deltas for one in delta.prompt_logprobs or ())
        calls = ToolCallDelta.join(one for delta in deltas for one in delta.tool_calls)
        text, reasoning = "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)
        return ChoiceDelta(
            first.index, text, last.finish_reason, logprobs, calls, of_prompt, reasoning, last.stop_reason
        )


class LogprobSpeller:
    """Add spellings and text offsets to the log probabilities of one choice's tokens, in order."""

    def __init__(self, spell: SpellToken):
        self._spell = spell
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0
        self._begins_with_space = False
        self.has_text = False
        """True once `fit` was told how the text begins."""

    def fit(self, logprobs: tuple[SpelledLogprob, ...], text: str) -> tuple[SpelledLogprob, ...]:
        """Return these, all that were added so far, with the offsets that they have in a text that begins with `text`.

        Decoding may drop the space with which the first token begins, as SentencePiece's does.
        """
        self.has_text = bool(text)
        if not text or text.startswith(" ") or not self._begins_with_space:
            return logprobs
        self._characters -= 1
        return tuple(replace(one, offset=max(one.offset - 1, 0)) for one in logprobs)

    def add(self, item: TokenLogprob, most: int | None = None) -> SpelledLogprob:
        """Return the next token's. most: number of its likeliest tokens to keep; None: all."""
        token, offset = self._place(item.token_id)
        top = tuple((self._spell(other), max(value, LEAST_LOGPROB)) for other, value in item.top[:most])
        return SpelledLogprob(token, max(item.logprob, LEAST_LOGPROB), offset, top)

    def add_unscored(self, token_id: int) -> SpelledLogprob:
        """Return that of a token that has no probability, the first of a prompt."""
        token, offset = self._place(token_id)
        return SpelledLogprob(token, None, offset, ())

    def _place(self, token_id: int) -> tuple[Token, int]:
        """Return the next token's spelling and offset."""
        token, offset = self._spell(token_id), self._characters
        if isinstance(token, bytes):
            added = self._decoder.decode(token)
            self._begins_with_space |= not self._characters and added.startswith(" ")
            self._characters += len(added)
        return token, offset


@dataclass
class DeltaBuilder:
    """Build the deltas of one HTTP request's choices from the engine's chunks.

    A chunk without text, whose tokens end inside a character or which scores a part of the prompt, is held back and
    joined with the next one.
    echo: texts of the prompts, put before each of their choices. spell: None: no log probabilities were asked for.
    tool_calls: what the answer may call; None: nothing. report: what is told of the prompts. first_tokens: the first
    token of each prompt, where log probabilities of the echo were asked for. spell_prompt: where prompt_logprobs were.
    prompt_only: the output is left out. hides_thinking: what was thought is. unscored: log probabilities of what was
    thought, and of these marks, are left out; None: they are not.
    """

    choices_per_prompt: int = 1
    echo: tuple[str, ...] = ()
    spell: SpellToken | None = None
    tool_calls: ToolCalls | None = None
    report: PromptReport = field(default_factory=PromptReport)
    first_tokens: tuple[int, ...] = ()
    spell_prompt: Callable[[int], str] | None = None
    prompt_only: bool = False
    hides_thinking: bool = False
    unscored: Thinking | None = None
    _states: dict[int, int] = field(default_factory=dict)
    _blanks: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    _held: dict[int, ChoiceDelta] = field(default_factory=dict)
    _spellers: dict[int, LogprobSpeller] = field(default_factory=dict)
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def is_new(self, index: int) -> bool:
        """Return whether no chunk of this choice was added yet."""
        return index not in self._held

    def is_text_only(self, index: int, chunk: OutputChunk) -> bool:
        """Return whether the chunk's text is all that `add` would return for it, and there is nothing to hold back."""
        held = self._held.get(index)
        nothing_held = self.spell is None and self.tool_calls is None and held is not None and not held.text
        return nothing_held and bool(chunk.text) and chunk.finish_reason is None and not chunk.reasoning

    def add(self, index: int, chunk: OutputChunk) -> ChoiceDelta | None:
        """Return the delta to show now, held chunks included; None when this chunk is held back."""
        reason = cast("FinishedBy | None", chunk.finish_reason)  # `Generation.chunks` raises for every other
        if self.prompt_only:
            reason = reason and "length"
            chunk = replace(chunk, text="", logprobs=[], stop_reason=None)
        if self.hides_thinking:
            chunk = replace(chunk, reasoning="")
        if self.unscored is not None and (chunk.logprobs or reason is not None):
            chunk = replace(chunk, logprobs=self._scored(index, chunk, self.unscored))
        held = self._held.get(index) or self._opening(index)
        new = ChoiceDelta(
            index, chunk.text, reason, self._logprobs(index, chunk), reasoning=chunk.reasoning,
            stop_reason=chunk.stop_reason,
        )  # fmt: skip
        if chunk.prompt_logprobs and self.spell_prompt is not None:
            entries = (self.report.entry(item, self.spell_prompt) for item in chunk.prompt_logprobs)
            new = replace(new, prompt_logprobs=tuple(entries))
        if self.tool_calls is not None:
            if index not in self._parsers:
                self._parsers[index] = ToolCallParser(self.tool_calls)
            new = _with_calls(new, self._parsers[index])
        delta = ChoiceDelta.join([held, new])
        if delta.logprobs is not None and not (speller := self._spellers[index]).has_text:
            scored = chunk.text if self.unscored is not None else chunk.reasoning + chunk.text
            delta = replace(delta, logprobs=speller.fit(delta.logprobs, held.text + scored))
        if not new.text and not new.reasoning and not new.tool_calls and chunk.finish_reason is None:
            self._held[index] = delta
            return None
        self._held[index] = ChoiceDelta(index, "", logprobs=None if delta.logprobs is None else ())
        return delta

    def _scored(self, index: int, chunk: OutputChunk, thinking: Thinking) -> list[TokenLogprob]:
        """Return the log probabilities of the answer's tokens.

        Those of white space before it are held back: it belongs to the answer unless an opening mark comes.
        """
        state, shown = self._states.get(index, thinking.state), list[TokenLogprob]()
        blanks = self._blanks.setdefault(index, [])
        for item in chunk.logprobs:
            state = thinking.after(before := state, item.token_id)
            if state == BEFORE_THINKING:
                blanks.append(item)
            elif before == BEFORE_THINKING:
                shown += [*blanks, item] if state == ANSWERING else []
                blanks.clear()
            elif state == before == ANSWERING:
                shown.append(item)
        self._states[index] = state
        if chunk.finish_reason is not None:
            shown += blanks
        return shown

    def _opening(self, index: int) -> ChoiceDelta:
        """Return what precedes the first chunk of a choice: the echo, and the places of the prompt's first token."""
        prompt, logprobs = index // self.choices_per_prompt, None
        if self.spell is not None:
            speller = self._spellers[index] = LogprobSpeller(self.spell)
            logprobs = (speller.add_unscored(self.first_tokens[prompt]),) if self.first_tokens else ()
        text = self.echo[prompt] if self.echo else ""
        return ChoiceDelta(index, text, None, logprobs, (), None if self.spell_prompt is None else (None,))

    def _logprobs(self, index: int, chunk: OutputChunk) -> tuple[SpelledLogprob, ...] | None:
        speller = self._spellers.get(index)
        if speller is None:
            return None
        echoed = chunk.prompt_logprobs if self.first_tokens else ()
        return (*(speller.add(item, self.report.echoed) for item in echoed), *map(speller.add, chunk.logprobs))


def _with_calls(delta: ChoiceDelta, parser: ToolCallParser) -> ChoiceDelta:
    """Return a delta with the calls that its text brings, and without their text."""
    text, calls = parser.push(delta.text, last=delta.finish_reason is not None)
    ended = delta.finish_reason == "stop" and parser.complete
    return replace(
        delta, text=text, tool_calls=tuple(calls), finish_reason="tool_calls" if ended else delta.finish_reason
    )


@dataclass(frozen=True)
class CompletionFormatter:
    """Format of /v1/completions."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        """Return the event that precedes a choice's first text, if the endpoint has one. extras: see `event`."""
        return None

    def event(self, deltas: list[ChoiceDelta], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        """Return one event of a stream. extras: usage and metrics, written only when given."""
        choices = [
            CompletionChoice(
                index=d.index,
                text=d.text,
                logprobs=_completion_logprobs(d),
                finish_reason=cast("FinishedBy | None", d.finish_reason),
                stop_reason=d.stop_reason,
                prompt_logprobs=_prompt_logprobs(d),
            )
            for d in deltas
        ]
        return Completion.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices, **extras}
        )

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """Return the whole response as one body."""
        return self.event(choices, usage=usage, metrics=metrics)


@dataclass(frozen=True)
class ChatFormatter:
    """Format of /v1/chat/completions. service_tier: that of the request, which the answer repeats."""

    model: str
    service_tier: str | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int, **extras: Usage | ResponseMetrics | None) -> BaseModel | None:
        delta = Delta(role="assistant", content="")
        return self._chunk([ChatChunkChoice(index=index, delta=delta, finish_reason=None)], **extras)

    def event(self, deltas: list[ChoiceDelta], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return self._chunk([
            ChatChunkChoice(
                index=d.index,
                delta=Delta(
                    content=d.text or None, reasoning_content=d.reasoning or None, reasoning=d.reasoning or None,
                    tool_calls=_pieces(d),
                ),
                logprobs=_chat_logprobs(d), finish_reason=d.finish_reason, stop_reason=d.stop_reason,
            )
            for d in deltas
        ], **extras)  # fmt: skip

    def _chunk(self, choices: list[ChatChunkChoice], **extras: Usage | ResponseMetrics | None) -> BaseModel:
        return ChatChunk.model_validate(
            {"id": self.id, "created": self.created, "model": self.model, "choices": choices,
             "service_tier": self.service_tier, **extras}
        )  # fmt: skip

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        answers = [
            ChatChoice(
                index=d.index,
                message=_message(d),
                logprobs=_chat_logprobs(d),
                finish_reason=d.finish_reason or "stop",
                stop_reason=d.stop_reason,
            )
            for d in choices
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=answers, usage=usage, metrics=metrics,
            prompt_logprobs=_prompt_logprobs(choices[0]), service_tier=self.service_tier,
        )  # fmt: skip


EventFormatter = CompletionFormatter | ChatFormatter
"""Formatters whose streams are events of one kind, which `EventWriter` writes."""


class ResponseFormatter(Protocol):
    """Format of whole responses."""

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """Return the response of choices that ended."""
        ...


def to_json(model: BaseModel) -> str:
    """Return the JSON of a response, with usage and metrics only where they were set."""
    return model.model_dump_json(exclude={"usage", "metrics"} - model.model_fields_set)


def _message(delta: ChoiceDelta) -> AssistantMessage:
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in delta.tool_calls
    ]
    thought = delta.reasoning or None
    return AssistantMessage(
        content=delta.text or None if calls or thought else delta.text,
        reasoning_content=thought, reasoning=thought, tool_calls=calls or None,
    )  # fmt: skip


def _pieces(delta: ChoiceDelta) -> list[ToolCallPiece] | None:
    return [
        ToolCallPiece(
            index=call.index, id=call.id or None, type="function" if call.id else None,
            function=FunctionCall(name=call.name or None, arguments=call.arguments),
        )
        for call in delta.tool_calls
    ] or None  # fmt: skip


def _completion_logprobs(delta: ChoiceDelta) -> CompletionLogprobs | None:
    if delta.logprobs is None:
        return None
    asked = any(item.top for item in delta.logprobs)
    return CompletionLogprobs(
        tokens=[token_text(item.token, "bytes:") for item in delta.logprobs],
        token_logprobs=[item.logprob for item in delta.logprobs],
        top_logprobs=[
            None if item.logprob is None else
            {token_text(token, "bytes:"): value for token, value in (*item.top, (item.token, item.logprob))}
            for item in delta.logprobs
        ] if asked else None,
        text_offset=[item.offset for item in delta.logprobs],
    )  # fmt: skip


def _prompt_logprobs(delta: ChoiceDelta) -> PromptLogprobs | None:
    return None if delta.prompt_logprobs is None else list(delta.prompt_logprobs)


def _chat_logprobs(delta: ChoiceDelta) -> ChatLogprobs | None:
    if delta.logprobs is None:
        return None
    return ChatLogprobs(content=chat_logprobs(delta.logprobs))


def chat_logprobs(items: Iterable[SpelledLogprob]) -> list[ChatLogprob]:
    """Return log probabilities as chat writes them."""
    return [
        ChatLogprob(
            token=token_text(item.token), logprob=item.logprob or 0.0, bytes=_numbers(item.token),
            top_logprobs=[TopLogprob(token=token_text(t), logprob=value, bytes=_numbers(t)) for t, value in item.top],
        )
        for item in items
    ]  # fmt: skip


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
