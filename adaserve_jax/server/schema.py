"""Request and response bodies of the API as pydantic models, from which the OpenAPI document is made.

Types of requests are strict (no "5" for 5). Unknown fields are kept in `model_extra`, so that a response can name them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from adaserve_jax.engine.client import MAX_SALT_CHARS, MAX_TAG_CHARS
from adaserve_jax.sampling import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
)
from adaserve_jax.server.constraint_fields import ConstraintFields
from adaserve_jax.server.request_model import (
    FIRST_ERROR,
    Ids,
    RequestModel,
    Texts,
    ValidText,
    at_most,
    ignored,
    unsupported,
)


def documented(**bounds: float) -> Any:
    """Return bounds for /openapi.json only: `SamplingParams`, `SLO` and server/parse.py judge requests by them, with
    errors that name the field and what is expected."""
    return Field(json_schema_extra=dict(bounds))


NonEmptyText = Annotated[ValidText, documented(minLength=1)]
NonEmptyIds = Annotated[Ids, documented(minItems=1)]
Prompt = (
    NonEmptyText
    | Annotated[list[NonEmptyText], FIRST_ERROR, documented(minItems=1)]
    | NonEmptyIds
    | Annotated[list[NonEmptyIds], FIRST_ERROR, documented(minItems=1)]
)
Biases = Annotated[dict[str, float], at_most(MAX_LOGIT_BIASES, "token ids")]
INT32 = 2**31
MIN_SEED = -(2**63)
"""Least seed that is taken, as 64-bit integers of other servers' clients go."""
TokenLimit = Annotated[int, documented(minimum=1, maximum=INT32 - 1)]
Temperature = Annotated[float, documented(minimum=0, maximum=100)]
TopK = Annotated[int, documented(minimum=-1, maximum=INT32 - 1)]
ChoiceCount = Annotated[int, documented(minimum=1, maximum=MAX_CHOICES)]
Seed = Annotated[int, documented(minimum=MIN_SEED, maximum=MAX_SEED)]
RepetitionPenalty = Annotated[float, documented(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY)]
ThinkingLimit = Annotated[int, documented(minimum=-1)]
TokenMinimum = Annotated[int, documented(minimum=0)]
Penalty = Annotated[float, documented(minimum=-2, maximum=2)]
Share = Annotated[float, documented(minimum=0, maximum=1)]
LogprobCount = Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)]
Target = Annotated[float, documented(exclusiveMinimum=0)]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(
        default=None, description="Send the token counts in one last chunk without choices."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Send the token counts so far in every chunk."
    )


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
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With type json_object: JSON Schema that the object fits, as in llama.cpp."
    )


