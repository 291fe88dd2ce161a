"""Bodies of /v1/responses as pydantic models: the request, its items, the response, and the events of its stream.

Fields that chat has too are inherited from `schema.py`; `responses_input.py` turns a request into one of chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from adaserve_jax.server.request_model import FIRST_ERROR, RequestModel, ValidText, at_most, ignored, unsupported
from adaserve_jax.server.schema import (
    ChatLogprob,
    ChatTemplateFields,
    GenerationBody,
    LogprobCount,
    OtherChatFields,
    ResponseMetrics,
    ResponseModel,
    ThinkingFields,
    TokenLimit,
)

_NOT_STORED = "nothing is stored; send the whole conversation as input"
MAX_METADATA = 16
"""Most pairs of metadata, as in OpenAI's API."""
INCLUDED_LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results", "code_interpreter_call.outputs", "file_search_call.results",
    "computer_call_output.output.image_url", "message.input_image.image_url",
]  # fmt: skip


class InputPart(RequestModel):
    type: str = Field(description="input_text, or output_text as an earlier response had it.")
    text: ValidText | None = Field(None, description="The text.")


def _text_or_list(value: object) -> str | None:
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else None


ItemContent = Annotated[
    Annotated[ValidText, Tag("text")] | Annotated[list[InputPart], FIRST_ERROR, Tag("list")],
    Discriminator(_text_or_list, custom_error_type="no_content", custom_error_message="a text or a list of parts"),
]


class InputMessage(RequestModel):
    type: Literal["message"] = Field("message", description="May be left out.")
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Who speaks; developer is today's name of system."
    )
    content: ItemContent = Field(description="A text, or parts of type input_text or output_text.")


class InputReasoning(RequestModel):
    type: Literal["reasoning"] = Field(description="What an earlier response thought.")
    content: Annotated[list[InputPart], FIRST_ERROR] | None = Field(
        None, description="Parts of type reasoning_text; the template may leave them out."
    )
    summary: Any = ignored("the content has all of it", [])


class InputCall(RequestModel):
    type: Literal["function_call"] = Field(description="A call that an earlier response made.")
    call_id: ValidText = Field(description="What the item with its result names.")
    name: ValidText = Field(description="The function's name.")
    arguments: ValidText = Field(description="JSON of an object, as text.")


class InputResult(RequestModel):
    type: Literal["function_call_output"] = Field(description="The result of a call.")
    call_id: ValidText = Field(description="Which call it answers.")
    output: ItemContent = Field(description="A text, or parts of type input_text.")


def _kind(item: object) -> str | None:
    return str(item.get("type") or "message") if isinstance(item, dict) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="an item of type message, reasoning, function_call or function_call_output (items are not "
        "stored, so that none can be referred to; Vercel's AI SDK sends them whole with store: false)",
    ),
]


Input = Annotated[
    Annotated[ValidText, Tag("text")] | Annotated[list[InputItem], FIRST_ERROR, Field(min_length=1), Tag("list")],
    Discriminator(_text_or_list, custom_error_type="no_input", custom_error_message="a text or a list of items"),
]


class ResponseTool(RequestModel):
    type: Literal["function"] = Field(description="Only function.")
    name: ValidText = Field(description="1 to 64 of A-Za-z0-9_.-; different for each function.")
    description: ValidText | None = Field(None, description="Shown to the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of an object, which the arguments fit (see strict); left out: no arguments."
    )
    strict: bool | None = Field(
        None, description="true: refuse parameters that cannot be enforced whole; else what cannot is left out."
    )


class UnservedTool(RequestModel):
    """Accept a tool that would run at the provider; the model is not told of it, and a warning names it."""

    type: ValidText = Field(description="Any but function: left out, with a warning.")


def _tool_kind(tool: object) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return None if not isinstance(kind, str) else "function" if kind == "function" else "other"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")] | Annotated[UnservedTool, Tag("other")],
    Discriminator(_tool_kind, custom_error_type="no_tool", custom_error_message="a tool with a type, such as function"),
]


class ResponseToolChoice(RequestModel):
    type: Literal["function"] = Field(description="Only function.")
    name: ValidText = Field(description="One of the tools.")


def _none(value: object) -> bool:
    return value is None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: no demand; json_object: any JSON object; json_schema: JSON that fits the schema."
    )
    name: str | None = Field(None, description="Accepted and not used.", exclude_if=_none)
    description: str | None = Field(None, description="Accepted and not used.", exclude_if=_none)
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With type json_schema, and only then.", exclude_if=_none
    )
    strict: bool | None = Field(None, description="Accepted; the output always fits.", exclude_if=_none)

    model_config = ConfigDict(serialize_by_alias=True)


class TextOptions(RequestModel):
    format: TextFormat | None = Field(None, description="The form of the output; default: any text.")
    verbosity: Any = unsupported("medium", "medium", why="say it in the instructions")


