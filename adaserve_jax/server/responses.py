"""The response bodies of the API, as pydantic models: they write the responses and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

FinishedBy = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens whose KV was there already.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    time_to_first_token_ms: float | None
    queue_time_ms: float | None = Field(description="From arrival until first scheduled.")
    tokens_per_second: float | None = Field(description="Output tokens / (last token - arrival).")
    speculative: SpeculativeMetrics
    slo: SloMetrics


class CompletionLogprobs(BaseModel):
    """One entry per output token in each list."""

    tokens: list[str] = Field(description="Its text, or bytes:\\x.. where its bytes are no whole characters.")
    token_logprobs: list[float] = Field(description="Natural logarithm of its probability by the model's own logits.")
    top_logprobs: list[dict[str, float]] | None = Field(description="The likeliest and itself; null: none were asked.")
    text_offset: list[int] = Field(description="Characters of the output before it.")


class CompletionChoice(BaseModel):
    index: int = Field(description="Prompt index times n plus the choice's.")
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishedBy | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TopLogprob(BaseModel):
    token: str = Field(description="Its text, or \\x.. where its bytes are no whole characters.")
    logprob: float = Field(description="Natural logarithm of its probability by the model's own logits.")
    bytes: list[int] | None = Field(
        description="Its UTF-8 bytes, which may be part of a character; null: a special token."
    )


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens in its place.")


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    error: ErrorDetail


class SloTargets(BaseModel):
    tpot_ms: float | None = Field(description="Target, milliseconds per output token; null: none.")
    ttft_ms: float | None = Field(description="Target, milliseconds to the first token; null: none.")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["adaserve"] = "adaserve"
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    draft: str | None = Field(description="The draft model; null: no speculation.")
    drafts: list[str] = Field(description="What draft_tag may be.")
    baseline_ms: float = Field(description="Measured milliseconds of one token, alone, without speculation.")
    slo_classes: dict[str, SloTargets] = Field(description="What slo_class may be, and the targets that it stands for.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["starting", "ok", "stalled", "restarting", "draining", "dead"]
    detail: str


class Version(BaseModel):
    version: str
    engine: dict[str, Any] | None = Field(description="Device, jax version, policy, models; null until ready.")


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = Field(None, description="What each token spells, where that was asked for.")


class Text(BaseModel):
    prompt: str