class GenerationBody(ConstraintFields):
    """Fields that completions and chat share."""

    model: str | None = Field(None, description="The served model's name, or an adapter's; left out: the served model.")
    max_tokens: TokenLimit | None = Field(None, description="Most tokens to generate.")
    max_completion_tokens: TokenLimit | None = Field(None, description="The newer name of max_tokens; it wins.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep so many tokens of each prompt; -1: as many as leave room for max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; default left, which keeps the end."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put special tokens around the prompt's text; default: true for completions, false for chat."
    )
    temperature: Temperature | None = Field(None, description="0 is greedy; default: the model's, else 1.")
    top_p: Share | None = Field(
        None, description="Nucleus sampling; 0: the likeliest token only; default: the model's, else 1, off."
    )
    top_k: TopK | None = Field(None, description="Sample among the k likeliest; 0 or -1: off; default: the model's.")
    min_p: Share | None = Field(
        None, description="Least probability relative to the likeliest token's; default: the model's, else 0, off."
    )
    n: ChoiceCount | None = Field(None, description="Choices per prompt; default 1.")
    seed: Seed | None = Field(None, description="Same seed, same text; -1 or left out: one is drawn.")
    stop: ValidText | Texts | None = Field(None, description="Texts that end the output; not part of it.")
    stop_token_ids: Ids | None = Field(None, description="Token ids that end the output.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token.")
    stream: bool | None = Field(None, description="Send server-sent events instead of one body.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, description="Accepted and not used.")
    slo_tpot_ms: Target | None = Field(None, description="Target: milliseconds per output token after the first.")
    slo_ttft_ms: Target | None = Field(None, description="Target: milliseconds to the first token.")
    slo_e2e_ms: Target | None = Field(
        None, description="Target: milliseconds from arrival to the last token, a deadline."
    )
    max_queue_ms: Target | None = Field(
        None,
        description="Longest wait to begin, milliseconds; a request that has not begun by then is answered with 504.",
    )
    slo_relative: Target | None = Field(
        None,
        description="TPOT target as a multiple of the measured baseline latency (one token, alone, no speculation).",
    )
    slo_class: str | None = Field(None, description="A class of targets from the server's configuration.")
    service_tier: ValidText | None = Field(
        None,
        description="Used as slo_class when that is left out: auto and default, priority (interactive), flex (batch).",
    )
    cache_salt: ValidText | None = Field(
        None, max_length=MAX_SALT_CHARS, description="Cached KV is shared with requests of the same salt only."
    )
    learn: bool | None = Field(
        None,
        description="false: drafts learn nothing from this request, and its text is not kept to draft from; default: "
        "true.",
    )
    draft_tag: ValidText | None = Field(
        None, max_length=MAX_TAG_CHARS, description="The draft to use, one of the model's drafts; default: chosen."
    )
    priority: int | None = Field(
        None, ge=-INT32, lt=INT32, description="Lower is sooner; default: the class's, else 0."
    )
    presence_penalty: Penalty | None = Field(
        None, description="Taken from the logits of tokens that the output has, -2 to 2; default 0."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Taken from the logits of tokens once for each time the output has them, -2 to 2; default 0."
    )
    repetition_penalty: RepetitionPenalty | None = Field(
        None, description="Divides the logits of tokens that prompt or output have, if positive, else multiplies."
    )
    min_tokens: TokenMinimum | None = Field(
        None, description="No end-of-text and no stop token before so many; default 0."
    )
    logit_bias: Biases | None = Field(
        None,
        description="Token ids, as texts, and what is added to their logits, -100 to 100.",
        json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    )
    bad_words: Texts | None = Field(None, description=f"Up to {MAX_BAD_WORDS} texts that the output never spells.")
    prompt_logprobs: LogprobCount | None = Field(
        None, description="Report log probabilities of the prompt's tokens and of so many likeliest; not in a stream."
    )
    response_format: ResponseFormat | None = Field(
        None, description="json_object, or json_schema with a schema: the output is JSON that fits."
    )


_NO_BEAMS = "without beam search it changes nothing"
_NO_MEDIA = "messages hold text only"
_NOT_SENT = "the answer does not hold it"
_ONE_MACHINE = "prompts are not computed elsewhere"


class OtherFields(RequestModel):
    """Fields of vLLM, SGLang and OpenAI that no request is served by: refused where they would change the text, else
    ignored."""

    use_beam_search: Any = unsupported("false", False, why="tokens are sampled")
    length_penalty: Any = ignored(_NO_BEAMS, 1)
    early_stopping: Any = ignored(_NO_BEAMS, False)
    include_stop_str_in_output: Any = unsupported("false", False, why="a stop text is never part of the output")
    no_stop_trim: Any = unsupported("false", False, why="a stop text is never part of the output")
    stop_regex: Any = unsupported("null", [], why="use stop with texts")
    skip_special_tokens: Any = unsupported("true", True, why="special tokens have no text")
    spaces_between_special_tokens: Any = ignored("special tokens have no text", True)
    logits_processors: Any = unsupported("[]", [], why="clients bring no code")
    custom_logit_processor: Any = unsupported("null", why="clients bring no code")
    custom_params: Any = ignored("they are for a custom_logit_processor")
    watermarking: Any = unsupported("false", False, why="texts carry no watermark")
    repetition_detection: Any = unsupported("null", why="use the penalties")
    prompt_embeds: Any = unsupported("null", why="a prompt is text or tokens")
    vllm_xargs: Any = unsupported("{}", {}, why="there are no extensions")
    lora_path: Any = unsupported("null", "", why="model names an adapter")
    session_params: Any = unsupported("null", why="every request stands alone")
    guided_whitespace_pattern: Any = unsupported("null", why="JSON has at most one space after a comma or colon")
    guided_decoding_backend: Any = ignored("there is one")
    logprob_token_ids: Any = unsupported("null", why="log probabilities are those of the likeliest tokens")
    thinking_token_budget: Any = unsupported("-1", -1, why="only chats have thinking")
    max_thinking_tokens: Any = unsupported("-1", -1, why="only chats have thinking")
    slo_thinking_tpot_ms: Any = unsupported("null", why="only chats have thinking")
    request_id: Any = ignored("send the header x-request-id")
    rid: Any = ignored("send the header x-request-id")
    session_id: Any = ignored("every request stands alone")
    return_token_ids: Any = ignored(_NOT_SENT, False)
    return_tokens_as_token_ids: Any = ignored("tokens are sent as texts", False)
    return_token_offsets: Any = ignored(_NOT_SENT, False)
    return_hidden_states: Any = ignored(_NOT_SENT, False)
    return_mm_kwargs: Any = ignored(_NO_MEDIA, True)
    routed_experts_prompt_start: Any = ignored(_NOT_SENT, 0)
    kv_transfer_params: Any = ignored(_ONE_MACHINE)
    ec_transfer_params: Any = ignored(_ONE_MACHINE)
    bootstrap_host: Any = ignored(_ONE_MACHINE)
    bootstrap_port: Any = ignored(_ONE_MACHINE)
    bootstrap_room: Any = ignored(_ONE_MACHINE)
    stream_interval: Any = ignored("events are sent as tokens come", 1)


class OtherChatFields(OtherFields):
    """Accept other servers' fields of chats."""

    best_of: Any = unsupported("1", 1)
    echo: Any = unsupported("false", False, why="use continue_final_message")
    separate_reasoning: Any = unsupported("true", True, why="--reasoning-parser none leaves thinking in the text")
    stream_reasoning: Any = ignored("thinking is streamed as it comes", True)
    mm_processor_kwargs: Any = ignored(_NO_MEDIA, {})
    media_io_kwargs: Any = ignored(_NO_MEDIA, {})
    return_prompt_text: Any = ignored(_NOT_SENT, False)
    verbosity: Any = unsupported("medium", "medium", why="say it in a message")
    web_search_options: Any = unsupported("null", why="nothing is searched")
    prediction: Any = ignored("it only makes an answer sooner")
    metadata: Any = ignored("nothing is stored")
    store: Any = ignored("nothing is stored", False)
    safety_identifier: Any = ignored("like user", "")
    prompt_cache_key: Any = ignored("equal beginnings share their KV by themselves; see cache_salt")
    prompt_cache_retention: Any = ignored("KV is kept while there is room")


class CompletionBody(OtherFields, GenerationBody):
    prompt: Prompt = Field(description="One text, several texts, one list of token ids, or several.")
    max_tokens: Annotated[int, documented(minimum=0, maximum=INT32 - 1)] | None = Field(
        None, description="Most tokens to generate; 0 with echo: the prompt alone."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: LogprobCount | None = Field(
        None,
        description="Report log probabilities of the output's tokens, with echo also of the prompt's, and of so many "
        "likeliest, 0 to 20.",
    )
    best_of: Any = unsupported("1", 1)
    suffix: Any = unsupported('null and ""', "")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "def add(a, b):", "max_tokens": 32, "slo_tpot_ms": 40}]}
    )