class ReasoningOptions(RequestModel):
    effort: ValidText | None = Field(None, description="Like chat's reasoning_effort.")
    summary: Any = ignored("what was thought is there as it is")
    generate_summary: Any = ignored("what was thought is there as it is")


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = Field(None, description="Accepted; events carry no padding.")


class OtherResponseFields(OtherChatFields):
    """Fields of the Responses API, and of vLLM's, that no request is served by."""

    previous_response_id: Any = unsupported("null", why=_NOT_STORED)
    previous_response: Any = unsupported("null", why="send the whole conversation as input")
    previous_input_messages: Any = unsupported("[]", [], why="send the whole conversation as input")
    conversation: Any = unsupported("null", why=_NOT_STORED)
    prompt: Any = unsupported("null", why="nothing is stored; send instructions and input")
    background: Any = unsupported("false", False, why="nothing is stored; use stream")
    background_options: Any = ignored("nothing runs in the background")
    context_management: Any = unsupported("[]", [], why="nothing is compacted; see truncation")
    moderation: Any = unsupported("null", why="nothing is moderated")
    max_tool_calls: Any = ignored("it counts tools that run here, of which there are none")
    prompt_cache_options: Any = ignored("equal beginnings share their KV by themselves; see cache_salt")
    access_programs: Any = ignored("there are none")
    image: Any = ignored("messages hold text only")
    enable_response_messages: Any = ignored("the answer does not hold it", False)


class ResponsesBody(ThinkingFields, OtherResponseFields, ChatTemplateFields, GenerationBody):
    input: Input = Field(description="What the user says, or the conversation: messages, calls and their results.")
    instructions: ValidText | None = Field(None, description="A system message before the input.")
    max_output_tokens: TokenLimit | None = Field(
        None, description="Most tokens to generate; default: the rest of max_model_len."
    )
    tools: Annotated[list[AnyTool], FIRST_ERROR] | None = Field(
        None, description="Functions that the model may call; tools of other types are left out, with a warning."
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = Field(
        None, description="none: no call; auto, the default: the model decides; required, or a function: at least one."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default true.")
    text: TextOptions | None = Field(None, description="The form of the output.")
    reasoning: ReasoningOptions | None = Field(None, description="How hard the model thinks.")
    include: Annotated[list[Included], FIRST_ERROR] | None = Field(
        None, description="message.output_text.logprobs; the others are never there."
    )
    top_logprobs: LogprobCount | None = Field(
        None, description="Log probabilities, also of so many likeliest tokens, 0 to 20."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="auto: cut the beginning of a prompt that is too long, and lower max_output_tokens to fit; "
        "default disabled, which refuses such a prompt.",
    )
    metadata: Annotated[dict[str, ValidText], at_most(MAX_METADATA, "pairs")] | None = Field(
        None, description=f"Up to {MAX_METADATA} pairs that are given back in the response; not stored."
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with stream.")
    max_tokens: Any = unsupported("null", why="use max_output_tokens")
    max_completion_tokens: Any = unsupported("null", why="use max_output_tokens")
    response_format: Any = unsupported("null", why="use text.format")
    n: Any = unsupported("1", 1)
    prompt_logprobs: Any = unsupported("null", why="a response has no place for them; use chat")

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "Hello", "slo_tpot_ms": 40}]})

    def ignored_fields(self) -> list[str]:
        inner = {"reasoning": self.reasoning, "text": self.text}
        below = (f"{name}.{one}" for name, part in inner.items() if part is not None for one in part.ignored_fields())
        unserved = (f"tools[{place}]" for place, one in enumerate(self.tools or ()) if isinstance(one, UnservedTool))
        return [*super().ignored_fields(), *below, *unserved]

    @property
    def functions(self) -> list[ResponseTool]:
        """Return the tools that the model is told of."""
        return [tool for tool in self.tools or () if isinstance(tool, ResponseTool)]


ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(ResponseModel):
    type: Literal["output_text"] = Field(default="output_text", description="Always output_text.")
    text: str = Field(description="The text.")
    annotations: list[Any] = Field(default=[], description="Always empty.")
    logprobs: list[ChatLogprob] = Field(default=[], description="One for each token, where they were asked for.")


class OutputMessage(ResponseModel):
    id: str = Field(description="A fresh name of this item.")
    type: Literal["message"] = Field(default="message", description="Always message.")
    role: Literal["assistant"] = Field(default="assistant", description="Always assistant.")
    status: ItemStatus = Field(default="in_progress", description="incomplete: cut by max_output_tokens.")
    content: list[OutputText] = Field(description="One text; empty where the item begins.")


class OutputCall(ResponseModel):
    id: str = Field(description="A fresh name of this item.")
    type: Literal["function_call"] = Field(default="function_call", description="Always function_call.")
    call_id: str = Field(description="A fresh name, for the item with the result.")
    name: str = Field(description="The function's name.")
    arguments: str = Field(default="", description="JSON of an object that fits the parameters.")
    status: ItemStatus = Field(default="in_progress", description="incomplete: cut by max_output_tokens.")


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"] = Field(default="reasoning_text", description="Always reasoning_text.")
    text: str = Field(description="What the model thought.")


