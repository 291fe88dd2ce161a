"""Routes that generate: POST /v1/completions, /v1/chat/completions and /v1/responses."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from adaserve_jax.engine.client import GenerateRequest
from adaserve_jax.errors import AdaServeError, QueueFullError
from adaserve_jax.models.chat_prompt import PLAIN_CHAT
from adaserve_jax.server.auth import Account, RateLimited
from adaserve_jax.server.body import BoundedRoute
from adaserve_jax.server.constraint_fields import form_name_of
from adaserve_jax.server.conversation import chat_prompt, encode_chat
from adaserve_jax.server.errors import ApiError, invalid
from adaserve_jax.server.formatting import (
    ChatFormatter,
    CompletionFormatter,
    DeltaBuilder,
    EventFormatter,
    token_text,
)
from adaserve_jax.server.generation import Generation, max_tokens_of
from adaserve_jax.server.observers import Origin
from adaserve_jax.server.parse import (
    asked_tokens,
    check_rows,
    check_supported,
    encode,
    fit_context,
    prompts_of,
    run_sized,
    sampling_of,
    targets_of,
    truncated,
    with_header_targets,
)
from adaserve_jax.server.prompt_logprobs import PromptReport, is_prompt_only
from adaserve_jax.server.reasoning import marks_in, with_thinking
from adaserve_jax.server.responses_input import as_chat
from adaserve_jax.server.responses_output import ResponseEventWriter, ResponsesFormatter
from adaserve_jax.server.responses_schema import ResponseObject, ResponsesBody
from adaserve_jax.server.schema import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ErrorBody,
    GenerationBody,
    RequestModel,
    StreamOptions,
)
from adaserve_jax.server.state import ServerState, TextCodec
from adaserve_jax.server.streaming import EventStream, EventWriter, collect, with_warning
from adaserve_jax.server.tools import offered_tools, tool_format, with_tool_calls
from adaserve_jax.types import SLO

_LIKE_A_TARGET = re.compile("^slo|tpot|ttft|^e2e|deadline|^max_queue", re.IGNORECASE)
"""Unknown fields that are refused, because a misspelt target would be served too slowly."""
MAX_NAMED_FIELDS = 16
MAX_NAME = 40
MAX_TRACEPARENT = 128


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error statuses of a route for the OpenAPI document."""
    texts = {
        400: "A field is wrong, missing or not implemented.",
        401: "The API key is missing or wrong.",
        403: "The API key is not an operator's, or the route is off.",
        404: "Another model is served.",
        413: "The body is too large.",
        429: "No room, a turn that comes too late, or an API key over a limit; see Retry-After.",
        503: "Not ready, draining, or the engine ended or stalled.",
    }
    # FastAPI makes a validator of each `model`, half of a start's time with one for each status. The default keeps its
    # model, which puts the schema into the document.
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    responses: dict[int | str, dict[str, Any]] = {s: {"description": texts[s], "content": content} for s in statuses}
    return responses | {"default": {"model": ErrorBody, "description": "Any other error."}}


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


def warning_headers(body: RequestModel, query: Iterable[str]) -> Mapping[str, str]:
    """Return a warning header that names ignored fields and query parameters, in ASCII and at bounded length."""
    headers: Mapping[str, str] = {}
    for what, names in (("fields", body.ignored_fields()), ("query parameters", sorted(set(query)))):
        if names:
            headers = with_warning(headers, f"ignored {what}: {_named(names)}")
    return headers


def _check_target_names(body: RequestModel) -> None:
    """Raise ApiError for an unknown field that looks like a target: what is served without it would be too slow."""
    known = [name for name in type(body).model_fields if name.startswith("slo_") or name == "max_queue_ms"]
    for name in body.ignored_fields():
        if _LIKE_A_TARGET.search(name):
            raise invalid(
                f"{name:.40} is not a field; targets and limits are {', '.join(known)}",
                param=name[:40],
                code="invalid_slo",
            )


def _moved_targets(body: GenerationBody, slo: SLO) -> str:
    """Return a warning about the body's targets that the limits of server or key changed; "" if there are none."""
    served = {"slo_tpot_ms": slo.tpot_ms, "slo_ttft_ms": slo.ttft_ms, "slo_e2e_ms": slo.e2e_ms}
    if isinstance(body, ChatBody):
        served["slo_thinking_tpot_ms"] = slo.thinking_tpot_ms
    asked = {name: getattr(body, name) for name in served}
    moved = (
        f"{name} {asked[name]:.12g} is served as {limit:.12g}"
        for name, limit in served.items() if limit is not None and asked[name] not in (None, limit)
    )  # fmt: skip
    if body.slo_relative is not None and slo.relative is None and slo.tpot_ms is not None:
        moved = (*moved, f"slo_relative {body.slo_relative:.12g} is served as slo_tpot_ms {slo.tpot_ms:.12g}")
    return ", ".join(moved)


