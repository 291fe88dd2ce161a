"""The response bodies of the API, as pydantic models: they write the responses and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

FinishedBy = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens whose KV was there already.")


class Usage(BaseModel):
    prompt_tokens: int = Field(description="Tokens of the prompts.")
    completion_tokens: int = Field(description="Tokens of all choices.")
    total_tokens: int = Field(description="Their sum.")
    prompt_tokens_details: PromptTokensDetails = Field(description="What of the prompts was there already.")


class SpeculativeMetrics(BaseModel):
    verify_steps: int = Field(description="Verifications by the target.")
    accepted_tokens: int = Field(description="Draft tokens that the target accepted, bonus tokens not counted.")
    mean_accepted: float = Field(description="Accepted tokens per verification.")


class SloMetrics(BaseModel):
    tpot_target_ms: float | None = Field(description="Target in force, after class, baseline and the server's limits.")
    ttft_target_ms: float | None = Field(description="Target in force, after class and the server's limits.")
    tpot_ms: float | None = Field(description="Measured (last token - first token) / (tokens - 1).")
    met: bool | None = Field(description="All targets were met; null: the request carried none.")
    feasible: bool | None = Field(
        description="False: a target was below what one request alone would get, so that it was served best-effort."
    )


class ResponseMetrics(BaseModel):
    time_to_first_token_ms: float | None = Field(description="From arrival to the first token.")
    queue_time_ms: float | None = Field(description="From arrival until first scheduled.")
    tokens_per_second: float | None = Field(description="Output tokens / (last token - arrival).")
    speculative: SpeculativeMetrics = Field(description="What speculation brought.")
    slo: SloMetrics = Field(description="The targets, and whether they were met.")


class CompletionLogprobs(BaseModel):
    """One entry per output token in each list."""

    tokens: list[str] = Field(description="Its text, or bytes:\\x.. where its bytes are no whole characters.")
    token_logprobs: list[float] = Field(description="Natural logarithm of its probability by the model's own logits.")
    top_logprobs: list[dict[str, float]] | None = Field(description="The likeliest and itself; null: none were asked.")
    text_offset: list[int] = Field(description="Characters of the output before it.")


class CompletionChoice(BaseModel):
    index: int = Field(description="Prompt index times n plus the choice's.")
    text: str = Field(description="The output, or in a stream the next piece of it.")
    logprobs: CompletionLogprobs | None = Field(default=None, description="Where they were asked for.")
    finish_reason: FinishedBy | None = Field(
        description="stop: an end of the text; length: max_tokens; null in a stream until the last piece."
    )


class Completion(BaseModel):
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


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = Field(default="assistant", description="Always assistant.")
    content: str = Field(description="The output.")
    refusal: None = Field(default=None, description="Always null.")


class TopLogprob(BaseModel):
    token: str = Field(description="Its text, or \\x.. where its bytes are no whole characters.")
    logprob: float = Field(description="Natural logarithm of its probability by the model's own logits.")
    bytes: list[int] | None = Field(
        description="Its UTF-8 bytes, which may be part of a character; null: a special token."
    )


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens in its place.")


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob] = Field(description="One for each output token.")
    refusal: None = Field(default=None, description="Always null.")


class ChatChoice(BaseModel):
    index: int = Field(description="From 0, one for each of n.")
    message: AssistantMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(default=None, description="Where they were asked for.")
    finish_reason: FinishedBy = Field(description="stop: an end of the text; length: max_tokens.")


class ChatCompletion(BaseModel):
    id: str = Field(description="A fresh name of this answer.")
    object: Literal["chat.completion"] = Field(default="chat.completion", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChoice] = Field(description="One for each of n.")
    usage: Usage = Field(description="Counts of tokens.")
    metrics: ResponseMetrics = Field(description="What the request got.")


class Delta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, description="In the first piece of a choice.")
    content: str | None = Field(default=None, description="The next piece of the output.")

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    index: int = Field(description="From 0, one for each of n.")
    delta: Delta = Field(description="What is new.")
    logprobs: ChatLogprobs | None = Field(
        default=None, description="Of the tokens that are new, where they were asked for."
    )
    finish_reason: FinishedBy | None = Field(description="With the last piece of a choice; null before.")


class ChatChunk(BaseModel):
    id: str = Field(description="A fresh name of this answer, the same in all its events.")
    object: Literal["chat.completion.chunk"] = Field(default="chat.completion.chunk", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChunkChoice] = Field(description="Those that go on; empty in the event that has the counts only.")
    usage: Usage | None = Field(default=None, description="Counts of tokens, where stream_options ask for them.")
    metrics: ResponseMetrics | None = Field(default=None, description="What the request got, with the last event only.")


class ErrorDetail(BaseModel):
    message: str = Field(description="What was expected, what came, and what to do.")
    type: str = Field(description="OpenAI's kind of error: one for each status.")
    param: str | None = Field(description="The field at fault, where it is one.")
    code: str = Field(description="A stable short name; docs/http.md has the list.")


class ErrorBody(BaseModel):
    error: ErrorDetail = Field(description="What went wrong.")


class SloTargets(BaseModel):
    tpot_ms: float | None = Field(description="Target, milliseconds per output token; null: none.")
    ttft_ms: float | None = Field(description="Target, milliseconds to the first token; null: none.")


class ModelCard(BaseModel):
    id: str = Field(description="The name that model may be.")
    object: Literal["model"] = Field(default="model", description="What this is.")
    created: int = Field(description="Unix time of the server's start, seconds.")
    owned_by: Literal["adaserve"] = Field(default="adaserve", description="Always adaserve.")
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    draft: str | None = Field(description="The draft model; null: no speculation.")
    drafts: list[str] = Field(description="What draft_tag may be.")
    baseline_ms: float = Field(description="Measured milliseconds of one token, alone, without speculation.")
    slo_classes: dict[str, SloTargets] = Field(description="What slo_class may be, and the targets that it stands for.")


class ModelList(BaseModel):
    object: Literal["list"] = Field(default="list", description="What this is.")
    data: list[ModelCard] = Field(description="One model.")


class Health(BaseModel):
    status: Literal["starting", "ok", "stalled", "restarting", "draining", "dead"] = Field(
        description="What the server does."
    )
    detail: str = Field(description="The same in words; of an engine that ended, why.")


class Version(BaseModel):
    version: str = Field(description="Of this package.")
    engine: dict[str, Any] | None = Field(description="Device, jax version, policy, models; null until ready.")


class Tokens(BaseModel):
    tokens: list[int] = Field(description="Token ids.")
    count: int = Field(description="How many.")
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    token_strs: list[str] | None = Field(default=None, description="What each token spells, where that was asked for.")


class Text(BaseModel):
    prompt: str = Field(description="What the token ids spell.")
