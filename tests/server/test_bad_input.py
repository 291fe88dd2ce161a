"""Every way to ask wrongly gets one clear error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json

import pytest

from adaserve_jax.server.errors import CODES

MESSAGES = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check(response, status: int, code: str, param: str | None, text: str = "") -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert text in error["message"]
    assert len(error["message"]) < 1100
    assert CODES[code].startswith(f"{status}:")
    assert response.headers["x-request-id"]


@pytest.fixture(autouse=True)
def goes_on(server):
    """Whatever a test did, the next request is served and no room is lost."""
    yield
    assert server.post(prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    assert server.state.slots.used == 0


@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "text"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model", "'gpt-9' is not served here; this server has 'scripted'"),
        ({"prompt": ""}, 400, "empty_prompt", "prompt", "prompt must not be empty"),
        ({"prompt": []}, 400, "empty_prompt", "prompt", "empty list"),
        ({"prompt": ["a", ""]}, 400, "empty_prompt", "prompt", "prompt[1] must not be empty"),
        ({"prompt": [[]]}, 400, "empty_prompt", "prompt", "prompt[0] must not be empty"),
        ({"prompt": None}, 400, "invalid_value", "prompt", "prompt must be a valid string or"),
        ({"prompt": 5}, 400, "invalid_value", "prompt", "got 5"),
        ({"prompt": [1, "a"]}, 400, "invalid_value", "prompt", "prompt[1] must be a valid integer, got 'a'"),
        ({"prompt": ["a", 1]}, 400, "invalid_value", "prompt", "prompt[1] must be a valid string, got 1"),
        ({"prompt": [[1, "a"]]}, 400, "invalid_value", "prompt", "prompt[0][1] must be a valid integer, got 'a'"),
        ({"prompt": {"a": 1}}, 400, "invalid_value", "prompt", "prompt must be a valid string or a valid list, got {"),
        ({"prompt": [True]}, 400, "invalid_value", "prompt", "prompt[0] must be a valid string or a valid integer"),
        ({"prompt": [1.5]}, 400, "invalid_value", "prompt", ""),
        ({"prompt": [256]}, 400, "invalid_value", "prompt", "token ids must be from 0 to 255, got 256"),
        ({"prompt": [5, -1]}, 400, "invalid_value", "prompt", "got -1"),
        ({"prompt": [10**30]}, 400, "invalid_value", "prompt", "got 10000"),
        ({"prompt": "x" * 512}, 400, "context_length_exceeded", "prompt", "together, got a prompt of 512; shorten it"),
        ({"max_tokens": 513}, 400, "context_length_exceeded", "max_tokens", "tokens, got a prompt of 4 and max_tokens"),
        ({"max_tokens": "5"}, 400, "invalid_value", "max_tokens", "valid integer, got '5'"),
        ({"max_tokens": True}, 400, "invalid_value", "max_tokens", "got True"),
        ({"n": 10**9}, 400, "invalid_value", "n", "from 1 to 64, got 1000000000"),
        ({"n": 64, "prompt": ["a"] * 3}, 400, "invalid_value", "n", "at most 128, got 3 times 64"),
        ({"temperature": -1}, 400, "invalid_value", "temperature", "from 0 to 100, got -1"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature", "got 'hot'"),
        ({"top_p": -0.1}, 400, "invalid_value", "top_p", "a number above 0 and at most 1"),
        ({"stop": [""]}, 400, "invalid_value", "stop", "at most 16 strings of 1 to 1024 characters"),
        ({"stop": ""}, 400, "invalid_value", "stop", "at most 16 strings of 1 to 1024 characters, got ('',)"),
        ({"stop": "x" * 1025}, 400, "invalid_value", "stop", "at most 16 strings of 1 to 1024 characters"),
        ({"stop": ["x"] * 17}, 400, "invalid_value", "stop", "at most 16"),
        ({"stop": 4}, 400, "invalid_value", "stop", ""),
        ({"stop_token_ids": [-3]}, 400, "invalid_value", "stop_token_ids", "from 0 to 2147483647, got (-3,)"),
        ({"stop_token_ids": [2**64]}, 400, "invalid_value", "stop_token_ids", ""),
        ({"stop_token_ids": list(range(1025))}, 400, "invalid_value", "stop_token_ids", "at most 1024 token ids"),
        ({"cache_salt": "x" * 257}, 400, "invalid_value", "cache_salt", "a text of at most 256 characters, got"),
        ({"cache_salt": 5}, 400, "invalid_value", "cache_salt", "valid string"),
        ({"draft_tag": "x" * 999}, 400, "invalid_value", "draft_tag", "draft_tag must be a text of at most"),
        ({"priority": 2**31}, 400, "invalid_value", "priority", "priority must be below 2147483648, got 2147483648"),
        ({"priority": -(2**31) - 1}, 400, "invalid_value", "priority", "priority must be at least -2147483648, got"),
        ({"stream": "yes"}, 400, "invalid_value", "stream", ""),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options", "unless stream is true"),
        ({"slo_tpot_ms": -1}, 400, "invalid_slo", "slo_tpot_ms", "a finite number above 0, got -1"),
        ({"slo_tpot_ms": "fast"}, 400, "invalid_slo", "slo_tpot_ms", "got 'fast'"),
        ({"slo_tpot_ms": True}, 400, "invalid_slo", "slo_tpot_ms", ""),
        ({"slo_relative": 2, "slo_tpot_ms": 3}, 400, "invalid_slo", "slo_relative", "absent when slo_tpot_ms is given"),
        ({"slo_class": "vip"}, 400, "invalid_slo", "slo_class", "batch, chat, default, interactive, got 'vip'"),
        ({"service_tier": "vip"}, 400, "invalid_slo", "service_tier", ""),
        ({"presence_penalty": 2.5}, 400, "invalid_value", "presence_penalty", "a number from -2 to 2, got 2.5"),
        ({"presence_penalty": "1"}, 400, "invalid_value", "presence_penalty", "valid number, got '1'"),
        ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty", "a number from 0.01 to 10, got 0"),
        ({"min_tokens": 17}, 400, "invalid_value", "min_tokens", "from 0 to max_tokens (16), got 17"),
        ({"min_tokens": 4, "max_tokens": 3}, 400, "invalid_value", "min_tokens", "max_tokens (3), got 4"),
        ({"min_tokens": 12, "prompt": "x" * 505}, 400, "context_length_exceeded", "min_tokens",
         "prompt of 505 and min_tokens 12; lower min_tokens"),
        ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias", "token ids as its keys, like '464', got 'x'"),
        ({"logit_bias": {"-1": 1}}, 400, "invalid_value", "logit_bias", "got '-1'"),
        ({"logit_bias": {"05": 1}}, 400, "invalid_value", "logit_bias", "got '05'"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, "invalid_value", "logit_bias", "got '999"),
        ({"logit_bias": {"4294967296": 1}}, 400, "invalid_value", "logit_bias", "at most 1024 pairs of a token id"),
        ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias", "a number from -100 to 100"),
        ({"logit_bias": {"5": "x"}}, 400, "invalid_value", "logit_bias", "logit_bias.5 must be a valid number"),
        ({"logit_bias": [5, 1]}, 400, "invalid_value", "logit_bias", "valid dictionary"),
        ({"logit_bias": {str(i): "x" for i in range(1025)}}, 400, "invalid_value", "logit_bias", "at most 1024"),
        ({"bad_words": "x"}, 400, "invalid_value", "bad_words", "valid list"),
        ({"bad_words": [""]}, 400, "invalid_value", "bad_words", "at most 128 texts of 1 to 128 characters"),
        ({"bad_words": ["x"] * 129}, 400, "invalid_value", "bad_words", "at most 128"),
        ({"bad_words": [5]}, 400, "invalid_value", "bad_words", ""),
        ({"response_format": "json"}, 400, "invalid_value", "response_format", ""),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format",
         "response_format.type must be 'text', 'json_object' or 'json_schema', got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format", "must be given"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400, "missing_field",
         "response_format", "response_format.json_schema.schema must be given"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, 400, "invalid_value", "response_format",
         "and only then"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 65536}}}}, 400,
         "invalid_value", "response_format", "must be JSON of 1 to 65536 characters, got '65548"),
        ({"logprobs": -1}, 400, "invalid_value", "logprobs", "an integer from 0 to 20, or none, got -1"),
        ({"logprobs": True}, 400, "invalid_value", "logprobs", "valid integer"),
        ({"prompt_logprobs": -1}, 400, "invalid_value", "prompt_logprobs", "an integer from 0 to 20, or none, got -1"),
        ({"prompt_logprobs": -1, "echo": True, "logprobs": 1}, 400, "invalid_value", "prompt_logprobs", "got -1"),
        ({"prompt_logprobs": 1.5}, 400, "invalid_value", "prompt_logprobs", "valid integer"),
        ({"prompt_logprobs": 0, "stream": True}, 400, "invalid_value", "prompt_logprobs", "left out of a stream"),
        ({"logprobs": 21, "echo": True}, 400, "invalid_value", "logprobs", "logprobs must be an integer from 0 to 20"),
        ({"echo": 1}, 400, "invalid_value", "echo", ""),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_completions(server, fields, status, code, param, text):
    check(server.post(**{"prompt": "good"} | fields), status, code, param, text)
    streamed = server.post(**{"prompt": "good", "stream": True} | fields)
    if "stream" not in fields and "stream_options" not in fields:
        check(streamed, status, code, param, text)


@pytest.mark.parametrize(
    ("fields", "code", "param", "text"),
    [
        ({"messages": []}, "invalid_value", "messages", "messages must be a list of at least 1, got []"),
        ({"messages": "hello"}, "invalid_value", "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "missing_field", "messages", "messages[0].content must be given"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": 7}]}, "invalid_value", "messages",
         "messages[1].role must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'wizard'"),
        ({"messages": [{"role": "user", "content": 7}]}, "invalid_value", "messages",
         "messages[0].content must be a valid string or a valid list, got 7"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "invalid_value", "messages",
         "messages[0].content[0].type must be a valid string, got 5"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "invalid_value", "messages",
         "messages[0].content must be a valid string or a valid list, got {'type': 'text'}"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "missing_field", "messages",
         "messages[0].content[0].type must be given"),
        ({"messages": ["x"]}, "invalid_value", "messages", "messages[0] must be a valid dictionary, got 'x'"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "missing_field", "tool_choice",
         "tool_choice.function must be given"),
        ({"tool_choice": {"type": "tool"}}, "invalid_value", "tool_choice",
         "tool_choice.type must be 'function', got 'tool'"),
        ({"tool_choice": "any"}, "invalid_value", "tool_choice",
         "tool_choice must be 'none', 'auto' or 'required' or a valid dictionary, got 'any'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "unsupported_content", "messages", "got a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "unsupported_content", "messages", "got a part without a text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "unsupported_content", "messages", "got a part without a text"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context_length_exceeded", "messages", ""),
        ({"max_completion_tokens": 600}, "context_length_exceeded", "max_completion_tokens", ""),
        ({"logprobs": 1}, "invalid_value", "logprobs", "valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs", "top_logprobs must be an integer"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs", "unless logprobs is true"),
        ({"min_tokens": 500}, "context_length_exceeded", "min_tokens", "lower min_tokens"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities", ""),
        ({"prompt": "x", "messages": None}, "invalid_value", "messages", ""),
    ],
)  # fmt: skip
def test_bad_chats(server, fields, code, param, text):
    check(server.post(CHAT, **{"messages": MESSAGES} | fields), 400, code, param, text)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"prompt": "x"', "invalid_json", None),
        (b"\xff\xfe", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b'"text"', "invalid_json", None),
        (b"null", "invalid_json", None),
        (b"{}", "missing_field", "prompt"),
        (b'{"prompt": "x", "slo_tpot_ms": NaN}', "invalid_slo", "slo_tpot_ms"),
        (b'{"prompt": "x", "slo_tpot_ms": Infinity}', "invalid_slo", "slo_tpot_ms"),
        (b'{"prompt": "x", "slo_ttft_ms": -Infinity}', "invalid_slo", "slo_ttft_ms"),
        (b'{"prompt": "x", "slo_relative": 1e999}', "invalid_slo", "slo_relative"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_value", "temperature"),
        (b'{"prompt": "x", "top_p": NaN}', "invalid_value", "top_p"),
        (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "invalid_value", "logit_bias"),
        (b'{"prompt": "x", "bad_words": ["\\udfff"]}', "invalid_text", "bad_words"),
        (b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": NaN}}}}',
         "invalid_value", "response_format"),
        (b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema":'
         b' {"schema": {"const": "\\ud800"}}}}',
         "invalid_text", "response_format"),
        (b'{"prompt": "\\ud800"}', "invalid_text", "prompt"),
        (b'{"prompt": ["x", "\\ud800"]}', "invalid_text", "prompt"),
        (b'{"prompt": "x", "stop": "\\udfff"}', "invalid_text", "stop"),
        (b'{"prompt": "x", "slo_class": "chat", "service_tier": "\\ud800"}', "invalid_text", "service_tier"),
        ('{"prompt": "x", "user": "\u2200"}'.encode("utf-16-le"), "invalid_json", None),
        (b'{"prompt": "x", "\\ud800": 1}', "invalid_json", None),
        (b'{"prompt": ' + b"[" * 20_000 + b"}", "invalid_json", None),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "invalid_json", None),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else None,
)  # fmt: skip
def test_bad_bytes(server, body, code, param):
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check(response, 400, code, param)
    if code == "invalid_text":
        place = ", got" if param == "response_format" else " without half of a surrogate pair at character 0, got"
        assert f"must be valid Unicode{place}" in response.text and "half of a surrogate pair" in response.text
    if len(body) > 5000:
        assert "nested too deeply, or with a number of too many digits" in response.text


def test_an_error_may_quote_what_is_not_unicode(server):
    body = b'{"prompt": "x", "model": "\\ud800"}'
    response = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check(response, 404, "model_not_found", "model", "\\ud800")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_routes(server, method, path, status, code):
    check(server.http.request(method, path), status, code, "model" if code == "model_not_found" else None)


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": 3}, "invalid_value", "prompt"),
        ("/detokenize", {"tokens": [999]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "x"}, "invalid_value", "tokens"),
        ("/detokenize", {}, "missing_field", "tokens"),
    ],
)
def test_bad_tokens(server, path, body, code, param):
    check(server.post(path, **body), 400, code, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "code", "param"),
    [
        ("refuse this", 400, "invalid_value", "prompt"),
        ("late-refuse this", 400, "invalid_value", "prompt"),
        ("full queue", 429, "queue_full", None),
        ("late-full queue", 429, "queue_full", None),
        ("bug here", 500, "internal_error", None),
    ],
)
def test_what_the_engine_refuses(server, prompt, status, code, param, stream):
    response = server.post(prompt=prompt, stream=stream)
    check(response, status, code, param)
    assert ("retry-after" in response.headers) == (status == 429)
    assert "ZeroDivision" not in response.text
    if not prompt.startswith("late"):
        several = server.post(prompt=["slow but good", prompt], max_tokens=400, stream=stream)
        check(several, status, code, param)


def test_an_engine_error_ends_one_request(server):
    check(server.post(prompt="fail now"), 500, "engine_error", None, "the scripted failure")
    check(server.post(prompt=["slow one", "fail now"], max_tokens=400), 500, "engine_error", None)
    raw = server.post(prompt="fail now", stream=True).text.split("\n\n")
    assert raw[-2] == "data: [DONE]"
    assert json.loads(raw[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