def _cut(body: GenerationBody, name: str, generation: Generation) -> str:
    """Return a warning about a prompt and a limit of the output that were cut to fit; "" if neither was. name: field of
    the limit, where the request has another than the body; else ""."""
    asked, field = asked_tokens(body)
    limit = min(request.sampling.max_tokens for request in generation.requests)
    cut = f"truncation left out {generation.cut_tokens} tokens of the prompt" if generation.cut_tokens else ""
    lowered = f"{name or field} {asked} is served as {limit}" if asked is not None and asked > limit else ""
    return ", ".join(filter(None, (cut, lowered)))


def _named(names: list[str]) -> str:
    shown = (re.sub(r"[^!-~]", "?", name[:MAX_NAME]) or "''" for name in names[:MAX_NAMED_FIELDS])
    more = f" and {len(names) - MAX_NAMED_FIELDS} more" if len(names) > MAX_NAMED_FIELDS else ""
    return ", ".join(shown) + more


def router(state: ServerState) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["generation"], route_class=BoundedRoute)
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
        return await generate(state, body, http, partial(ChatFormatter, service_tier=body.service_tier))

    @routes.post(
        "/v1/responses",
        response_model=ResponseObject,
        responses=errors | _stream_response("ResponseEvent"),
        operation_id="create_response",
        summary="Answer a conversation, by the Responses API",
    )
    async def responses(body: ResponsesBody, http: Request) -> Response:
        chat, names = as_chat(body)
        try:
            to_fit = body.truncation == "auto" and body.truncate_prompt_tokens is None
            return await generate(state, chat, http, partial(ResponsesFormatter, body, names), body, to_fit=to_fit)
        except (ApiError, AdaServeError) as error:
            raise names.error(error) from None

    return routes


async def generate(
    state: ServerState, body: CompletionBody | ChatBody, http: Request,
    formatter: Callable[[str], EventFormatter | ResponsesFormatter], asked: RequestModel | None = None,
    *, to_fit: bool = False,
) -> Response:  # fmt: skip
    """Serve one request, from the body to the response. Raises ApiError and AdaServeError.

    formatter: makes the response's, of the model's name. asked: the body that came, where `body` was made of it.
    to_fit: cut prompt and output to what the context holds, and say so, instead of refusing them.
    """
    body, warning = with_header_targets(body, http.headers, trusted=state.settings.trust_gateway)
    adapter = state.require_model(body.model)
    name = adapter or state.model_name  # before submitting: once the engine ends, the model's name is unknown
    response = formatter(name)
    account: Account = getattr(http.state, "account", state.keyring.anonymous)
    operation = "chat" if isinstance(body, ChatBody) else "text_completion"
    traceparent = http.headers.get("traceparent", "")[:MAX_TRACEPARENT]
    origin = Origin(getattr(http.state, "request_id", ""), account.name, operation, traceparent, name)
    _check_target_names(asked or body)
    generation = await begin(state, body, origin, account, adapter, to_fit=to_fit)
    if isinstance(response, ResponsesFormatter):  # its log probabilities are parts of messages
        generation.deltas.unscored = generation.requests[0].sampling.thinking
    headers = with_warning(warning_headers(asked or body, http.query_params), warning)
    headers = with_warning(headers, _moved_targets(body, generation.requests[0].slo))
    name = "" if asked is None else "max_output_tokens"
    headers = with_warning(headers, _cut(body, name, generation))
    if not body.stream:
        return await collect(generation, response, http, headers)
    if isinstance(response, ResponsesFormatter):
        return EventStream(ResponseEventWriter(generation, response), headers)
    return EventStream(EventWriter(generation, response, body.stream_options or StreamOptions()), headers)


