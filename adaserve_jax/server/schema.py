"""Request and response bodies of the API as pydantic models, from which the OpenAPI document is made.

Types of requests are strict (no "5" for 5). Unknown fields are kept in `model_extra`, so that a response can name them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from adaserve_jax.engine.client import MAX_SALT_CHARS, MAX_TAG_CHARS
from adaserve_jax.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES


def _valid_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer or encoder takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "invalid_text", "valid Unicode without half of a surrogate pair at character {at}", {"at": error.start}
        ) from None
    return text


ValidText = Annotated[str, AfterValidator(_valid_unicode)]


def _few_entries(value: object) -> object:
    """Refuse a huge mapping before its entries are validated."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_many", "at most {most} token ids", {"most": MAX_LOGIT_BIASES})
    return value


FIRST_ERROR = Field(fail_fast=True)  # a list of a million wrong items is one error, not a million
Ids = Annotated[list[int], FIRST_ERROR]
Prompt = ValidText | Annotated[list[ValidText], FIRST_ERROR] | Ids | Annotated[list[Ids], FIRST_ERROR]
Biases = Annotated[dict[str, float], BeforeValidator(_few_entries)]
INT32 = 2**31


def unsupported(shown: str, *neutral: Any) -> Any:
    """Return a field of OpenAI's API that is not implemented: only null and the neutral values are accepted."""
    description = f"Not implemented: only {shown} is accepted."
    return Field(None, description=description, json_schema_extra={"enum": [None, *neutral]})


class RequestModel(BaseModel):
    """Base of request bodies and their parts."""

    model_config = ConfigDict(strict=True, extra="allow")


class Body(RequestModel):
    """Base of request bodies."""

    def unknown_fields(self) -> list[str]:
        return sorted(self.model_extra or {})

    def unsupported_field(self) -> str | None:
        """Return the first unimplemented field that asks for something."""
        for name, field in type(self).model_fields.items():
            if not isinstance(field.json_schema_extra, dict) or "enum" not in field.json_schema_extra:
                continue
            value, neutral = getattr(self, name), cast("list[Any]", field.json_schema_extra["enum"])
            if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral):
                return name
        return None


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send the token counts in one last chunk without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the token counts so far in every chunk.")


class JsonSchemaFormat(RequestModel):
    name: str | None = Field(None, description="Accepted and not used.")
    description: str | None = Field(None, description="Accepted and not used.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema that the output fits.")
    strict: bool | None = Field(None, description="Accepted; the output always fits.")


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: no demand; json_object: any JSON object; json_schema: JSON that fits the schema."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema, and only then.")


class GenerationBody(Body):
    """Fields that completions and chat share."""

    model: str | None = Field(None, description="The served model's name; left out: the one that is served.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    temperature: float | None = Field(None, description="0 is greedy; default: the model's, else 1.")
    top_p: float | None = Field(None, description="Nucleus sampling; default: the model's, else 1, off.")
    top_k: int | None = Field(None, description="Sample among the k likeliest; 0 or -1: off; default: the model's.")
    min_p: float | None = Field(
        None, description="Least probability relative to the likeliest token's; default: the model's, else 0, off."
    )
    n: int | None = Field(None, description="Choices per prompt; default 1.")
    seed: int | None = Field(None, description="Same seed, same text; left out: one is drawn.")
    stop: ValidText | list[ValidText] | None = Field(None, description="Texts that end the output; not part of it.")
    stop_token_ids: Ids | None = Field(None, description="Token ids that end the output.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token.")
    stream: bool | None = Field(None, description="Send server-sent events instead of one body.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, description="Accepted and not used.")
    slo_tpot_ms: float | None = Field(None, description="Target: milliseconds per output token after the first.")
    slo_ttft_ms: float | None = Field(None, description="Target: milliseconds to the first token.")
    slo_relative: float | None = Field(
        None,
        description="TPOT target as a multiple of the measured baseline latency (one token, alone, no speculation).",
    )
    slo_class: str | None = Field(None, description="A class of targets from the server's configuration.")
    service_tier: str | None = Field(
        None,
        description="Used as slo_class when that is left out: auto and default, priority (interactive), flex (batch).",
    )
    cache_salt: ValidText | None = Field(
        None, max_length=MAX_SALT_CHARS, description="Cached KV is shared with requests of the same salt only."
    )
    learn: bool | None = Field(None, description="false: drafts learn nothing from this request; default true.")
    draft_tag: ValidText | None = Field(
        None, max_length=MAX_TAG_CHARS, description="The draft to use, one of the model's drafts; default: chosen."
    )
    priority: int | None = Field(None, ge=-INT32, lt=INT32, description="Lower is sooner; default 0.")
    presence_penalty: float | None = Field(
        None, description="Taken from the logits of tokens that the output has, -2 to 2; default 0."
    )
    frequency_penalty: float | None = Field(
        None, description="Taken from the logits of tokens once for each time the output has them, -2 to 2; default 0."
    )
    repetition_penalty: float | None = Field(
        None, description="Divides the logits of tokens that prompt or output have, if positive, else multiplies."
    )
    min_tokens: int | None = Field(None, description="No end-of-text and no stop token before so many; default 0.")
    logit_bias: Biases | None = Field(
        None,
        description="Token ids, as texts, and what is added to their logits, -100 to 100.",
        json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    )
    bad_words: Annotated[list[ValidText], FIRST_ERROR] | None = Field(
        None, description=f"Up to {MAX_BAD_WORDS} texts that the output never spells."
    )
    response_format: ResponseFormat | None = Field(
        None, description="json_object, or json_schema with a schema: the output is JSON that fits."
    )


class CompletionBody(GenerationBody):
    prompt: Prompt = Field(description="One text, several texts, one list of token ids, or several.")
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: int | None = Field(
        None, description="Report log probabilities of the output's tokens and of so many likeliest, 0 to 20."
    )
    best_of: Any = unsupported("1", 1)
    suffix: Any = unsupported("null")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "def add(a, b):", "max_tokens": 32, "slo_tpot_ms": 40}]}
    )


