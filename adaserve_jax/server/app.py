"""The FastAPI application over an engine client: routes, error shapes, layers, one complete OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

import adaserve_jax
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.server import dashboard, docs_page, errors, routes_generate, routes_info
from adaserve_jax.server.dashboard_auth import BasicAtDashboard
from adaserve_jax.server.live import Live
from adaserve_jax.server.methods import Methods
from adaserve_jax.server.middleware import OPEN_ROUTES, ApiKeys, BodyLimit, Boundary, HeadLimit
from adaserve_jax.server.responses import ChatChunk
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec

_TITLE = "adaserve_jax"
_ABOUT = (
    "OpenAI-compatible text generation in which every request carries its own speed target: "
    "`slo_tpot_ms` milliseconds per output token, `slo_ttft_ms` milliseconds to the first."
)


def create_app(client: EngineClient, tokenizer: TextCodec | None, settings: ServerSettings) -> FastAPI:
    """Serve `client`, which the caller starts and closes.

    tokenizer: None while the engine still starts; call `app.state.server.become_ready(tokenizer)` once it has.
    """
    state = ServerState(client, settings)
    if tokenizer is not None:
        state.become_ready(tokenizer)
    live = Live(state) if settings.dashboard else None
    app = FastAPI(
        title=_TITLE, version=adaserve_jax.__version__, description=_ABOUT,
        redirect_slashes=False,  # a redirect has no error body, and clients drop the request's
        docs_url=None, redoc_url=None,  # those pages load scripts from elsewhere
        lifespan=None if live is None else live.lifespan,
    )  # fmt: skip
    app.state.server = state
    app.include_router(routes_generate.router(state))
    app.include_router(routes_info.router(state))
    app.include_router(docs_page.router(app))
    if live is not None:
        state.observers.append(live.ended)
        app.include_router(dashboard.router(live))
    errors.install(app)
    app.add_middleware(Methods)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if state.keyring:
        app.add_middleware(ApiKeys, keyring=state.keyring, metrics=state.metrics)
        if live is not None:
            app.add_middleware(BasicAtDashboard, path=dashboard.PATH)
    if settings.cors_origins:  # outside of the keys: a browser asks for leave without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-adaserve-warning", "retry-after"),
        )
    app.add_middleware(HeadLimit, max_bytes=settings.max_header_bytes)
    app.add_middleware(Boundary)  # added last: outermost
    app.openapi = lambda: _document(app, keyed=bool(state.keyring))
    return app


def _document(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document, built once: FastAPI's, with the stream's event type and the key's scheme."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema["components"]
        event = ChatChunk.model_json_schema(ref_template="#/components/schemas/{model}")
        components["schemas"] |= event.pop("$defs") | {"ChatChunk": event}
        if keyed:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
            for path in OPEN_ROUTES:
                schema["paths"][path]["get"]["security"] = []
        app.openapi_schema = schema
    return app.openapi_schema
