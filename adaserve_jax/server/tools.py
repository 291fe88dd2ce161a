"""Turn a chat request's tools, tool_choice and parallel_tool_calls into what the engine holds the answer to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adaserve_jax.constraints.tool_formats import FORMATS, ToolFormat, detect
from adaserve_jax.sampling import ToolCalls
from adaserve_jax.server.constraint_fields import constraints_of, json_text
from adaserve_jax.server.errors import invalid
from adaserve_jax.server.schema import ChatBody, Tool, ToolChoice
from adaserve_jax.server.state import ServerState
from adaserve_jax.types import SamplingParams

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
"""Keywords beside which `properties` are not all that arguments may have."""


def tool_format(state: ServerState) -> ToolFormat:
    """Return the format of `tool_call_parser`, or that of the model's chat template."""
    chosen = FORMATS.get(state.settings.tool_call_parser)
    return detect(state.tokenizer.chat_template) if chosen is None else chosen


def offered_tools(body: ChatBody) -> list[Tool]:
    """Return the tools that the model is told of: none where it must not call. Raises ApiError."""
    choice, tools = body.tool_choice, body.tools or []
    names = [tool.function.name for tool in tools]
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("tool_choice must be none, auto or left out unless there are tools; give some", "tool_choice")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        shown = ", ".join(names)[:200]
        raise invalid(
            f"tool_choice must name one of the tools {shown}, got {choice.function.name!r:.80}", "tool_choice"
        )
    return [] if choice == "none" else tools


def with_tool_calls(sampling: SamplingParams, body: ChatBody, form: ToolFormat) -> SamplingParams:
    """Return sampling parameters with the calls that an answer may have. Raises RequestError and ApiError."""
    choice, tools = body.tool_choice, offered_tools(body)
    if not tools:
        return sampling
    kind = "json_schema" if sampling.grammar_source is None else sampling.grammar_source[1]
    if kind != "json_schema":
        name = constraints_of(body, None)[1][kind]
        why = "an answer may call one, or be JSON of a schema"
        raise invalid(f"{name} must be left out where tools are given, or tool_choice be none: {why}", name)
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    calls = ToolCalls(
        form.name,
        tuple((tool.function.name, _schema(tool, place)) for place, tool in enumerate(tools)),
        required=choice not in (None, "auto"),
        parallel=body.parallel_tool_calls is not False and named is None,
        answer=sampling.json_schema,
        lenient=tuple(tool.function.name for tool in tools if tool.function.strict is not True),
    )
    if named is not None:
        calls = replace(calls, tools=tuple(one for one in calls.tools if one[0] == named))
    return replace(sampling, json_schema=None, tool_calls=calls)


def _schema(tool: Tool, place: int) -> str:
    """Return the JSON schema of a tool's arguments. Raises ApiError.

    Arguments that the tool does not declare would fail in its function, so there are none unless it says otherwise.
    """
    schema = tool.function.parameters
    if schema is None:
        schema = NO_ARGUMENTS
    where = f"tools[{place}].function.parameters"
    if schema.get("type", "object") != "object":
        raise invalid(f"{where} must describe an object, got one of type {str(schema['type'])[:40]!r}", "tools")
    schema = {"type": "object", **schema}
    if "properties" in schema and not _OPEN & schema.keys():
        schema["additionalProperties"] = False
    return json_text(where, schema)
