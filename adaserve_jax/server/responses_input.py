"""Turn a request of /v1/responses into the chat request that it stands for, and its errors into this API's words.

Everything after this is chat's: the prompt, sampling, targets, tools and admission. A conversation gives the same
tokens whichever of the two APIs it came by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaserve_jax.errors import AdaServeError
from adaserve_jax.server.errors import ApiError, from_code, invalid
from adaserve_jax.server.parse import check_supported
from adaserve_jax.server.responses_schema import (
    INCLUDED_LOGPROBS,
    InputCall,
    InputMessage,
    InputPart,
    InputReasoning,
    InputResult,
    ResponsesBody,
    ResponseToolChoice,
    TextFormat,
)
from adaserve_jax.server.schema import (
    CalledFunction,
    ChatBody,
    ChosenFunction,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    ResponseFormat,
    Tool,
    ToolChoice,
)

_OWN = {"tools", "tool_choice", "response_format", "max_tokens", "max_completion_tokens", "n", "metadata"}
_OF_CHAT = (ChatBody.model_fields.keys() & ResponsesBody.model_fields.keys()) - _OWN - {"stream_options"}
"""Fields that mean the same in both requests."""
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
    "verbosity": "text.verbosity",
    ".function": "",
}
_CHAT_NAME = re.compile(
    r"messages\[\d+\](\.tool_calls\[\d+\]\.function)?|(?<=\])\.function(?=\.parameters)"
    r"|\b(max_completion_tokens|messages|reasoning_effort|response_format(\.json_schema(\.schema)?)?|verbosity)\b"
)


_TEXT_PARTS = ("input_text", "output_text")


@dataclass(frozen=True)
class FieldNames:
    """Names of the fields of one request of /v1/responses, by those of the chat request made of it.

    items: where each message, and each call in one, came from.
    """

    items: Mapping[str, str] = field(default_factory=dict[str, str])

    def error(self, error: ApiError | AdaServeError) -> ApiError:
        """Return an error about the chat request as one about the request that came."""
        if isinstance(error, AdaServeError):
            error = from_code(str(error), error.code, error.param, error.retry_after_s)
        param = "input" if error.param == "prompt" else error.param and self._spell(error.param).split(".")[0]
        return ApiError(
            error.status_code, self._spell(error.message), code=error.code, param=param, headers=error.headers
        )

    def _spell(self, text: str) -> str:
        return _CHAT_NAME.sub(lambda found: self.items.get(found[0]) or _NAMES.get(found[0], found[0]), text)


def as_chat(body: ResponsesBody) -> tuple[ChatBody, FieldNames]:
    """Return the chat request that serves this one. Raises ApiError."""
    check_supported(body)
    messages, names = _conversation(body)
    shared = {name: getattr(body, name) for name in _OF_CHAT}
    text = body.text
    if text is not None and text.verbosity is not None:
        shared["verbosity"] = text.verbosity
    if body.reasoning is not None and body.reasoning.effort is not None:
        shared["reasoning_effort"] = body.reasoning.effort
    chat = ChatBody.model_construct(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=None if text is None or text.format is None else _response_format(text.format),
        logprobs=INCLUDED_LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        tools=[
            Tool.model_construct(type="function", function=FunctionDefinition.model_construct(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict,
            ))
            for tool in body.functions
        ] or None,
        tool_choice=_tool_choice(body.tool_choice),
    )  # fmt: skip
    return chat, names


def _conversation(body: ResponsesBody) -> tuple[list[Message], FieldNames]:
    """Return the messages and where each came from. Calls belong to the assistant's message before them, if any."""
    messages: list[Message] = []
    places: dict[str, str] = {}
    if body.instructions is not None:
        messages.append(Message.model_construct(role="system", content=body.instructions))
        places["messages[0]"] = "instructions"
    items, thoughts = body.input, list[str]()
    if isinstance(items, str):
        places[f"messages[{len(messages)}]"] = "input"
        return [*messages, Message.model_construct(role="user", content=items)], FieldNames(places)
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if isinstance(item, InputReasoning):
            thoughts += [part.text or "" for part in item.content or ()]
            continue
        if isinstance(item, InputCall):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message.model_construct(role="assistant"))
            last = messages[-1]
            last.reasoning_content = "".join([last.reasoning_content or "", *thoughts]) or None
            thoughts = []
            last.tool_calls = last.tool_calls or []
            places[f"messages[{len(messages) - 1}].tool_calls[{len(last.tool_calls)}].function"] = where
            called = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
            last.tool_calls.append(MessageToolCall.model_construct(id=item.call_id, function=called))
            continue
        message = _message(item, where)
        if index == 0 and messages and message.role in ("system", "developer"):  # many templates take one of them
            messages[0].content = f"{messages[0].content}\n\n{message.content}"
            continue
        places[f"messages[{len(messages)}]"] = where
        messages.append(message)
        if isinstance(item, InputMessage) and item.role == "assistant":
            messages[-1].reasoning_content = "".join(thoughts) or None
        thoughts = []
    return messages, FieldNames(places)


def _message(item: InputMessage | InputResult, where: str) -> Message:
    if isinstance(item, InputResult):
        return Message.model_construct(
            role="tool", tool_call_id=item.call_id, content=_text(item.output, f"{where}.output")
        )
    return Message.model_construct(role=item.role, content=_text(item.content, f"{where}.content"))


def _text(content: str | list[InputPart], where: str) -> str:
    """Return the text of an item. Raises ApiError for a part that is not text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS or part.text is None:
            got = f"of type {part.type!r:.40}" if part.type not in _TEXT_PARTS else "without a text"
            raise invalid(
                f"{where} must hold parts of type input_text or output_text, got a part {got}",
                "input",
                "unsupported_content",
            )
    return "\n".join(part.text or "" for part in content)


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    return ToolChoice.model_construct(type="function", function=ChosenFunction.model_construct(name=choice.name))


def _response_format(wanted: TextFormat) -> ResponseFormat:
    schema = None if wanted.schema_ is None else JsonSchemaFormat.model_construct(schema_=wanted.schema_)
    return ResponseFormat.model_construct(type=wanted.type, json_schema=schema, schema_=None)
