"""FastAPI application over an engine client: routes, error handlers, middleware, OpenAPI document and its page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

import adaserve_jax
from adaserve_jax.engine.client import EngineClient
from adaserve_jax.server import errors, routes_adapters, routes_generate, routes_info, start_page
from adaserve_jax.server.dashboard import routes as dashboard
from adaserve_jax.server.dashboard.live import DashboardMonitor
from adaserve_jax.server.dashboard.routes import BasicAuthMiddleware
from adaserve_jax.server.middleware import (
    OPEN_ROUTES,
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    HeaderLimitMiddleware,
    MethodsMiddleware,
    RequestBoundaryMiddleware,
)
from adaserve_jax.server.responses_schema import ResponseEvent, ResponsesBody
from adaserve_jax.server.schema import ChatBody, ChatChunk, CompletionBody
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.server.state import ServerState, TextCodec

_TITLE = "adaserve_jax"
_ABOUT = (
    "OpenAI-compatible text generation in which every request carries its own speed target: "
    "`slo_tpot_ms` milliseconds per output token, `slo_ttft_ms` milliseconds to the first."
)
DOCS_PATH = "/docs"
DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}code{background:#f2f2f2;padding:0 .2em}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid #ddd}"
    "h2{margin-top:2.5rem}@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}code{background:#2a2a2a}"
    "td,th{border-color:#444}a{color:#8ab4f8}}"
    "@media(max-width:44rem){tr{display:block;padding:.4rem 0;border-bottom:1px solid #8886}tr:has(th){display:none}"
    "td{display:inline-block;border:0;padding:0 .6rem 0 0}td:last-child{display:block}*{overflow-wrap:anywhere}}"
)
_FIRST_FIELDS = (
    "model", "messages", "prompt", "input", "max_tokens", "temperature", "stream", "seed", "slo_tpot_ms", "slo_ttft_ms",
    "slo_e2e_ms", "slo_relative", "slo_class",
)  # fmt: skip
"""Fields that most requests have, in the order of the page; those that are required come before them."""


def create_app(client: EngineClient, tokenizer: TextCodec | None, settings: ServerSettings) -> FastAPI:
    """Return the application that serves `client`, which the caller starts and closes.

    tokenizer: None while the engine still starts; then call `app.state.server.become_ready(tokenizer)` once it has.
    """
    state = ServerState(client, settings)
    if tokenizer is not None:
        state.become_ready(tokenizer)
    monitor = DashboardMonitor(state) if settings.dashboard else None
    app = FastAPI(
        title=_TITLE, version=adaserve_jax.__version__, description=_ABOUT,
        redirect_slashes=False,  # a redirect has no error body, and clients do not repeat the request body
        docs_url=None, redoc_url=None,  # those pages load scripts from elsewhere
        lifespan=None if monitor is None else monitor.lifespan,
    )  # fmt: skip
    app.state.server = state
    app.include_router(routes_generate.router(state))
    app.include_router(routes_info.router(state))
    app.include_router(routes_adapters.router(state))
    app.include_router(docs_router(app))
    app.include_router(start_page.router(settings, keyed=bool(state.keyring)))
    if monitor is not None:
        state.observers.append(monitor.observe)
        app.include_router(dashboard.router(monitor))
    else:
        app.include_router(dashboard.no_dashboard())
    errors.add_handlers(app)
    app.add_middleware(MethodsMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    if state.keyring:
        app.add_middleware(ApiKeyMiddleware, keyring=state.keyring, metrics=state.metrics)
        if monitor is not None:
            app.add_middleware(BasicAuthMiddleware, path=dashboard.PATH)
    app.add_middleware(HeaderLimitMiddleware, max_bytes=settings.max_header_bytes)
    app.add_middleware(RequestBoundaryMiddleware)
    if settings.cors_origins:  # outermost, so that a browser may read every answer, also a 431 and a 500
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-adaserve-warning", "retry-after"),
        )
    app.openapi = lambda: _document(app, keyed=bool(state.keyring))
    return app


def _document(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document, built once, with the stream's event type and the API key's scheme."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema["components"]
        # FastAPI leaves out what only events hold, and writes integer bounds as floats, which rounds the largest.
        for model in (CompletionBody, ChatBody, ChatChunk, ResponsesBody, ResponseEvent):
            found = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components["schemas"] |= found.pop("$defs") | {model.__name__: found}
        if keyed:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
            for path in schema["paths"].keys() & set(OPEN_ROUTES):
                schema["paths"][path]["get"]["security"] = []
        app.openapi_schema = schema
    return app.openapi_schema


def docs_router(app: FastAPI) -> APIRouter:
    """Return the route of /docs: the OpenAPI document as plain HTML, without scripts and without foreign files."""
    routes = APIRouter()

    @routes.get(DOCS_PATH, include_in_schema=False)
    async def docs() -> Response:
        page = "".join(render_docs(app.openapi()))
        return Response(page, media_type="text/html", headers={"content-security-policy": DOCS_POLICY})

    return routes


def render_docs(document: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the page: each operation with its fields and answers."""
    title = escape(document["info"]["title"])
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{_DOCS_STYLE}</style>"
    yield f"<h1>{title} {escape(document['info']['version'])}</h1><p>{_prose(document['info']['description'])}</p>"
    yield "<p>The same for programs: <a href=openapi.json>openapi.json</a></p>"
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {escape(path)}"
            yield f"<div><a href='#{_anchor(method, path)}'>{name}</a>: {_prose(operation['summary'])}</div>"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2 id='{_anchor(method, path)}'><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{_prose(operation['summary'])}</p>"
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                yield _fields(schemas[body["schema"]["$ref"].rpartition("/")[2]])
            yield _table(("status", "answer"), [(s, r["description"]) for s, r in operation["responses"].items()])


def _anchor(method: str, path: str) -> str:
    """Return an operation's name in links."""
    return f"{method}{re.sub(r'[^a-z0-9]+', '-', path)}".rstrip("-")


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))

    def place(item: tuple[str, Any]) -> tuple[bool, int]:
        name = item[0]
        return name not in required, _FIRST_FIELDS.index(name) if name in _FIRST_FIELDS else len(_FIRST_FIELDS)

    rows = [
        (f"`{name}`" + (" (required)" if name in required else ""), _type(field), field.get("description", ""))
        for name, field in sorted(schema["properties"].items(), key=place)
    ]
    return _table(("field", "type", "meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    alternatives = [_type(one) for one in schema.get("anyOf", ())]
    if alternatives:
        return " or ".join(one for one in alternatives if one != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    return schema.get("type", "any")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{_prose(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{cells}</table>"


def _prose(text: str) -> str:
    """Return escaped text, with `code` marked up."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
