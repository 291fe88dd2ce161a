"""Routes that generate: POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import QueueFullError
from adaserve_jax.server.auth import Account, RateLimited
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.formatting import ChatFormatter, CompletionFormatter, DeltaBuilder
from adaserve_jax.server.generation import Generation, max_tokens_of
from adaserve_jax.server.observers import Origin
from adaserve_jax.server.parse import (
    RequestTargets,
    check_draft_tag,
    check_supported,
    encode,
    encode_chat,
    fit_context,
    prompts_of,
    sampling_of,
    targets_of,
    with_header_targets,
)
from adaserve_jax.server.schema import (
    Body,
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ErrorBody,
    GenerationBody,
)
from adaserve_jax.server.state import ServerState, TextCodec
from adaserve_jax.server.streaming import WARNING_HEADER, EventStream, EventWriter, UsageOptions, collect
from adaserve_jax.types import SamplingParams

MAX_NAMED_FIELDS = 16
MAX_NAME = 40
MAX_TRACEPARENT = 128


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error statuses of a route for the OpenAPI document."""
    texts = {
        400: "A field is wrong, missing or not implemented.",
        401: "The API key is missing or wrong.",
        403: "The API key is not an operator's.",
        404: "Another model is served.",
        413: "The body is too large.",
        429: "No room, a turn that comes too late, or an API key over a limit; see Retry-After.",
        503: "Not ready, draining, or the engine ended or stalled.",
    }
    shape: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody, "description": texts[s]} for s in statuses}
    return shape | {"default": {"model": ErrorBody, "description": "Any other error."}}


def _stream_response(chunk: str) -> dict[int | str, dict[str, Any]]:
    """Return the streamed answer for the OpenAPI document: the schema of one event."""
    found = [{"$ref": f"#/components/schemas/{name}"} for name in (chunk, "ErrorBody")]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": found}}
    event = {
        "type": "object",
        "description": f"Events `data: {chunk}`, the last one `data: [DONE]`; an error where the answer failed midway.",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {200: {"content": {"text/event-stream": {"schema": event}}}}


def warning_headers(body: Body, query: Iterable[str] = ()) -> dict[str, str]:
    """Return a warning header that names ignored fields and query parameters, in ASCII and at bounded length."""
    warnings = [
        f"ignored unknown {what}: {_named(names)}"
        for what, names in (("fields", body.unknown_fields()), ("query parameters", sorted(set(query))))
        if names
    ]
    return {WARNING_HEADER: "; ".join(warnings)} if warnings else {}


def _named(names: list[str]) -> str:
    named = [_printable(name[:MAX_NAME]) or "''" for name in names[:MAX_NAMED_FIELDS]]
    more = f" and {len(names) - MAX_NAMED_FIELDS} more" if len(names) > MAX_NAMED_FIELDS else ""
    return ", ".join(named) + more


def _printable(name: str) -> str:
    return "".join(c if 32 < ord(c) < 127 else "?" for c in name)


def router(state: ServerState) -> APIRouter:
    """Return the two routes."""
    routes = APIRouter(tags=["generation"])
    errors = error_responses(400, 401, 404, 413, 429, 503)

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=errors | _stream_response("Completion"),
        operation_id="create_completion",
        summary="Continue a text",
    )
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await generate(state, body, http, CompletionFormatter)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=errors | _stream_response("ChatChunk"),
        operation_id="create_chat_completion",
        summary="Answer a conversation",
    )
    async def chat(body: ChatBody, http: Request) -> Response:
        return await generate(state, body, http, ChatFormatter)

    return routes


