"""Format a generation for /v1/responses: deltas to output items, and these to a response or to the events of a stream.

The events of one item: it is added, its content grows, its content is done, it is done. Whole responses are made by the
same steps, without writing the events.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any, Literal

from pydantic import BaseModel

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.server.errors import ApiError, invalid
from adaserve_jax.server.formatting import ChoiceDelta, SpelledLogprob, chat_logprobs
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.responses_input import FieldNames
from adaserve_jax.server.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponsesBody,
    ResponseStatus,
    ResponseUsage,
    TextFormat,
    TextOptions,
)
from adaserve_jax.server.schema import ChatLogprob, ResponseMetrics, Usage
from adaserve_jax.server.tool_parser import ToolCallDelta

_Opening = Literal["response.created", "response.in_progress"]
_OPENING: tuple[_Opening, _Opening] = ("response.created", "response.in_progress")


class OutputItems:
    """The output items of one answer, as its deltas come. The last item is open: it may still grow."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self.cut = False
        """Whether the answer ended at its limit of tokens."""
        self._parts: list[str] = []  # of the open item's text or arguments
        self._shown: list[ChatLogprob] = []  # of the open message
        self._logprobs: deque[SpelledLogprob] = deque()  # of tokens whose text has not come yet
        self._characters = 0

    def add(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        """Add a delta; yield an event for each step that it takes, to be written before the next one is asked for."""
        self._logprobs.extend(delta.logprobs or ())
        ends = delta.finish_reason is not None
        if delta.reasoning:
            yield from self._add_reasoning(delta.reasoning)
        if delta.text or (ends and not self.items and not delta.tool_calls):
            yield from self._add_text(delta.text)
        for call in delta.tool_calls:
            yield from self._add_call(call)
        if ends:
            self.cut = delta.finish_reason == "length"
            yield from self.close("incomplete" if self.cut else "completed")

    @property
    def takes_text(self) -> bool:
        """Return whether the open item is a message."""
        return bool(self.items) and isinstance(self.items[-1], OutputMessage)

    def text_delta(self, text: str) -> ResponseEvent:
        """Add text to the open message; return its event."""
        self.grow(text)
        new = self._take_logprobs()
        self._shown += new
        return self._event(type="response.output_text.delta", content_index=0, delta=text, logprobs=new)

    def grow(self, text: str) -> None:
        """Add text to the open message."""
        self._parts.append(text)
        self._characters += len(text)

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        if not self.items or not isinstance(self.items[-1], OutputMessage):
            yield from self.close("completed")
            yield from self._open(OutputMessage(id=f"msg_{uuid.uuid4().hex}", content=[]))
            yield self._event(type="response.content_part.added", content_index=0, part=OutputText(text=""))
        if text:
            yield self.text_delta(text)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not self.items:
            yield from self._open(OutputReasoning(id=f"rs_{uuid.uuid4().hex}", content=[]))
            yield self._event(type="response.content_part.added", content_index=0, part=ReasoningText(text=""))
        self._parts.append(text)
        yield self._event(type="response.reasoning_text.delta", content_index=0, delta=text)

    def _add_call(self, call: ToolCallDelta) -> Iterator[ResponseEvent]:
        if call.id:
            yield from self.close("completed")
            self._logprobs.clear()  # from here on they are those of calls
            yield from self._open(OutputCall(id=f"fc_{uuid.uuid4().hex}", call_id=call.id, name=call.name))
        if call.arguments:
            self._parts.append(call.arguments)
            yield self._event(type="response.function_call_arguments.delta", delta=call.arguments)

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        self.items.append(item)
        self._parts, self._shown = [], []
        yield ResponseEvent(type="response.output_item.added", output_index=len(self.items) - 1, item=item)

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the open item, if any; yield the events of it."""
        item, whole = self.items[-1] if self.items else None, "".join(self._parts)
        if isinstance(item, OutputCall):
            item.arguments = whole
            yield self._event(type="response.function_call_arguments.done", arguments=whole)
        elif isinstance(item, OutputReasoning):
            thought = ReasoningText(text=whole)
            yield self._event(type="response.reasoning_text.done", content_index=0, text=whole)
            yield self._event(type="response.content_part.done", content_index=0, part=thought)
            item.content = [thought]
        elif item is not None:
            part = OutputText(text=whole, logprobs=self._shown)
            yield self._event(type="response.output_text.done", content_index=0, text=whole, logprobs=part.logprobs)
            yield self._event(type="response.content_part.done", content_index=0, part=part)
            item.content = [part]
        if item is not None:
            item.status = status
            yield ResponseEvent(type="response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _take_logprobs(self) -> list[ChatLogprob]:
        """Return what is new of the tokens that began within the text so far, which calls behind it do not."""
        taken: list[SpelledLogprob] = []
        while self._logprobs and self._logprobs[0].offset < self._characters:
            taken.append(self._logprobs.popleft())
        return chat_logprobs(taken)

    def _event(self, **fields: Any) -> ResponseEvent:
        """Return an event about the open item."""
        return ResponseEvent(output_index=len(self.items) - 1, item_id=self.items[-1].id, **fields)


class ResponsesFormatter:
    """Format of /v1/responses: the response at each of its stages.

    body: the request, whose fields the response repeats. names: its names for errors.
    """

    def __init__(self, body: ResponsesBody, names: FieldNames, model: str):
        """Take the fields to repeat. Raises ApiError if they cannot be written as JSON."""
        self.names = names
        self._repeated: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": body.reasoning,
            "service_tier": body.service_tier,
            "temperature": body.temperature,
            "text": TextOptions.model_construct(
                format=(body.text and body.text.format) or TextFormat.model_construct(type="text"),
                verbosity=body.text and body.text.verbosity,
            ),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.functions,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }
        try:
            self.going_on().model_dump_json()
        except ValueError:
            raise invalid(
                "the request's fields must be valid Unicode and not nested too deeply: the response repeats them", None
            ) from None

    def full(self, choices: list[ChoiceDelta], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        output = OutputItems()
        for _ in output.add(choices[0]):
            pass
        return self.ended(output, usage, metrics)

    def going_on(self) -> ResponseObject:
        return self._response("in_progress", [])

    def ended(self, output: OutputItems, usage: Usage, metrics: ResponseMetrics) -> ResponseObject:
        return self._response(
            "incomplete" if output.cut else "completed",
            output.items,
            completed_at=None if output.cut else int(time.time()),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if output.cut else None,
            usage=_usage(usage),
            metrics=metrics,
        )

    def failed(self, output: OutputItems, error: ApiError) -> ResponseObject:
        kind: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if error.status_code < 500:
            kind = "rate_limit_exceeded" if error.status_code == 429 else "invalid_prompt"
        failure = ResponseFailure(code=kind, message=error.message, type=error.code, param=error.param)
        return self._response("failed", output.items, error=failure)

    def _response(self, status: ResponseStatus, items: list[OutputItem], **ending: Any) -> ResponseObject:
        return ResponseObject(status=status, output=items, **self._repeated, **ending)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0
            if usage.completion_tokens_details is None
            else usage.completion_tokens_details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )


class ResponseEventWriter:
    """Write the events of a stream as `event: TYPE` and `data: {...}`, numbered from 0 (`StreamWriter`)."""

    def __init__(self, generation: Generation, formatter: ResponsesFormatter):
        self.generation = generation
        self._formatter = formatter
        self._output = OutputItems()
        self._number = 0
        self._text_frame = ""

    def write(self, index: int, chunk: OutputChunk) -> str:
        """Return the events of one chunk.

        Most chunks hold only text, so the JSON of their event is made once, and number and text are filled in.
        """
        deltas = self.generation.deltas
        if self._output.takes_text and deltas.is_text_only(index, chunk):
            return self._text_event(chunk.text)
        written: list[str] = []
        if not self._number:
            response = self._formatter.going_on()
            written += [self._event(ResponseEvent(type=kind, response=response)) for kind in _OPENING]
        delta = deltas.add(index, chunk)
        if delta is not None:
            written += map(self._event, self._output.add(delta))
        return "".join(written)

    def end(self) -> str:
        """Return the event that ends the stream."""
        response = self._formatter.ended(self._output, self.generation.usage(), self.generation.metrics())
        kind = "response.incomplete" if self._output.cut else "response.completed"
        return self._event(ResponseEvent(type=kind, response=response))

    def failed(self, error: ApiError) -> str:
        """Return the event that ends a stream which failed midway, with the output until then."""
        for _ in self._output.close("incomplete"):
            pass  # the items' own events would say that they are whole
        response = self._formatter.failed(self._output, error)
        return self._event(ResponseEvent(type="response.failed", response=response))

    def named(self, error: ApiError) -> ApiError:
        return self._formatter.names.error(error)

    def _event(self, event: ResponseEvent) -> str:
        event.sequence_number = self._number
        self._number += 1
        return _written(event)

    def _text_event(self, text: str) -> str:
        """Return the event of a text that the one message of the answer grows by."""
        if not self._text_frame:
            before, mark, _ = _written(self._output.text_delta("")).rpartition('"sequence_number":')
            self._text_frame = before + mark
        self._output.grow(text)
        self._number += 1
        return f'{self._text_frame}{self._number - 1},"delta":{encode_basestring_ascii(text)}}}\n\n'


def _written(event: ResponseEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