class TextPart(RequestModel):
    type: str = Field(description="Only text.")
    text: ValidText | None = Field(None, description="The text.")


class CalledFunction(RequestModel):
    name: ValidText = Field(description="The function's name.")
    arguments: ValidText = Field(description="JSON of an object, as text.")


class MessageToolCall(RequestModel):
    id: str | None = Field(None, description="What the message with its result names as tool_call_id.")
    type: Literal["function"] = Field("function", description="Only function.")
    function: CalledFunction = Field(description="What was called.")


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; developer is today's name of system, tool gives the result of a call."
    )
    content: ValidText | Annotated[list[TextPart], FIRST_ERROR] | None = Field(
        None, description="A text, or parts of type text; only an assistant may leave it out."
    )
    name: ValidText | None = Field(None, description="The speaker's or the tool's name, for templates that show it.")
    reasoning_content: ValidText | None = Field(
        None, description="What the assistant thought, as an earlier answer had it; templates may leave it out."
    )
    reasoning: ValidText | None = Field(None, description="The same, by its newer name.")
    tool_calls: Annotated[list[MessageToolCall], FIRST_ERROR] | None = Field(
        None, description="The assistant's calls, as an earlier answer had them."
    )
    tool_call_id: ValidText | None = Field(None, description="Which call a message of role tool answers.")