async def begin(
    state: ServerState, body: CompletionBody | ChatBody, origin: Origin, account: Account, adapter: str = "",
    *, to_fit: bool = False,
) -> Generation:  # fmt: skip
    """Check what needs no tokens, reserve room, tokenise, submit. Raises ApiError and AdaServeError.

    adapter: name of the one that the body's model is. to_fit: see `generate`.
    """
    check_supported(body)
    sampling = sampling_of(body, state.sampling_defaults)
    if isinstance(body, ChatBody):
        sampling = with_tool_calls(sampling, body, tool_format(state))
    thinks = isinstance(body, ChatBody) and marks_in(state) is not None
    targets = targets_of(body, state.settings, state.classes, state.info.baseline_s, account.limits, thinks=thinks)
    salt, learn = account.salt(body.cache_salt), account.may_learn and body.learn is not False
    prompts = prompts_of(body) if isinstance(body, CompletionBody) else [""]
    chat = PLAIN_CHAT
    if isinstance(body, ChatBody):
        chat = chat_prompt(body, state.settings)
    count = len(prompts) * sampling.n
    max_count = min(state.settings.max_choices, state.settings.max_inflight, account.max_choices)
    if count > max_count:
        raise invalid(f"prompts times n must be at most {max_count}, got {len(prompts)} times {sampling.n}", "n")
    reservation = None
    try:
        info, tokenizer = state.info, state.tokenizer
        most = min(sampling.max_tokens, info.max_sequence_tokens)
        reservation = state.admit(account, count, most, targets.slo, targets.priority, targets.max_queue_s)
        if isinstance(body, ChatBody):
            tools = offered_tools(body)
            encoded = [
                await encode_chat(
                    tokenizer, body.messages, tool_format(state), tools, chat, state.template_threads
                )
            ]  # fmt: skip
        else:
            encoded = await encode(tokenizer, prompts, info.vocab_size, body.add_special_tokens is not False)
        whole = sum(map(len, encoded))
        encoded = [truncated(body, ids, info, to_fit=to_fit) for ids in encoded]
        check_rows(encoded, tokenizer, info.vocab_size, "messages" if isinstance(body, ChatBody) else "prompt")
        if isinstance(body, ChatBody):
            sampling = with_thinking(sampling, body, encoded[0], state)
        requests = [
            GenerateRequest(
                uuid.uuid4().hex,
                ids,
                fit_context(body, sampling, len(ids), info, to_fit=to_fit),
                targets.slo,
                priority=targets.priority,
                slo_class=targets.slo_class,
                cache_salt=salt,
                learn=learn,
                tenant=account.name,
                draft_tag=body.draft_tag or "",
                # Only the first prompt of a list must begin in time: the error of any prompt would end them all.
                max_wait_s=0.0 if index else state.settings.max_queue_wait,
                max_queue_s=0.0 if index else targets.max_queue_s,
                adapter=adapter,
            )
            for index, ids in enumerate(encoded)
        ]
        PromptReport.of(body).check(requests, stream=bool(body.stream))
        texts = prompts if body.truncate_prompt_tokens is None else encoded
        deltas = await run_sized(whole, lambda: _delta_builder(body, texts, requests, tokenizer))
        account.charge(max_tokens_of(requests))
    except BaseException as error:
        if reservation is not None:
            reservation.release()
        if isinstance(error, RateLimited):
            state.metrics.observe_rate_limited(error.limit)
        if isinstance(error, RateLimited) or (reservation is None and isinstance(error, QueueFullError)):
            state.rejected(origin, targets.slo, targets.slo_class, range(count), error)
        raise
    cut_tokens = whole - sum(map(len, encoded)) if to_fit else 0
    generation = Generation(state, requests, reservation, origin, deltas, form_name_of(body), cut_tokens)
    generation.start()  # gives back by itself what does not begin
    return generation


def _delta_builder(
    body: GenerationBody, prompts: Sequence[str | list[int]], requests: Sequence[GenerateRequest], tokenizer: TextCodec
) -> DeltaBuilder:
    """Return the builder of what the client sees: echoed prompts and spelled tokens where it asks for them."""
    echo: tuple[str, ...] = ()
    sampling, report = requests[0].sampling, PromptReport.of(body)
    if isinstance(body, CompletionBody) and body.echo:
        echo = tuple(one if isinstance(one, str) else tokenizer.decode(one) for one in prompts)
    return DeltaBuilder(
        sampling.n,
        echo,
        None if sampling.logprobs is None else tokenizer.spelled,
        sampling.tool_calls,
        report,
        () if report.echoed is None else tuple(request.prompt_ids[0] for request in requests),
        None if report.listed is None else lambda token: token_text(tokenizer.spelled(token), "bytes:"),
        is_prompt_only(body),
        hides_thinking := isinstance(body, ChatBody) and body.include_reasoning is False,
        sampling.thinking if hides_thinking else None,
    )
