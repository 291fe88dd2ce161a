"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import QueueFullError
from adaserve_jax.server.dialects import ChatDialect, CompletionDialect
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.generation import Generation
from adaserve_jax.server.observers import Origin
from adaserve_jax.server.protocol import Body, ChatBody, CompletionBody, GenerationBody
from adaserve_jax.server.responses import ChatCompletion, Completion, ErrorBody
from adaserve_jax.server.state import ServerState
from adaserve_jax.server.streaming import WARNING_HEADER, EventStream, collect, events
from adaserve_jax.server.translate import (
    check_supported,
    encode,
    encode_chat,
    fit,
    prompts_of,
    salt_of,
    sampling_of,
    slo_of,
)

MAX_NAMED_FIELDS = 16
MAX_NAME = 40


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error statuses of a route, for the OpenAPI document."""
    texts = {
        400: "A field is wrong, missing or not implemented.",
        401: "The API key is missing or wrong.",
        404: "Another model is served.",
        413: "The body is too large.",
        429: "No room, or a turn that comes too late; see Retry-After.",
        503: "Not ready, draining, or the engine ended or stalled.",
    }
    shape: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody, "description": texts[s]} for s in statuses}
    return shape | {"default": {"model": ErrorBody, "description": "Any other error."}}


def _streams(chunk: str) -> dict[int | str, dict[str, Any]]:
    content = {"schema": {"type": "string", "description": f"Events `data: {chunk}`, the last one `data: [DONE]`."}}
    return {200: {"content": {"text/event-stream": content}}}


def warning_headers(body: Body) -> dict[str, str]:
    """Name the fields that were ignored, in ASCII and at bounded length."""
    unknown = body.unknown_fields()
    if not unknown:
        return {}
    named = [_printable(name[:MAX_NAME]) or "''" for name in unknown[:MAX_NAMED_FIELDS]]
    more = f" and {len(unknown) - MAX_NAMED_FIELDS} more" if len(unknown) > MAX_NAMED_FIELDS else ""
    return {WARNING_HEADER: f"ignored unknown fields: {', '.join(named)}{more}"}


def _printable(name: str) -> str:
    return "".join(c if 32 < ord(c) < 127 else "?" for c in name)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    errors = error_responses(400, 401, 404, 413, 429, 503)

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=errors | _streams("Completion"),
        operation_id="create_completion",
        summary="Continue a text",
    )
    async def completions(body: CompletionBody, http: Request) -> Response:
        generation = await begin(state, body, origin_of(http))
        return await answer(body, http, generation, CompletionDialect(state.model_name))

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=errors | _streams("ChatChunk"),
        operation_id="create_chat_completion",
        summary="Answer a conversation",
    )
    async def chat(body: ChatBody, http: Request) -> Response:
        generation = await begin(state, body, origin_of(http))
        return await answer(body, http, generation, ChatDialect(state.model_name))

    return routes


def origin_of(http: Request) -> Origin:
    """Who asks, as the layers around the routes noted it."""
    return Origin(getattr(http.state, "request_id", ""), getattr(http.state, "key", ""))


async def begin(state: ServerState, body: CompletionBody | ChatBody, origin: Origin) -> Generation:
    """Check everything that needs no tokens, reserve room, tokenise, submit. Raises ApiError and AdaServeError."""
    state.require_model(body.model)
    check_supported(body)
    sampling = sampling_of(body, state.sampling_defaults)
    slo, slo_class = slo_of(body, state.settings, state.classes, state.info.baseline_s)
    salt = salt_of(body, state.settings)
    prompts = prompts_of(body) if isinstance(body, CompletionBody) else [""]
    count, most = len(prompts) * sampling.n, state.settings.max_choices
    if count > most:
        raise invalid(f"prompts times n must be at most {most}, got {len(prompts)} times {sampling.n}", "n")
    try:
        reservation = state.admit(count, slo, body.priority or 0)
    except QueueFullError as error:
        state.rejected(origin, slo, slo_class, count, error)
        raise
    try:
        info, tokenizer, requests = state.info, state.tokenizer, []
        for prompt in prompts:
            if isinstance(body, ChatBody):
                ids = await encode_chat(tokenizer, body.messages)
            else:
                ids = await encode(tokenizer, prompt, info.vocab_size)
            fitting = fit(body, sampling, len(ids), info.max_context)
            requests.append(GenerateRequest(uuid.uuid4().hex, ids, fitting, slo, body.priority or 0, slo_class, salt))
        generation = Generation(state, requests, reservation, origin)
        generation.start()
    except BaseException:
        reservation.release()
        raise
    return generation


async def answer(
    body: GenerationBody, http: Request, generation: Generation, dialect: CompletionDialect | ChatDialect
) -> Response:
    """Stream or collect what has begun."""
    headers = warning_headers(body)
    if not body.stream:
        return await collect(generation, dialect, http, headers)
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return EventStream(events(generation, dialect, include_usage=usage), generation.abort, headers)
