"""The page at /docs: the OpenAPI document as plain HTML, made here. No script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response

PATH = "/docs"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}code{background:#f2f2f2;padding:0 .2em}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid #ddd}"
    "h2{margin-top:2.5rem}@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}code{background:#2a2a2a}"
    "td,th{border-color:#444}a{color:#8ab4f8}}"
)


def router(app: FastAPI) -> APIRouter:
    routes = APIRouter()

    @routes.get(PATH, include_in_schema=False)
    async def docs() -> Response:
        page = "".join(render(app.openapi()))
        return Response(page, media_type="text/html", headers={"content-security-policy": POLICY})

    return routes


def render(document: dict[str, Any]) -> Iterator[str]:
    """The parts of the page: each operation with what it takes and returns."""
    title = escape(document["info"]["title"])
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title} {escape(document['info']['version'])}</h1><p>{_prose(document['info']['description'])}</p>"
    yield "<p>The same for programs: <a href=openapi.json>openapi.json</a></p>"
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_prose(operation['summary'])}</p>"
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                yield _fields(schemas[body["schema"]["$ref"].rpartition("/")[2]])
            yield _table(("status", "answer"), [(s, r["description"]) for s, r in operation["responses"].items()])


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{name}`" + (" (required)" if name in required else ""), _type(field), field.get("description", ""))
        for name, field in schema["properties"].items()
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
    """Escaped text, with `code` marked up."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
