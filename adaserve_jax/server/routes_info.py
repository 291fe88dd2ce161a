"""Routes that generate nothing: models, tokens, health, metrics, version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel

import adaserve_jax
from adaserve_jax.engine.client import check_ids
from adaserve_jax.errors import EngineDeadError
from adaserve_jax.server.body import BoundedRoute
from adaserve_jax.server.conversation import chat_prompt, encode_chat
from adaserve_jax.server.errors import RETRY_AFTER_S, invalid, retry_after
from adaserve_jax.server.formatting import token_text
from adaserve_jax.server.parse import encode, run_sized
from adaserve_jax.server.routes_generate import error_responses, warning_headers
from adaserve_jax.server.schema import (
    DetokenizeBody,
    Health,
    ModelCard,
    ModelList,
    SloTargets,
    Text,
    TokenizeBody,
    Tokens,
    Version,
)
from adaserve_jax.server.state import ServerState
from adaserve_jax.server.tools import tool_format


def router(state: ServerState) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=BoundedRoute)
    _add_models(routes, state)
    _add_tokens(routes, state)
    _add_operations(routes, state)
    return routes


def model_list(state: ServerState) -> ModelList:
    """Return the served model, then its adapters in the order of loading."""
    return ModelList(data=[_card(state, name) for name in ("", *state.info.adapters)])


def _card(state: ServerState, adapter: str = "") -> ModelCard:
    """Return the card of an adapter; of the model alone with ""."""
    info = state.info
    return ModelCard(
        id=adapter or state.model_name,
        parent=state.model_name if adapter else None,
        created=state.created,
        max_model_len=info.max_sequence_tokens,
        draft=info.draft,
        drafts=list(info.drafts),
        baseline_ms=info.baseline_s * 1e3,
        slo_classes={
            name: SloTargets(
                tpot_ms=slo.tpot_ms, ttft_ms=slo.ttft_ms, thinking_tpot_ms=slo.thinking_tpot_ms, e2e_ms=slo.e2e_ms
            )
            for name, slo in state.classes.items()
        },
    )


def _add_models(routes: APIRouter, state: ServerState) -> None:
    @routes.get(
        "/v1/models", tags=["models"], operation_id="list_models", summary="The served model and its adapters",
        responses=error_responses(401, 503),
    )  # fmt: skip
    async def models() -> ModelList:
        state.require_ready()
        return model_list(state)

    @routes.get(
        "/v1/models/{model:path}", tags=["models"], operation_id="get_model", summary="One model by name",
        responses=error_responses(401, 404, 503),
    )  # fmt: skip
    async def model_by_name(model: str) -> ModelCard:
        return _card(state, state.require_model(model))


def _add_tokens(routes: APIRouter, state: ServerState) -> None:
    errors = error_responses(400, 401, 404, 413, 503)

    @routes.post(
        "/tokenize", tags=["tokens"], operation_id="tokenize", summary="Token ids of a text or conversation",
        responses=errors, response_model=Tokens,
    )  # fmt: skip
    async def tokenize(body: TokenizeBody, http: Request) -> Response:
        state.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("either prompt or messages must be given, and not both", "prompt")
        if body.messages is not None:
            prompt = chat_prompt(body, state.settings)
            ids = await encode_chat(
                state.tokenizer, body.messages, tool_format(state), body.tools or [], prompt, state.template_threads
            )  # fmt: skip
        else:
            special = body.add_special_tokens is not False
            (ids,) = await encode(state.tokenizer, [body.prompt or ""], state.info.vocab_size, special)
        tokenizer, most = state.tokenizer, state.info.max_sequence_tokens

        def answer() -> Response:
            strings = [token_text(tokenizer.spelled(token)) for token in ids] if body.return_token_strs else None
            found = Tokens(tokens=ids, count=len(ids), max_model_len=most, token_strs=strings)
            return _answer(found, warning_headers(body, http.query_params))

        return await run_sized(len(ids), answer)

    @routes.post(
        "/detokenize", tags=["tokens"], operation_id="detokenize", summary="Text of token ids", responses=errors,
        response_model=Text,
    )  # fmt: skip
    async def detokenize(body: DetokenizeBody, http: Request) -> Response:
        state.require_model(body.model)
        tokenizer, size = state.tokenizer, state.info.vocab_size

        def answer() -> Response:
            check_ids(body.tokens, size, "tokens")
            return _answer(Text(prompt=tokenizer.decode(body.tokens)), warning_headers(body, http.query_params))

        return await run_sized(len(body.tokens), answer)


def _answer(content: BaseModel, headers: Mapping[str, str]) -> Response:
    """Return a response with this body, serialised here: FastAPI would do it on the event loop."""
    return Response(content.model_dump_json(exclude_none=True), headers=headers, media_type="application/json")


def _add_operations(routes: APIRouter, state: ServerState) -> None:
    @routes.get(
        "/health", tags=["operations"], operation_id="health", summary="Is the process worth keeping? Needs no key",
        responses={503: {"model": Health, "description": "The engine ended for good, or stalls."}},
    )  # fmt: skip
    async def health(response: Response) -> Health:
        found = state.health()
        response.status_code = 503 if found.status in ("dead", "stalled") else 200
        return found

    @routes.get(
        "/ready", tags=["operations"], operation_id="ready", summary="Should requests be sent here now?",
        responses=error_responses(401)
        | {503: {"model": Health, "description": "Starting, starting again, draining, stalled, or dead."}},
    )  # fmt: skip
    async def ready(response: Response) -> Health:
        found = state.health()
        if found.status != "ok":
            response.status_code = 503
            wait_s = state.client.stats().back_in_s
            response.headers["retry-after"] = retry_after(RETRY_AFTER_S if wait_s is None else wait_s)
        return found

    @routes.get(
        "/ping", tags=["operations"], operation_id="ping", summary="Probe of hosting services. Needs no key",
        response_class=Response, responses={503: {"description": "Starting, or the engine ended for good, or stalls."}},
    )  # fmt: skip
    async def ping() -> Response:
        unfit = state.health().status in ("starting", "stalled", "dead")
        return Response(status_code=503 if unfit else 200)

    @routes.get(
        "/metrics", tags=["operations"], operation_id="metrics", summary="Prometheus metrics", response_class=Response,
        responses=error_responses(401, 403) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get(
        "/version", tags=["operations"], operation_id="version", summary="Versions and what is served",
        responses=error_responses(401),
    )  # fmt: skip
    async def version() -> Version:
        try:
            engine = asdict(state.info)
        except EngineDeadError:
            engine = None
        return Version(version=adaserve_jax.__version__, engine=engine)