class FunctionDefinition(RequestModel):
    name: ValidText = Field(description="1 to 64 of A-Za-z0-9_.-; different for each function.")
    description: ValidText | None = Field(None, description="Shown to the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of an object, which the arguments fit (see strict); left out: no arguments."
    )
    strict: bool | None = Field(
        None, description="true: refuse parameters that cannot be enforced whole; else what cannot is left out."
    )


class Tool(RequestModel):
    type: Literal["function"] = Field(description="Only function.")
    function: FunctionDefinition = Field(description="A function that the model may call.")


class ChosenFunction(RequestModel):
    name: ValidText = Field(description="One of the tools' functions.")


class ToolChoice(RequestModel):
    type: Literal["function"] = Field(description="Only function.")
    function: ChosenFunction = Field(description="The function to call.")


class ChatTemplateFields(RequestModel):
    """Fields that say how messages become a prompt: the template, its variables, and how the prompt ends."""

    chat_template: ValidText | None = Field(
        None, description="A Jinja template instead of the model's; only with the server's trust_request_chat_template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with what begins an answer; default: true, unless continue_final_message."
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open: the output goes on with it; default false."
    )
    documents: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = Field(
        None, description="Documents for templates that know them, each with title and text."
    )
    reasoning_effort: ValidText | None = Field(
        None, description="A variable of the template: minimal, low, medium, high, or what the model knows."
    )


class ThinkingFields(RequestModel):
    """Fields of models that think before they answer."""

    max_thinking_tokens: ThinkingLimit | None = Field(
        None, description="Tokens after which the model must answer, where it thinks; -1: no limit, the default."
    )
    thinking_token_budget: ThinkingLimit | None = Field(None, description="Another name of max_thinking_tokens.")
    slo_thinking_tpot_ms: Target | None = Field(
        None, description="Target: milliseconds per token of the thinking; slo_tpot_ms is then that of the answer."
    )
    include_reasoning: bool | None = Field(
        None, description="false: leave what the model thinks out of the answer; its tokens count; default true."
    )


class ChatBody(ThinkingFields, OtherChatFields, ChatTemplateFields, GenerationBody):
    messages: Annotated[list[Message], FIRST_ERROR] = Field(
        min_length=1, description="The conversation, put through the model's chat template."
    )
    logprobs: bool | None = Field(None, description="Report log probabilities of the output's tokens.")
    top_logprobs: LogprobCount | None = Field(
        None, description="And of so many likeliest, 0 to 20; only with logprobs."
    )
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="none: no call; auto, the default: the model decides; required, or a function: at least one."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default true.")
    functions: Any = unsupported("[]", [])
    function_call: Any = unsupported("none and auto", "none", "auto")
    modalities: Any = unsupported('["text"]', ["text"])
    audio: Any = unsupported("null")

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}], "slo_tpot_ms": 40}]}
    )


