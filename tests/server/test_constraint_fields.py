"""Every way to ask for a form of the output reaches the engine as one; two at once are refused by name."""

from __future__ import annotations

import json
import random

import pytest

from adaserve_jax.types import SamplingParams

PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
SCHEMA = {"type": "object", "properties": {"ü": {"type": "null"}}}
AS_TEXT = '{"type":"object","properties":{"ü":{"type":"null"}}}'
GRAMMAR = 'root ::= "a"'
SERVED = [
    ({"guided_json": SCHEMA}, {"json_schema": AS_TEXT}),
    ({"guided_json": AS_TEXT}, {"json_schema": AS_TEXT}),
    ({"json_schema": AS_TEXT}, {"json_schema": AS_TEXT}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": AS_TEXT}),
    ({"structured_outputs": {"json": AS_TEXT}}, {"json_schema": AS_TEXT}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"structured_outputs": {"regex": "a+", "json_object": False}}, {"regex": "a+"}),
    ({"guided_choice": ["a", "ü"]}, {"choice": ("a", "ü")}),
    ({"structured_outputs": {"choice": ["a", ""]}}, {"choice": ("a", "")}),
    ({"guided_grammar": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"ebnf": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"structured_outputs": {"grammar": GRAMMAR, "disable_any_whitespace": False}}, {"grammar": GRAMMAR}),
    ({"allowed_token_ids": [5, 3, 5]}, {"allowed_token_ids": (5, 3, 5)}),
    ({"allowed_token_ids": [5], "regex": "a"}, {"allowed_token_ids": (5,), "regex": "a"}),
    ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a"}),
    ({"response_format": {"type": "json_object", "schema": {"items": {}}}}, {"json_schema": '{"items":{}}'}),
    ({"guided_json": None, "structured_outputs": None, "allowed_token_ids": None}, {}),
]
REFUSED = [
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "response_format.schema must be left out"),
    ({"regex": "a", "ebnf": "b"}, "ebnf", "ebnf must be left out where regex is given: an output has one form"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "where response_format is given"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs",
     "structured_outputs.choice must be left out where structured_outputs.regex is given"),
    ({"structured_outputs": {}}, "structured_outputs",
     "structured_outputs must have one of json, json_object, regex, choice and grammar"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " *"}}, "structured_outputs",
     "structured_outputs.whitespace_pattern is not implemented: only null is accepted; JSON has at most one space"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not implemented"),
    ({"guided_choice": []}, "guided_choice", "guided_choice must hold a text at least"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice",
     "guided_choice must be at most 1024 texts of at most 65536 characters together"),
    ({"guided_choice": ["a" * 70_000]}, "guided_choice", "at most 65536 characters together"),
    ({"guided_choice": "a"}, "guided_choice", "valid list"),
    ({"guided_regex": ""}, "guided_regex", "guided_regex must be valid Unicode of 1 to 16384 characters, got '0 char"),
    ({"ebnf": "a" * 16_385}, "ebnf", "ebnf must be valid Unicode of 1 to 16384 characters, got '16385 characters'"),
    ({"regex": 5}, "regex", "valid string"),
    ({"guided_json": 5}, "guided_json", "got 5"),
    ({"guided_json": ""}, "guided_json", "guided_json must be JSON of 1 to 65536 characters"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must have a token id at least, or be left out"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "at most 65536 token ids from 0 to 2147483647, got [-1]"),
    ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids", "must have at most 65536 members, got 65537"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), SERVED, ids=lambda value: json.dumps(value)[:50])
@pytest.mark.parametrize("path", PATHS)
def test_a_form_reaches_the_engine(server, path, fields, expected):
    answer = server.post(path, **PATHS[path], **fields)
    assert answer.status_code == 200 and "x-adaserve-warning" not in answer.headers
    assert server.engine.submitted[-1].sampling == SamplingParams(max_tokens=9, **expected)


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("path", PATHS)
def test_a_form_that_is_none_is_refused(server, path, fields, param, text):
    before = len(server.engine.submitted)
    refused = server.post(path, **PATHS[path], **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert text in error["message"]
    assert len(server.engine.submitted) == before


NAMES = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex",
    "ebnf", "allowed_token_ids", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "chat_template",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 7, 10**30, 1.5, "", "a", "left", "(", "\x00", "é" * 20_000, [], [0], [-1], ["a"], [None],
    [[]], {}, {"json": {}}, {"json": "{}", "regex": "a"}, {"choice": ["a"]}, {"json_object": True}, {"tokenize": 1},
    {"a": {"b": []}}, [{"title": "a"}], [{}],
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_any_value_of_any_field_is_served_or_refused_by_name(server, path):
    rng = random.Random(path)
    answers = []
    for _ in range(200):
        fields = {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
        answer = server.post(path, **PATHS[path], **fields)
        assert answer.status_code in (200, 400), (fields, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["param"] in {*fields, "prompt", "messages"}, (fields, error)
        answers.append(answer.status_code)
    assert {200, 400} == set(answers)


TOOLS = [{"type": "function", "function": {"name": "now"}}]
WITH_TOOLS = [
    ({"guided_regex": "a+"}, "guided_regex", {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", {"choice": ("a",)}),
    ({"ebnf": GRAMMAR}, "ebnf", {"grammar": GRAMMAR}),
]


@pytest.mark.parametrize(("fields", "name", "expected"), WITH_TOOLS, ids=[name for _, name, _ in WITH_TOOLS])
def test_a_text_that_may_call_tools_has_no_form_but_json(server, fields, name, expected):
    path = "/v1/chat/completions"
    refused = server.post(path, **PATHS[path], **fields, tools=TOOLS)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name} must be left out where tools are given, or tool_choice be none: ")
    assert server.post(path, **PATHS[path], **fields, tools=TOOLS, tool_choice="none").status_code == 200
    assert server.engine.submitted[-1].sampling == SamplingParams(max_tokens=9, **expected)
    assert server.post(path, **PATHS[path], guided_json=SCHEMA, tools=TOOLS).status_code == 200
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.json_schema, sampling.tool_calls.answer) == (None, AS_TEXT)


@pytest.mark.parametrize("name", ["regex", "guided_regex", "ebnf", "json_schema", "guided_json"])
def test_half_of_a_surrogate_pair_is_named(server, name):
    raw = json.dumps({"prompt": "x", name: "\ud800"}).encode()
    error = server.http.post("/v1/completions", content=raw, headers={"content-type": "application/json"}).json()
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_text", name)
