"""Tools by the official client, on the embedded pair: calls that fit their schemas, streamed and whole, in every
format, the same text under every policy, and conversations that go on with results."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from typing import Any

import pytest

from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.server.chat_client import streamed
from tests.server.conftest import Running

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")

CITIES = ["Rome", "Oslo", 'the "old" {town}\\']
WEATHER = {"type": "object", "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "maximum": 9}}}
SAY = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2, "maxLength": 12}}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [
    tool("get_weather", description="Of a city", parameters={**WEATHER, "required": ["city"]}, strict=True),
    tool("say", parameters={**SAY, "required": ["text"]}),
    tool("now"),
]
ASKED = [{"role": "user", "content": "How is the weather?"}]
FIXED = {"model": "demo", "messages": ASKED, "tools": TOOLS, "max_tokens": 160, "temperature": 0.9}
POLICIES = ("ar", "adaserve")


QUICK = ("hermes", "glm45")
"""Calls as JSON, and as marks around names and values."""


@pytest.fixture(
    scope="module", params=[each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FORMATS]
)
def served(request: pytest.FixtureRequest, demo_engine, serve_engine) -> Iterator[Running]:
    settings = ServerSettings(tool_call_parser=request.param)
    with serve_engine(demo_engine, load_tokenizer("demo"), settings) as server:
        yield server


@pytest.fixture(scope="module")
def demo(demo_engine, serve_engine) -> Iterator[Running]:
    with serve_engine(demo_engine, load_tokenizer("demo"), ServerSettings()) as server:
        yield server


def check_call(call: Any) -> tuple[str, dict[str, Any]]:
    """Check a call of TOOLS; return its name and arguments."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments["city"] in CITIES and arguments.keys() <= {"city", "days"} and arguments.get("days", 0) <= 9
    elif call.function.name == "say":
        assert arguments.keys() == {"text"} and 2 <= len(arguments["text"]) <= 12
    else:
        assert (call.function.name, arguments) == ("now", {})
    return call.function.name, arguments


def test_required_calls_streamed_and_whole_under_every_policy(served: Running, demo_engine):
    """The same seed gives the same calls, whichever draft tokens were proposed and accepted."""
    form, accepted = FORMATS[served.state.settings.tool_call_parser], 0
    with served.openai_client() as client:
        found = []
        for policy in POLICIES:
            demo_engine.set_policy(policy)
            one = {**FIXED, "seed": 2, "tool_choice": "required", "parallel_tool_calls": False}
            made = client.chat.completions.create(**one)
            (choice,) = made.choices
            accepted += made.metrics["speculative"]["accepted_tokens"]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls
            assert len(call.id) == (form.id_chars or len("call_") + 24)
            content, calls, reason = streamed(client, **one)
            assert (content, reason) == ("", "tool_calls")
            assert [each[1:] for each in calls.values()] == [(call.function.name, call.function.arguments)]
            found.append((check_call(call), call.function.arguments))
        assert found == found[:1] * len(POLICIES)
    demo_engine.set_policy("adaserve")
    assert accepted > 0


def test_a_named_tool_is_called_and_no_other(served: Running):
    with served.openai_client() as client:
        chosen = {"type": "function", "function": {"name": "say"}}
        made = client.chat.completions.create(**FIXED, seed=5, n=2, tool_choice=chosen, logprobs=True)
    for choice in made.choices:
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and check_call(call)[0] == "say"
        one_by_one, written = FORMATS[served.state.settings.tool_call_parser].arguments, call.function.arguments
        if one_by_one is not None:
            written = one_by_one.write(written)
        assert written in "".join(one.token for one in choice.logprobs.content)


def bias_for(text: str) -> dict[str, float]:
    """Biases with which the model writes this text next, whatever it wanted."""
    (token,) = set(load_tokenizer("demo").spell(text))
    return {str(token): 100.0}


def test_the_model_may_call_several_in_parallel(demo: Running):
    """A bias on the line break behind each call makes the model go on; max_tokens ends it inside one."""
    with demo.openai_client() as client:
        fields = {**FIXED, "seed": 3, "tool_choice": "required", "max_tokens": 120, "logit_bias": bias_for("\n")}
        (choice,) = client.chat.completions.create(**fields).choices
        _, calls, reason = streamed(client, **fields)
    assert choice.finish_reason == reason == "length" and len(calls) > 1
    assert [check_call(call) for call in choice.message.tool_calls[:-1]]
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        one[1:] for one in calls.values()
    ]
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)


def test_a_text_that_calls_nothing_is_the_text_without_a_grammar(demo: Running):
    with demo.openai_client() as client:
        free = client.chat.completions.create(**{**FIXED, "seed": 9, "max_tokens": 60}).choices[0]
        told = client.chat.completions.create(**{**FIXED, "seed": 9, "max_tokens": 60}, tool_choice="auto").choices[0]
        prompt = client.post("/../tokenize", body={"messages": ASKED, "tools": TOOLS}, cast_to=object)
        plain = client.completions.create(
            model="demo", prompt=prompt["tokens"], max_tokens=60, temperature=0.9, seed=9
        ).choices[0]
    assert free.message.content == told.message.content == plain.text and free.message.tool_calls is None
    assert free.finish_reason == plain.finish_reason == "length"