async def generate(
    state: ServerState, body: CompletionBody | ChatBody, http: Request,
    formatter: type[CompletionFormatter] | type[ChatFormatter],
) -> Response:  # fmt: skip
    """Serve one request, from the body to the response. Raises ApiError and AdaServeError."""
    body, warning = with_header_targets(body, http.headers, trusted=state.settings.trust_gateway)
    state.require_model(body.model)
    response = formatter(state.model_name)  # before submitting: once the engine ends, the model's name is unknown
    account: Account = getattr(http.state, "account", state.keyring.anonymous)
    generation = await begin(state, body, _origin(http), account)
    headers = warning_headers(body, http.query_params)
    if warning:
        headers[WARNING_HEADER] = "; ".join(filter(None, (headers.get(WARNING_HEADER), warning)))
    if not body.stream:
        return await collect(generation, response, http, headers)
    options = body.stream_options
    usage = UsageOptions(
        in_last_event=options is not None and bool(options.include_usage),
        in_every_event=options is not None and bool(options.continuous_usage_stats),
    )
    return EventStream(EventWriter(generation, response, usage), headers)


def _origin(http: Request) -> Origin:
    """Return the request's id, key name, operation and trace, as the middleware noted them."""
    operation = "chat" if "chat" in http.url.path else "text_completion"
    traceparent = http.headers.get("traceparent", "")[:MAX_TRACEPARENT]
    return Origin(getattr(http.state, "request_id", ""), getattr(http.state, "key", ""), operation, traceparent)


async def begin(state: ServerState, body: CompletionBody | ChatBody, origin: Origin, account: Account) -> Generation:
    """Check what needs no tokens, reserve room, tokenise, submit. Raises ApiError and AdaServeError."""
    check_supported(body)
    sampling = sampling_of(body, state.sampling_defaults)
    targets = targets_of(body, state.settings, state.classes, state.info.baseline_s, account.limits)
    salt, learn = account.salt(body.cache_salt), account.may_learn and body.learn is not False
    draft_tag = check_draft_tag(body, state.info.drafts)
    prompts = prompts_of(body) if isinstance(body, CompletionBody) else [""]
    count, max_count = len(prompts) * sampling.n, min(state.settings.max_choices, account.max_choices)
    if count > max_count:
        raise invalid(f"prompts times n must be at most {max_count}, got {len(prompts)} times {sampling.n}", "n")
    key_reservation = reservation = None
    try:
        key_reservation = account.reserve(count)
        reservation = state.admit(count, targets.slo, targets.priority)
        info, tokenizer = state.info, state.tokenizer
        if isinstance(body, ChatBody):
            encoded = [await encode_chat(tokenizer, body.messages)]
        else:
            encoded = await encode(tokenizer, prompts, info.vocab_size)
        requests = [
            GenerateRequest(
                uuid.uuid4().hex,
                ids,
                fit_context(body, sampling, len(ids), info),
                targets.slo,
                priority=targets.priority,
                slo_class=targets.slo_class,
                cache_salt=salt,
                learn=learn,
                tenant=account.name,
                draft_tag=draft_tag,
            )
            for ids in encoded
        ]
        deltas = _delta_builder(body, prompts, sampling, tokenizer)
        account.charge(max_tokens_of(requests))
    except BaseException as error:
        if reservation is not None:
            reservation.release()
        if key_reservation is not None:
            key_reservation.drop()
        if isinstance(error, RateLimited) or (reservation is None and isinstance(error, QueueFullError)):
            _report_rejected(state, origin, targets, count, error)
        raise
    generation = Generation(state, requests, reservation, key_reservation, origin, deltas)
    generation.start()  # gives back by itself what does not begin
    return generation


def _delta_builder(
    body: GenerationBody, prompts: Sequence[str | list[int]], sampling: SamplingParams, tokenizer: TextCodec
) -> DeltaBuilder:
    """Return the builder of what the client sees: echoed prompts and spelled tokens where it asks for them."""
    echo: tuple[str, ...] = ()
    if isinstance(body, CompletionBody) and body.echo:
        echo = tuple(one if isinstance(one, str) else tokenizer.decode(one) for one in prompts)
    return DeltaBuilder(sampling.n, echo, None if sampling.logprobs is None else tokenizer.spelled)


def _report_rejected(
    state: ServerState, origin: Origin, targets: RequestTargets, count: int, error: QueueFullError | RateLimited
) -> None:
    if isinstance(error, RateLimited):
        state.metrics.observe_rate_limited(error.limit)
    state.rejected(origin, targets.slo, targets.slo_class, range(count), error)