class TextPart(RequestModel):
    type: str = Field(description="Only text.")
    text: ValidText | None = Field(None, description="The text.")


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who speaks; developer is today's name of system."
    )
    content: ValidText | list[TextPart] = Field(description="A text, or parts of type text.")


class ChatBody(GenerationBody):
    messages: list[Message] = Field(
        min_length=1, description="The conversation, put through the model's chat template."
    )
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens; it wins.")
    logprobs: bool | None = Field(None, description="Report log probabilities of the output's tokens.")
    top_logprobs: int | None = Field(None, description="And of so many likeliest, 0 to 20; only with logprobs.")
    tools: Any = unsupported("[]", [])
    tool_choice: Any = unsupported("none and auto", "none", "auto")
    functions: Any = unsupported("[]", [])
    function_call: Any = unsupported("none and auto", "none", "auto")
    modalities: Any = unsupported('["text"]', ["text"])
    audio: Any = unsupported("null")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}], "slo_tpot_ms": 40}]}
    )


class TokenizeBody(Body):
    model: str | None = Field(None, description="As for completions.")
    prompt: ValidText | None = Field(None, description="A text; either this or messages.")
    messages: list[Message] | None = Field(None, description="A conversation, put through the chat template.")
    return_token_strs: bool | None = Field(None, description="Tell what each token spells.")


class DetokenizeBody(Body):
    model: str | None = Field(None, description="As for completions.")
    tokens: Ids = Field(description="Token ids.")


FinishedBy = Literal["stop", "length"]
"""Finish reasons of OpenAI's API."""


class ResponseModel(BaseModel):
    """Base of response bodies and their parts."""


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Prompt tokens whose KV was there already.")


class Usage(ResponseModel):
    prompt_tokens: int = Field(description="Tokens of the prompts.")
    completion_tokens: int = Field(description="Tokens of all choices.")
    total_tokens: int = Field(description="Their sum.")
    prompt_tokens_details: PromptTokensDetails = Field(description="What of the prompts was there already.")


class SpeculativeMetrics(ResponseModel):
    verify_steps: int = Field(description="Verifications by the target.")
    accepted_tokens: int = Field(description="Draft tokens that the target accepted, bonus tokens not counted.")
    mean_accepted: float = Field(description="Accepted tokens per verification.")


class SloMetrics(ResponseModel):
    tpot_target_ms: float | None = Field(description="Target in force, after class, baseline and the server's limits.")
    ttft_target_ms: float | None = Field(description="Target in force, after class and the server's limits.")
    tpot_ms: float | None = Field(description="Measured (last token - first token) / (tokens - 1).")
    met: bool | None = Field(description="All targets were met; null: the request carried none.")
    feasible: bool | None = Field(
        description="False: a target was below what one request alone would get, so that it was served best-effort."
    )


class ResponseMetrics(ResponseModel):
    time_to_first_token_ms: float | None = Field(description="From arrival to the first token.")
    queue_time_ms: float | None = Field(description="From arrival until first scheduled.")
    tokens_per_second: float | None = Field(description="Output tokens / (last token - arrival).")
    speculative: SpeculativeMetrics = Field(description="What speculation brought.")
    slo: SloMetrics = Field(description="The targets, and whether they were met.")


class CompletionLogprobs(ResponseModel):
    """One entry per output token in each list."""

    tokens: list[str] = Field(description="Its text, or bytes:\\x.. where its bytes are no whole characters.")
    token_logprobs: list[float] = Field(description="Natural logarithm of its probability by the model's own logits.")
    top_logprobs: list[dict[str, float]] | None = Field(description="The likeliest and itself; null: none were asked.")
    text_offset: list[int] = Field(description="Characters of the output before it.")


class CompletionChoice(ResponseModel):
    index: int = Field(description="Prompt index times n plus the choice's.")
    text: str = Field(description="The output, or in a stream the next piece of it.")
    logprobs: CompletionLogprobs | None = Field(default=None, description="Where they were asked for.")
    finish_reason: FinishedBy | None = Field(
        description="stop: an end of the text; length: max_tokens; null in a stream until the last piece."
    )