class TokenizeBody(ChatTemplateFields):
    model: str | None = Field(None, description="As for completions.")
    prompt: ValidText | None = Field(None, description="A text; either this or messages.")
    messages: Annotated[list[Message], FIRST_ERROR] | None = Field(
        None, description="A conversation, put through the chat template."
    )
    tools: Annotated[list[Tool], FIRST_ERROR] | None = Field(None, description="With messages, as for chat.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer's special tokens around it; default: true for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="Tell what each token spells.")


class LoadAdapterBody(RequestModel):
    lora_name: ValidText = Field(description="The name that model may then be.")
    lora_path: ValidText = Field(
        description="Folder of the adapter in PEFT's format: a path in the server's lora_folder, or relative to it."
    )
    load_inplace: bool | None = Field(None, description="Take the place of an adapter that has the name.")


class UnloadAdapterBody(RequestModel):
    lora_name: ValidText = Field(description="Name of a loaded adapter.")


class DetokenizeBody(RequestModel):
    model: str | None = Field(None, description="As for completions.")
    tokens: Ids = Field(description="Token ids.")


FinishedBy = Literal["stop", "length"]
ChatFinishedBy = Literal["stop", "length", "tool_calls"]
"""Finish reasons of OpenAI's API."""


class ResponseModel(BaseModel):
    """Base of response bodies and their parts."""


def _none(value: object) -> bool:
    return value is None


class PromptTokensDetails(ResponseModel):
    cached_tokens: int = Field(description="Prompt tokens whose KV was there already.")


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int = Field(description="Tokens that were thought, without the marks around them.")


class Usage(ResponseModel):
    prompt_tokens: int = Field(description="Tokens of the prompts.")
    completion_tokens: int = Field(description="Tokens of all choices.")
    total_tokens: int = Field(description="Their sum.")
    prompt_tokens_details: PromptTokensDetails = Field(description="What of the prompts was there already.")
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="What of the output was thought; of chats with a model that thinks.", exclude_if=_none
    )


class SpeculativeMetrics(ResponseModel):
    verify_steps: int = Field(description="Verifications by the target.")
    accepted_tokens: int = Field(description="Draft tokens that the target accepted, bonus tokens not counted.")
    mean_accepted: float = Field(description="Accepted tokens per verification.")


class SpeculativeDecodingMetrics(ResponseModel):
    """vLLM's acceptance metrics of one request, which AIPerf reads, under vLLM's names (its PR 48915)."""

    mean_acceptance_length: float = Field(description="Tokens per such step, the target's own counted.")
    draft_acceptance_rate: float = Field(description="Accepted tokens over verified ones.")
    acceptance_histogram: list[int] = Field(description="Steps by how many draft tokens were accepted, from none.")
    num_spec_steps: int = Field(description="Steps that verified draft tokens.")
    num_accepted_draft_tokens: int = Field(description="Draft tokens that were accepted.")
    num_draft_tokens: int = Field(description="Draft tokens that were verified, all branches of trees counted.")
    num_spec_tokens: int = Field(description="Depth of the deepest tree that the engine can verify.")


class SloMetrics(ResponseModel):
    tpot_target_ms: float | None = Field(description="Target in force, after class, baseline and the server's limits.")
    ttft_target_ms: float | None = Field(description="Target in force, after class and the server's limits.")
    tpot_ms: float | None = Field(description="Measured (last token - first token) / (tokens - 1).")
    thinking_tpot_target_ms: float | None = Field(
        default=None, description="Target in force while the model thinks; tpot_target_ms is that of the answer.",
        exclude_if=_none,
    )  # fmt: skip
    thinking_tpot_ms: float | None = Field(
        default=None, description="Measured from the first token to the closing mark, where there is such a target.",
        exclude_if=_none,
    )  # fmt: skip
    answer_tpot_ms: float | None = Field(
        default=None, description="Measured from the closing mark on, where the thinking has a target of its own.",
        exclude_if=_none,
    )  # fmt: skip
    e2e_target_ms: float | None = Field(
        default=None, description="Deadline in force; only if there is one.", exclude_if=_none
    )
    e2e_ms: float | None = Field(
        default=None,
        description="Measured from arrival to the last token, where there is a deadline.",
        exclude_if=_none,
    )
    met: bool | None = Field(description="All targets were met; null: the request carried none.")
    feasible: bool | None = Field(
        description="False: a target was below what one request alone would get, so that it was served best-effort."
    )


