"""Writes docs/http-fields.md from the bodies' own models: `python -m adaserve_jax.cli.http_reference`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from adaserve_jax.server import schema

HEAD = """# HTTP fields

Made by `python -m adaserve_jax.cli.http_reference`; a test fails when it differs from the code.

Every field of every body, as `/openapi.json` has it. What the routes do, and what fields mean together, is in
[http.md](http.md). A field with a default may be left out. Types are strict; `null` in a request means the default.
"""
ABOUT = {
    "Requests": "Fields that no model here knows are ignored, and named in the header `x-adaserve-warning`.",
    "Responses and events of streams": "Completions are streamed as `Completion`, chats as `ChatChunk`, each as one "
    "event `data: {...}`; the last event is `data: [DONE]`.",
}
HIDDEN = (schema.RequestModel, schema.Body, schema.GenerationBody, schema.ResponseModel)
"""Base classes, which no route takes or returns."""


def render() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for (title, about), base in zip(ABOUT.items(), (schema.RequestModel, schema.ResponseModel), strict=True):
        parts += [f"## {title}", "", about, ""]
        for model in models_of(base):
            parts += _model(model)
    return "\n".join(parts)


def models_of(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the subclasses of `base` in the order of their module."""
    for value in vars(schema).values():
        if isinstance(value, type) and issubclass(value, base) and value not in HIDDEN:
            yield value


def fields_of(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """JSON Schema of each field, by the name that it has in JSON."""
    return model.model_json_schema().get("properties", {})


def _model(model: type[BaseModel]) -> list[str]:
    required = set(model.model_json_schema().get("required", ()))
    about = [model.__doc__, ""] if "__doc__" in vars(model) and model.__doc__ else []
    rows = [
        f"| `{name}` | {type_words(schema)} | {'required' if name in required else _default(schema)} | "
        f"{_cell(schema.get('description', ''))} |"
        for name, schema in fields_of(model).items()
    ]
    return [f"### {model.__name__}", "", *about, "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def type_words(schema: dict[str, Any]) -> str:
    """What JSON a field takes or has: a text, a list of integers, one of some texts, another model's object."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _any_of(type_words(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        return _any_of(f"`{_shown(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_words(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    return f"object of {type_words(values)}" if kind == "object" and isinstance(values, dict) else str(kind)


def _any_of(words: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def _default(schema: dict[str, Any]) -> str:
    return f"`{_shown(schema.get('default'))}`"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(render(), end="")