class OutputReasoning(ResponseModel):
    id: str = Field(description="A fresh name of this item.")
    type: Literal["reasoning"] = Field(default="reasoning", description="Always reasoning.")
    summary: list[Any] = Field(default=[], description="Always empty: the content has all of it.")
    content: list[ReasoningText] = Field(description="One text; empty where the item begins.")
    status: ItemStatus = Field(default="in_progress", description="incomplete: cut by max_output_tokens.")


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Input tokens whose KV was there already.")
    cache_write_tokens: int = Field(default=0, description="Always 0: keeping KV costs nothing.")


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int = Field(default=0, description="Tokens that were thought, without the marks around them.")


class ResponseUsage(ResponseModel):
    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: InputTokensDetails = Field(description="What of the prompt was there already.")
    output_tokens: int = Field(description="Tokens of the output.")
    output_tokens_details: OutputTokensDetails = Field(
        default=OutputTokensDetails(), description="What of the output was thought."
    )
    total_tokens: int = Field(description="Their sum.")


class ResponseFailure(ResponseModel):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="OpenAI's name.")
    message: str = Field(description="What went wrong, and what to do.")
    type: str = Field(description="The code that an error body would have.")
    param: str | None = Field(description="The field at fault, where it is one.")


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"] = Field(description="Always max_output_tokens.")


class ResponseObject(ResponseModel):
    """The response; request fields without a value were left out."""

    id: str = Field(description="A fresh name of this response.")
    object: Literal["response"] = Field(default="response", description="What this is.")
    created_at: int = Field(description="Unix time, seconds.")
    completed_at: int | None = Field(default=None, description="Unix time of its end; null: it goes on, or failed.")
    status: ResponseStatus = Field(description="incomplete: cut by max_output_tokens.")
    error: ResponseFailure | None = Field(default=None, description="Why it failed.")
    incomplete_details: IncompleteDetails | None = Field(default=None, description="Why it is incomplete.")
    model: str = Field(description="The served model's name.")
    output: list[OutputItem] = Field(description="What was thought, messages and calls, in order.")
    background: Literal[False] = Field(default=False, description="Always false.")
    previous_response_id: None = Field(default=None, description="Always null.")
    store: Literal[False] = Field(default=False, description="Always false.")
    instructions: str | None = Field(description="As requested.")
    max_output_tokens: int | None = Field(description="As requested.")
    metadata: dict[str, str] = Field(description="As requested.")
    parallel_tool_calls: bool = Field(description="As requested, or true.")
    reasoning: ReasoningOptions | None = Field(description="As requested.")
    service_tier: str | None = Field(description="As requested.")
    temperature: float | None = Field(description="As requested.")
    text: TextOptions = Field(description="As requested, or any text.")
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = Field(description="As requested, or auto.")
    tools: list[ResponseTool] = Field(description="As requested.")
    top_logprobs: int | None = Field(description="As requested.")
    top_p: float | None = Field(description="As requested.")
    truncation: Literal["auto", "disabled"] = Field(description="As requested, or disabled.")
    user: str | None = Field(description="As requested.")
    usage: ResponseUsage | None = Field(default=None, description="Counts of tokens, once it ended.")
    metrics: ResponseMetrics | None = Field(default=None, description="What the request got.", exclude_if=_none)
    """These two are last: routers read them from the end of an answer, however long what it repeats is."""


class ResponseEvent(ResponseModel):
    """One event of a stream; a field is there where the type has it."""

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.output_item.done",
        "response.completed", "response.incomplete", "response.failed",
    ] = Field(description="What happened; also the event's name.")  # fmt: skip
    response: ResponseObject | None = Field(
        default=None, description="created, in_progress, completed, incomplete, failed.", exclude_if=_none
    )
    output_index: int | None = Field(default=None, description="Place of the item in the output.", exclude_if=_none)
    item: OutputItem | None = Field(default=None, description="output_item: the item so far.", exclude_if=_none)
    item_id: str | None = Field(default=None, description="Which item the event is about.", exclude_if=_none)
    content_index: int | None = Field(default=None, description="Always 0: a message has one text.", exclude_if=_none)
    part: OutputText | ReasoningText | None = Field(
        default=None, description="content_part: the text so far.", exclude_if=_none
    )
    text: str | None = Field(
        default=None, description="output_text.done, reasoning_text.done: all of it.", exclude_if=_none
    )
    arguments: str | None = Field(
        default=None, description="function_call_arguments.done: all of them.", exclude_if=_none
    )
    logprobs: list[ChatLogprob] | None = Field(
        default=None, description="output_text: of its tokens, where they were asked for.", exclude_if=_none
    )
    sequence_number: int = Field(default=0, description="From 0, one more with each event.")
    delta: str | None = Field(default=None, description="The next piece of a text or of arguments.", exclude_if=_none)