class Completion(ResponseModel):
    id: str = Field(description="A fresh name of this answer.")
    object: Literal["text_completion"] = Field(default="text_completion", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[CompletionChoice] = Field(
        description="One for each prompt and each of n; in a stream those that go on."
    )
    usage: Usage | None = Field(
        default=None, description="Counts of tokens; in a stream where stream_options ask for them."
    )
    metrics: ResponseMetrics | None = Field(
        None, description="What the request got; in a stream with the last event only."
    )


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = Field(default="assistant", description="Always assistant.")
    content: str = Field(description="The output.")
    refusal: None = Field(default=None, description="Always null.")


class TopLogprob(ResponseModel):
    token: str = Field(description="Its text, or \\x.. where its bytes are no whole characters.")
    logprob: float = Field(description="Natural logarithm of its probability by the model's own logits.")
    bytes: list[int] | None = Field(
        description="Its UTF-8 bytes, which may be part of a character; null: a special token."
    )


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens in its place.")


class ChatLogprobs(ResponseModel):
    content: list[ChatLogprob] = Field(description="One for each output token.")
    refusal: None = Field(default=None, description="Always null.")


class ChatChoice(ResponseModel):
    index: int = Field(description="From 0, one for each of n.")
    message: AssistantMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(default=None, description="Where they were asked for.")
    finish_reason: FinishedBy = Field(description="stop: an end of the text; length: max_tokens.")


class ChatCompletion(ResponseModel):
    id: str = Field(description="A fresh name of this answer.")
    object: Literal["chat.completion"] = Field(default="chat.completion", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChoice] = Field(description="One for each of n.")
    usage: Usage = Field(description="Counts of tokens.")
    metrics: ResponseMetrics = Field(description="What the request got.")


class Delta(ResponseModel):
    role: Literal["assistant"] | None = Field(default=None, description="In the first piece of a choice.")
    content: str | None = Field(default=None, description="The next piece of the output.")

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(ResponseModel):
    index: int = Field(description="From 0, one for each of n.")
    delta: Delta = Field(description="What is new.")
    logprobs: ChatLogprobs | None = Field(
        default=None, description="Of the tokens that are new, where they were asked for."
    )
    finish_reason: FinishedBy | None = Field(description="With the last piece of a choice; null before.")


class ChatChunk(ResponseModel):
    id: str = Field(description="A fresh name of this answer, the same in all its events.")
    object: Literal["chat.completion.chunk"] = Field(default="chat.completion.chunk", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChunkChoice] = Field(description="Those that go on; empty in the event that has the counts only.")
    usage: Usage | None = Field(default=None, description="Counts of tokens, where stream_options ask for them.")
    metrics: ResponseMetrics | None = Field(default=None, description="What the request got, with the last event only.")


class ErrorDetail(ResponseModel):
    message: str = Field(description="What was expected, what came, and what to do.")
    type: str = Field(description="OpenAI's kind of error: one for each status.")
    param: str | None = Field(description="The field at fault, where it is one.")
    code: str = Field(description="A stable short name; docs/http.md has the list.")


class ErrorBody(ResponseModel):
    error: ErrorDetail = Field(description="What went wrong.")


class SloTargets(ResponseModel):
    tpot_ms: float | None = Field(description="Target, milliseconds per output token; null: none.")
    ttft_ms: float | None = Field(description="Target, milliseconds to the first token; null: none.")


class ModelCard(ResponseModel):
    id: str = Field(description="The name that model may be.")
    object: Literal["model"] = Field(default="model", description="What this is.")
    created: int = Field(description="Unix time of the server's start, seconds.")
    owned_by: Literal["adaserve"] = Field(default="adaserve", description="Always adaserve.")
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    draft: str | None = Field(description="The draft model; null: no speculation.")
    drafts: list[str] = Field(description="What draft_tag may be.")
    baseline_ms: float = Field(description="Measured milliseconds of one token, alone, without speculation.")
    slo_classes: dict[str, SloTargets] = Field(description="What slo_class may be, and the targets that it stands for.")


class ModelList(ResponseModel):
    object: Literal["list"] = Field(default="list", description="What this is.")
    data: list[ModelCard] = Field(description="One model.")


class Health(ResponseModel):
    status: Literal["starting", "ok", "stalled", "restarting", "draining", "dead"] = Field(
        description="What the server does."
    )
    detail: str = Field(description="The same in words; of an engine that ended, why.")


class Version(ResponseModel):
    version: str = Field(description="Of this package.")
    engine: dict[str, Any] | None = Field(description="Device, jax version, policy, models; null until ready.")


class Tokens(ResponseModel):
    tokens: list[int] = Field(description="Token ids.")
    count: int = Field(description="How many.")
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    token_strs: list[str] | None = Field(default=None, description="What each token spells, where that was asked for.")


class Text(ResponseModel):
    prompt: str = Field(description="What the token ids spell.")
