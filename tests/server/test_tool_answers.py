"""Answers that call tools, read back from their text: whole and in pieces of three bytes, in every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.server.settings import ServerSettings
from tests.server.chat_client import streamed
from tests.server.conftest import Running, running

SAID = {"type": "object", "properties": {"t": {"type": "string"}, "more": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": "say", "parameters": SAID}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = ['{"t": "} \\" {\\\\", "more": {"é": []}}', "{}"]
PARTS = {name: form.write([("say", ARGUMENTS[0]), ("now", ARGUMENTS[1])]) for name, form in FORMATS.items()}


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(ServerSettings(tool_call_parser=request.param)) as made:
        yield made


def ask(server: Running, text: str, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of an answer of this text, the same in a stream and as a whole."""
    one = {"model": "scripted", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **fields}
    with server.openai_client() as client:
        (choice,) = client.chat.completions.create(**one).choices
        content, pieces, reason = streamed(client, **one)
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert choice.message.content == (content if content or not calls else None)
    assert ([call[1:] for call in pieces.values()], reason) == (calls, choice.finish_reason)
    return content, calls, reason


def test_calls_are_read_from_the_text(server: Running):
    text = PARTS[server.state.settings.tool_call_parser]
    assert ask(server, text) == ("", [("say", ARGUMENTS[0]), ("now", ARGUMENTS[1])], "tool_calls")


def test_text_before_calls_is_content(server: Running):
    form = FORMATS[server.state.settings.tool_call_parser]
    before = f"Wait: {form.mark[:-1]} é "
    content, calls, reason = ask(server, before + PARTS[form.name])
    assert (content, [name for name, _ in calls], reason) == (before, ["say", "now"], "tool_calls")


@pytest.mark.parametrize("text", ["No call é.", "An end like <tool_ca", "[TOOL_C", "{", '{"name": "sa'])
def test_text_without_a_call_is_content(server: Running, text: str):
    bare = FORMATS[server.state.settings.tool_call_parser].bare
    content, calls, reason = ask(server, text)
    assert (calls, reason) == ([], "stop")
    assert content == ("" if bare and text[0] == "{" else text)


def test_a_mark_that_no_call_follows_is_content(server: Running):
    """As after ids without a token, which a model may draw and no grammar reads."""
    text = f"see {FORMATS[server.state.settings.tool_call_parser].mark}?? end"
    if not FORMATS[server.state.settings.tool_call_parser].bare_opening:
        pytest.skip("any text behind this mark may be a name")
    assert ask(server, text) == (text, [], "stop")


def test_a_call_of_a_tool_that_was_not_offered_is_content(server: Running):
    """No grammar holds what follows a mark that the model spells where only its token begins a call."""
    form = FORMATS[server.state.settings.tool_call_parser]
    text = f"{form.mark}{form.bare_opening}sayings{form.between}"
    assert ask(server, text) == (text, [], "stop")
    content, calls, reason = ask(server, f"{text} then {PARTS[form.name]}")
    assert (content, [name for name, _ in calls], reason) == (f"{text} then ", ["say", "now"], "tool_calls")


def test_a_text_that_is_cut_keeps_the_arguments_so_far(server: Running):
    text = PARTS[server.state.settings.tool_call_parser]
    most = len(text[: text.index("more")].encode()) - 3
    content, calls, reason = ask(server, text, max_tokens=most)
    assert (content, reason, len(calls)) == ("", "length", 1)
    assert calls[0][0] == "say" and len(calls[0][1]) > 3 and ARGUMENTS[0].startswith(calls[0][1])


def test_a_space_may_stand_behind_the_mark_of_mistral(server: Running):
    name = server.state.settings.tool_call_parser
    if FORMATS[name].spaced:
        text = PARTS[name].replace("[TOOL_CALLS]", "[TOOL_CALLS] ")
        assert [json.loads(arguments) for _, arguments in ask(server, text)[1]] == [json.loads(x) for x in ARGUMENTS]