def test_a_conversation_goes_on_with_the_results(demo: Running):
    with demo.openai_client() as client:
        one = {**FIXED, "seed": 4, "tool_choice": "required", "parallel_tool_calls": False}
        message = client.chat.completions.create(**one).choices[0].message
        (call,) = message.tool_calls
        turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        made = client.chat.completions.create(**{**FIXED, "messages": turns, "max_tokens": 24}, tool_choice="none")
        assert made.choices[0].message.content and made.choices[0].message.tool_calls is None
        sent = [{k: v for k, v in message.to_dict().items() if v is not None}]
        ids = demo.post("/tokenize", messages=[*ASKED, *sent, turns[-1]]).json()["tokens"]
    text = load_tokenizer("demo").decode(ids)
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    assert f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {arguments}}}\n</tool_call>' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_tools_are_told_to_a_model_whose_template_knows_none(demo: Running):
    decode = load_tokenizer("demo").decode
    alone = decode(demo.post("/tokenize", messages=ASKED, tools=TOOLS).json()["tokens"])
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    behind = decode(demo.post("/tokenize", messages=system, tools=TOOLS).json()["tokens"])
    assert '"name": "get_weather", "description": "Of a city"' in alone and "strict" not in alone
    assert alone.index("You can call these functions") < alone.index(ASKED[0]["content"])
    assert behind.startswith("Be brief.\n\nYou can call these functions")


def test_an_answer_is_calls_or_fits_its_response_format(demo: Running):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with demo.openai_client() as client:
        for seed in range(2):
            fields = {**FIXED, "seed": seed, "parallel_tool_calls": False}
            (choice,) = client.chat.completions.create(**fields, response_format=wanted).choices
            if choice.message.tool_calls:
                assert [check_call(call) for call in choice.message.tool_calls]
            else:
                assert json.loads(choice.message.content)["ok"] in (True, False)
            fields["tool_choice"] = "required"
            (choice,) = client.chat.completions.create(**fields, response_format=wanted).choices
            assert choice.message.tool_calls


ODD = {"type": "object", "properties": {
    "file": {"type": "string", "format": "path", "maxLength": 9},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
}, "required": ["file", "tags"]}  # fmt: skip


def test_a_tool_that_is_not_strict_is_held_to_what_can_be_enforced(demo: Running):
    fields = {"messages": ASKED, "max_tokens": 80, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    answer = demo.post("/v1/chat/completions", tools=[tool("odd", parameters=ODD)], **fields).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"file", "tags"} and len(arguments["file"]) <= 9
    assert set(arguments["tags"]) <= {"a", "b"} and len(arguments["tags"]) <= 2
    strict = [tool("odd", parameters=ODD, strict=True)]
    error = demo.post("/v1/chat/completions", tools=strict, **fields).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_schema", "tools") and "odd: " in error["message"]


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "", "[" * 5000])
def test_a_conversation_goes_on_behind_a_call_that_was_cut(demo: Running, arguments: str):
    """The model is shown the call without arguments."""

    def tokens(text: str) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": text}}
        spoken = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": "no city"}
        return demo.post("/tokenize", messages=[*ASKED, spoken, result], tools=TOOLS).json()["tokens"]

    assert tokens(arguments) == tokens("{}") != tokens('{"city": "Rome"}')


ARRAY = [tool("f", parameters={"type": "array"})]
CALLED = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
REFUSED = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "tool_choice must be none, auto or left out unless"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "tool_choice must name one of the tools get_weather, say, now, got 'f'",
    ),
    ({"tool_choice": "any"}, "tool_choice", "tool_choice must be"),
    ({"tools": ARRAY}, "tools", "tools[0].function.parameters must describe an object, got one of type 'array'"),
    ({"tools": [tool("a b")]}, "tools", "tools must be named by 1 to 64 of A-Za-z0-9_.-"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": CALLED}]},
        "messages",
        "messages[0].tool_calls must be left out unless the role is assistant, got user",
    ),
    (
        {"messages": [{"role": "tool", "tool_call_id": "1"}]},
        "messages",
        "messages[0].content must be given unless the role is assistant, got null",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_refused(demo: Running, fields: dict[str, Any], param: str, message: str):
    answer = demo.post("/v1/chat/completions", **{**FIXED, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message), error
    assert error["param"] == param


def test_the_example_runs_a_conversation(demo: Running, monkeypatch: pytest.MonkeyPatch, capsys):
    script = str(ROOT / "examples" / "tool_client.py")
    monkeypatch.setattr("sys.argv", [script, "--base-url", f"{demo.url}/v1"])
    runpy.run_path(script, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("call of get_weather: {") and lines[1].startswith(("result: sunny", "result: snow"))
    assert len("".join(lines[2:])) > 10