class ResponseMetrics(ResponseModel):
    time_to_first_token_ms: float | None = Field(description="From arrival to the first token.")
    queue_time_ms: float | None = Field(description="From arrival until first scheduled.")
    tokens_per_second: float | None = Field(description="Output tokens / (last token - arrival).")
    speculative: SpeculativeMetrics = Field(description="What speculation brought.")
    speculative_decoding: SpeculativeDecodingMetrics | None = Field(
        default=None, description="The same as vLLM says it; absent without speculation, and of several choices.",
        exclude_if=_none,
    )  # fmt: skip
    slo: SloMetrics = Field(description="The targets, and whether they were met.")


LEAST_LOGPROB = -9999.0
"""Value written for minus infinity, which JSON cannot express; OpenAI uses the same."""


class CompletionLogprobs(ResponseModel):
    """One entry per output token in each list; with echo, those of the prompt's tokens come before them."""

    tokens: list[str] = Field(description="Its text, or bytes:\\x.. where its bytes are no whole characters.")
    token_logprobs: list[float | None] = Field(
        description="Natural logarithm of its probability by the model's own logits; null: the first of a prompt."
    )
    top_logprobs: list[dict[str, float] | None] | None = Field(
        description="The likeliest and itself; null: none were asked."
    )
    text_offset: list[int] = Field(description="Characters of the text before it.")


class PromptLogprob(ResponseModel):
    logprob: float = Field(description="Natural logarithm of its probability by the model's own logits.")
    rank: int = Field(description="Its place among all tokens; 1: the likeliest.")
    decoded_token: str = Field(description="Its text, or bytes:\\x.. where its bytes are no whole characters.")


PromptLogprobs = list[dict[str, PromptLogprob] | None]
StopReason = Annotated[
    int | str | None,
    Field(
        description="The string of stop, or the id of stop_token_ids, that ended the text, as vLLM reports it. Absent "
        "where none did.",
        exclude_if=_none,
    ),
]


