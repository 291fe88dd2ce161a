"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import QueueFullError
from adaserve_jax.server.auth import Account, Hold, RateLimited
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.formatting import ChatDialect, CompletionDialect, Pieces
from adaserve_jax.server.generation import Generation, tokens_of
from adaserve_jax.server.observers import Origin
from adaserve_jax.server.parse import (
    Targets,
    check_draft_tag,
    check_supported,
    encode,
    encode_chat,
    prompts_of,
    sampling_of,
    targets_of,
    with_header_targets,
    within_context,
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
from adaserve_jax.server.state import Reservation, ServerState, TextCodec
from adaserve_jax.server.streaming import WARNING_HEADER, EventStream, EventWriter, UsageReports, collect
from adaserve_jax.types import SamplingParams

MAX_NAMED_FIELDS = 16
MAX_NAME = 40
MAX_TRACEPARENT = 128


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error statuses of a route, for the OpenAPI document."""
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


def _streams(chunk: str) -> dict[int | str, dict[str, Any]]:
    """The other kind of answer, for the OpenAPI document: the schema of one event."""
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
    """Name the fields and the query parameters that were ignored, in ASCII and at bounded length."""
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
        return await generate(state, body, http, CompletionDialect)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=errors | _streams("ChatChunk"),
        operation_id="create_chat_completion",
        summary="Answer a conversation",
    )
    async def chat(body: ChatBody, http: Request) -> Response:
        return await generate(state, body, http, ChatDialect)

    return routes


async def generate(
    state: ServerState, body: CompletionBody | ChatBody, http: Request,
    dialect: type[CompletionDialect] | type[ChatDialect],
) -> Response:  # fmt: skip
    """Targets of a trusted gateway, then the whole way of a request. Raises ApiError and AdaServeError."""
    body, warning = with_header_targets(body, http.headers, trusted=state.settings.trust_gateway)
    state.require_model(body.model)
    spelling = dialect(state.model_name)  # before anything runs: the engine may end at any time, and then has no name
    generation = await begin(state, body, origin_of(http), account_of(state, http))
    return await answer(body, http, generation, spelling, warning)


def origin_of(http: Request) -> Origin:
    """Who asks, as the layers around the routes noted it."""
    operation = "chat" if "chat" in http.url.path else "text_completion"
    traceparent = http.headers.get("traceparent", "")[:MAX_TRACEPARENT]
    return Origin(getattr(http.state, "request_id", ""), getattr(http.state, "key", ""), operation, traceparent)


def account_of(state: ServerState, http: Request) -> Account:
    """The account of the key that the request came with; without keys, that of everybody."""
    return getattr(http.state, "account", state.keyring.anonymous)


async def begin(state: ServerState, body: CompletionBody | ChatBody, origin: Origin, account: Account) -> Generation:
    """Check everything that needs no tokens, reserve room, tokenise, submit. Raises ApiError and AdaServeError."""
    check_supported(body)
    sampling = sampling_of(body, state.sampling_defaults)
    targets = targets_of(body, state.settings, state.classes, state.info.baseline_s, account.limits)
    salt, learn = account.salt(body.cache_salt), account.may_learn and body.learn is not False
    draft_tag = check_draft_tag(body, state.info.drafts)
    prompts = prompts_of(body) if isinstance(body, CompletionBody) else [""]
    count, most = len(prompts) * sampling.n, min(state.settings.max_choices, account.most_choices)
    if count > most:
        raise invalid(f"prompts times n must be at most {most}, got {len(prompts)} times {sampling.n}", "n")
    try:
        hold, reservation = room_for(state, account, count, targets)
    except (QueueFullError, RateLimited) as error:
        refused(state, origin, targets, count, error)
        raise
    try:
        info, tokenizer = state.info, state.tokenizer
        if isinstance(body, ChatBody):
            encoded = [await encode_chat(tokenizer, body.messages)]
        else:
            encoded = await encode(tokenizer, prompts, info.vocab_size)
        requests = [
            GenerateRequest(
                uuid.uuid4().hex,
                ids,
                within_context(body, sampling, len(ids), info.max_context),
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
        pieces = pieces_of(body, prompts, sampling, tokenizer)
        account.charge(tokens_of(requests))
    except BaseException as error:
        reservation.release()
        hold.drop()
        if isinstance(error, RateLimited):
            refused(state, origin, targets, count, error)
        raise
    generation = Generation(state, requests, reservation, hold, origin, pieces)
    generation.start()  # gives back by itself what does not begin
    return generation


def pieces_of(
    body: GenerationBody, prompts: Sequence[str | list[int]], sampling: SamplingParams, tokenizer: TextCodec
) -> Pieces:
    """What the client is to be shown: prompts echoed, tokens spelled, where it asks for that."""
    echo: tuple[str, ...] = ()
    if isinstance(body, CompletionBody) and body.echo:
        echo = tuple(one if isinstance(one, str) else tokenizer.decode(one) for one in prompts)
    return Pieces(sampling.n, echo, None if sampling.logprobs is None else tokenizer.spelled)


def room_for(state: ServerState, account: Account, count: int, targets: Targets) -> tuple[Hold, Reservation]:
    """Room for so many choices, by the key's limits and the server's. Raises RateLimited, OverloadedError and
    QueueFullError."""
    hold = account.hold(count)
    try:
        return hold, state.admit(count, targets.slo, targets.priority)
    except BaseException:
        hold.drop()
        raise


def refused(
    state: ServerState, origin: Origin, targets: Targets, count: int, error: QueueFullError | RateLimited
) -> None:
    """Note that the choices of a request got no room."""
    if isinstance(error, RateLimited):
        state.metrics.observe_rate_limited(error.limit)
    state.rejected(origin, targets.slo, targets.slo_class, range(count), error)


async def answer(
    body: GenerationBody,
    http: Request,
    generation: Generation,
    dialect: CompletionDialect | ChatDialect,
    warning: str = "",
) -> Response:
    """Stream or collect what has begun. warning: said in a header, beside what the body is warned of."""
    headers = warning_headers(body, http.query_params)
    if warning:
        headers[WARNING_HEADER] = "; ".join(filter(None, (headers.get(WARNING_HEADER), warning)))
    if not body.stream:
        return await collect(generation, dialect, http, headers)
    options = body.stream_options
    reports = UsageReports(
        at_end=options is not None and bool(options.include_usage),
        throughout=options is not None and bool(options.continuous_usage_stats),
    )
    return EventStream(EventWriter(generation, dialect, reports), headers)
