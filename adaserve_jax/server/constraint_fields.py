"""Fields that ask for a text of a form: vLLM's guided_* and structured_outputs, SGLang's regex, ebnf and json_schema.

All of them, and response_format, become one of json_schema, regex, choice and grammar of `SamplingParams`.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from adaserve_jax.sampling import MAX_ALLOWED_IDS, MAX_CHOICE_TEXTS
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.request_model import Ids, RequestModel, Texts, ValidText, ignored, unsupported

ANY_OBJECT = '{"type": "object"}'


class StructuredOutputs(RequestModel):
    """vLLM's object; exactly one of json, json_object, regex, choice and grammar."""

    json_: dict[str, Any] | ValidText | None = Field(
        None, alias="json", description="A JSON Schema, as an object or as its text."
    )
    json_object: bool | None = Field(None, description="true: any JSON object.")
    regex: ValidText | None = Field(None, description="A regular expression that the whole output matches.")
    choice: Texts | None = Field(None, description="Texts, one of which is the output.")
    grammar: ValidText | None = Field(None, description="A grammar in Lark or EBNF that the output fits.")
    structural_tag: Any = unsupported("null", why="use response_format")
    whitespace_pattern: Any = unsupported("null", why="JSON has at most one space after a comma or colon")
    disable_any_whitespace: Any = unsupported("false", False, why="JSON may have a space after a comma or colon")
    disable_additional_properties: Any = unsupported("false", False, why="say additionalProperties in the schema")
    disable_fallback: Any = ignored("there is one backend")


class ConstraintFields(RequestModel):
    """At most one of these, response_format included, but for allowed_token_ids."""

    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form of the output: JSON, a regular expression, a choice or a grammar."
    )
    guided_json: dict[str, Any] | ValidText | None = Field(
        None, description="A JSON Schema that the output fits, as an object or as its text."
    )
    guided_regex: ValidText | None = Field(None, description="Like regex.")
    guided_choice: Texts | None = Field(
        None, description=f"Up to {MAX_CHOICE_TEXTS} texts, one of which is the output."
    )
    guided_grammar: ValidText | None = Field(None, description="A grammar in Lark or EBNF that the output fits.")
    json_schema: ValidText | None = Field(None, description="The text of a JSON Schema that the output fits.")
    regex: ValidText | None = Field(None, description="A regular expression that the whole output matches.")
    ebnf: ValidText | None = Field(None, description="Like guided_grammar.")
    allowed_token_ids: Ids | None = Field(
        None, description=f"1 to {MAX_ALLOWED_IDS} token ids; no other token is drawn, end-of-text included."
    )


_FORM_FIELDS = tuple(name for name in ConstraintFields.model_fields if name != "allowed_token_ids")


def constraints_of(body: ConstraintFields, response_schema: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of SamplingParams that these ask for, and the names that they have in the body.

    response_schema: the one of response_format.

    Raises ApiError: two fields ask for a form.
    """
    allowed = {} if body.allowed_token_ids is None else {"allowed_token_ids": body.allowed_token_ids}
    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids must have a token id at least, or be left out", "allowed_token_ids")
    asked: list[tuple[str, str, Any]] = [
        ("response_format", "json_schema", response_schema),
        ("guided_json", "json_schema", _schema_text("guided_json", body.guided_json)),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "grammar", body.ebnf),
        *_of_structured_outputs(body.structured_outputs),
    ]
    found = [(name, field, value) for name, field, value in asked if value is not None]
    if len(found) > 1:
        (one, _, _), (other, _, _), *_ = found
        raise invalid(f"{other} must be left out where {one} is given: an output has one form", other.split(".")[0])
    if found and found[0][2] == []:
        raise invalid(f"{found[0][0]} must hold a text at least", found[0][0].split(".")[0])
    names = {field: name.split(".")[0] for name, field, _ in found}
    return allowed | {field: value for _, field, value in found}, names


def form_name_of(body: ConstraintFields) -> str:
    """Return the body's own field that asks for a text of a form; "" if there is none but response_format."""
    return next((name for name in _FORM_FIELDS if getattr(body, name) is not None), "")


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[tuple[str, str, Any]]:
    if wanted is None:
        return []
    if (name := wanted.refused_field()) is not None:
        why = type(wanted).model_fields[name].description or ""
        text = f"structured_outputs.{name} is {why[:1].lower()}{why[1:]}"
        raise invalid(text, "structured_outputs", "unsupported_parameter")
    parts = [
        ("json", "json_schema", _schema_text("structured_outputs.json", wanted.json_)),
        ("json_object", "json_schema", ANY_OBJECT if wanted.json_object else None),
        ("regex", "regex", wanted.regex),
        ("choice", "choice", wanted.choice),
        ("grammar", "grammar", wanted.grammar),
    ]
    if all(value is None for _, _, value in parts):
        raise invalid(
            "structured_outputs must have one of json, json_object, regex, choice and grammar", "structured_outputs"
        )
    return [(f"structured_outputs.{name}", field, value) for name, field, value in parts]


def _schema_text(where: str, schema: dict[str, Any] | str | None) -> str | None:
    return json_text(where, schema) if isinstance(schema, dict) else schema


def json_text(where: str, schema: dict[str, Any]) -> str:
    """Return a schema as JSON. where: path of its field. Raises ApiError: it is not valid JSON."""
    param = where.split(".")[0].split("[")[0]
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        text.encode()
        return text
    except UnicodeEncodeError:
        raise invalid(f"{where} must be valid Unicode, got half of a surrogate pair", param, "invalid_text") from None
    except (ValueError, RecursionError):
        raise invalid(f"{where} must be JSON, not nested too deeply and without NaN or infinity", param) from None