class CompletionChoice(ResponseModel):
    index: int = Field(description="Prompt index times n plus the choice's.")
    text: str = Field(description="The output, or in a stream the next piece of it.")
    logprobs: CompletionLogprobs | None = Field(default=None, description="Where they were asked for.")
    finish_reason: FinishedBy | None = Field(
        description="stop: an end of the text; length: max_tokens; null in a stream until the last piece."
    )
    stop_reason: StopReason = None
    prompt_logprobs: PromptLogprobs | None = Field(
        default=None,
        description="By token id, of each token of the prompt and the likeliest in its place; null for the first one. "
        "Only where they were asked for.",
        exclude_if=_none,
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


class FunctionCall(ResponseModel):
    name: str | None = Field(
        default=None, description="The function's name; in a stream in the first piece.", exclude_if=_none
    )
    arguments: str = Field(description="JSON of an object that fits the parameters; in a stream the next piece of it.")


class ToolCall(ResponseModel):
    id: str = Field(description="A fresh name, for the message with the result.")
    type: Literal["function"] = Field(default="function", description="Always function.")
    function: FunctionCall = Field(description="What to call.")


class ToolCallPiece(ResponseModel):
    index: int = Field(description="From 0, one for each call.")
    id: str | None = Field(default=None, description="In the first piece of a call: a fresh name.", exclude_if=_none)
    type: Literal["function"] | None = Field(
        default=None, description="In the first piece of a call.", exclude_if=_none
    )
    function: FunctionCall = Field(description="What is new of it.")


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = Field(default="assistant", description="Always assistant.")
    content: str | None = Field(description="The output; null where it is calls or thinking and nothing else.")
    reasoning_content: str | None = Field(
        default=None, description="What the model thought before; only if it did.", exclude_if=_none
    )
    reasoning: str | None = Field(default=None, description="The same, by its newer name.", exclude_if=_none)
    tool_calls: list[ToolCall] | None = Field(
        default=None, description="Functions to call; only if any.", exclude_if=_none
    )
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
    finish_reason: ChatFinishedBy = Field(
        description="stop: an end of the text; tool_calls: an end after calls; length: max_tokens."
    )
    stop_reason: StopReason = None


class ChatCompletion(ResponseModel):
    id: str = Field(description="A fresh name of this answer.")
    object: Literal["chat.completion"] = Field(default="chat.completion", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChoice] = Field(description="One for each of n.")
    prompt_logprobs: PromptLogprobs | None = Field(
        default=None,
        description="By token id, of each token of the prompt and the likeliest in its place; null for the first one. "
        "Only where they were asked for.",
        exclude_if=_none,
    )
    usage: Usage = Field(description="Counts of tokens.")
    metrics: ResponseMetrics = Field(description="What the request got.")
    service_tier: str | None = Field(default=None, description="As requested, where it was.", exclude_if=_none)


class Delta(ResponseModel):
    role: Literal["assistant"] | None = Field(
        default=None, description="In the first piece of a choice.", exclude_if=_none
    )
    content: str | None = Field(default=None, description="The next piece of the output.", exclude_if=_none)
    reasoning_content: str | None = Field(
        default=None, description="The next piece of what the model thinks.", exclude_if=_none
    )
    reasoning: str | None = Field(default=None, description="The same, by its newer name.", exclude_if=_none)
    tool_calls: list[ToolCallPiece] | None = Field(
        default=None, description="The next pieces of calls.", exclude_if=_none
    )


class ChatChunkChoice(ResponseModel):
    index: int = Field(description="From 0, one for each of n.")
    delta: Delta = Field(description="What is new.")
    logprobs: ChatLogprobs | None = Field(
        default=None, description="Of the tokens that are new, where they were asked for."
    )
    finish_reason: ChatFinishedBy | None = Field(description="With the last piece of a choice; null before.")
    stop_reason: StopReason = None


class ChatChunk(ResponseModel):
    id: str = Field(description="A fresh name of this answer, the same in all its events.")
    object: Literal["chat.completion.chunk"] = Field(default="chat.completion.chunk", description="What this is.")
    created: int = Field(description="Unix time, seconds.")
    model: str = Field(description="The served model's name.")
    choices: list[ChatChunkChoice] = Field(description="Those that go on; empty in the event that has the counts only.")
    usage: Usage | None = Field(default=None, description="Counts of tokens, where stream_options ask for them.")
    metrics: ResponseMetrics | None = Field(default=None, description="What the request got, with the last event only.")
    service_tier: str | None = Field(default=None, description="As requested, where it was.", exclude_if=_none)


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
    thinking_tpot_ms: float | None = Field(
        default=None, description="Target, milliseconds per token of the thinking; only if there is one.",
        exclude_if=_none,
    )  # fmt: skip
    e2e_ms: float | None = Field(
        default=None, description="Deadline of the last token, milliseconds; only if there is one.", exclude_if=_none
    )


class ModelCard(ResponseModel):
    id: str = Field(description="The name that model may be.")
    parent: str | None = Field(default=None, description="The model that an adapter changes; null: no adapter.")
    object: Literal["model"] = Field(default="model", description="What this is.")
    created: int = Field(description="Unix time of the server's start, seconds.")
    owned_by: Literal["adaserve"] = Field(default="adaserve", description="Always adaserve.")
    max_model_len: int = Field(description="Most tokens of prompt and output together.")
    draft: str | None = Field(description="The draft model; null: there is none.")
    drafts: list[str] = Field(description="What draft_tag may be.")
    baseline_ms: float = Field(description="Measured milliseconds of one token, alone, without speculation.")
    slo_classes: dict[str, SloTargets] = Field(description="What slo_class may be, and the targets that it stands for.")


class ModelList(ResponseModel):
    object: Literal["list"] = Field(default="list", description="What this is.")
    data: list[ModelCard] = Field(description="The model, then its adapters.")


HealthStatus = Literal["starting", "ok", "stalled", "restarting", "draining", "dead"]


class Health(ResponseModel):
    status: HealthStatus = Field(description="What the server does.")
    detail: str = Field(description="The same in words; of an engine that ended, why.")
    restarts: int = Field(default=0, description="How often the engine ended and was started again.")
    last_crash: str | None = Field(default=None, description="Why the engine ended last; null: it never did.")
    last_crash_unix_s: float | None = Field(default=None, description="When that was, in Unix time.")


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
