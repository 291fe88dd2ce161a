"""A body that holds more than can be served is refused before it is validated, rendered or tokenised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaserve_jax.server.body import MAX_MEMBERS, MAX_PARTS, MAX_VALUES, check_values
from adaserve_jax.server.errors import ApiError
from tests.server.scripted import CONTEXT
from tests.server.test_bad_input import CHAT, COMPLETIONS, check

MANY = MAX_VALUES + 1
TOO_LONG = "context_length_exceeded"
LONG = "x" * 3_900_000
WORST = [  # of 0.2 to 3.9 MB each
    (COMPLETIONS, {"prompt": LONG}, TOO_LONG, "prompt", "got 3900000 characters, shorten it"),
    (COMPLETIONS, {"prompt": [LONG]}, TOO_LONG, "prompt", "which prompt so long exceeds in any case"),
    (COMPLETIONS, {"prompt": [1] * 200_000}, TOO_LONG, "prompt", "got a prompt of 200000"),
    (COMPLETIONS, {"prompt": [[1] * 200_000]}, TOO_LONG, "prompt", "got a prompt of 200000"),
    (COMPLETIONS, {"prompt": [[]] * 30_000}, "invalid_value", "n", "at most 128, got 30000 of them"),
    (COMPLETIONS, {"prompt": [[]] * 100_000}, "too_many_values", None, "send several requests"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 100_000}, "invalid_value", "stop",
     f"stop must have at most {MAX_MEMBERS} members, got 100000"),
    (COMPLETIONS, {"prompt": "a"} | dict.fromkeys(map(str, range(MAX_PARTS)), 1), "too_many_values", None, ""),
    (COMPLETIONS, {"prompt": ["a"] * 100_000}, "invalid_value", "n", "at most 128, got 100000 of them"),
    (COMPLETIONS, {"prompt": [[]] * MANY}, "too_many_values", None, "lists, objects and named members, got more"),
    (COMPLETIONS, {"prompt": [1] * MANY}, "too_many_values", None, f"at most {MAX_VALUES} JSON values, got more"),
    (COMPLETIONS, {"prompt": [""] * MANY}, "too_many_values", None, ""),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}, "too_many_values", None, ""),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, TOO_LONG, "messages", "3900000"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]}]},
     TOO_LONG, "messages", "3900000"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 5_000}, TOO_LONG, "messages",
     "at most as many messages and parts; send fewer"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5_000}]},
     TOO_LONG, "messages", "send fewer"),
    ("/v1/responses", {"input": LONG}, TOO_LONG, "input", "3900000"),
    ("/v1/responses", {"input": "x", "instructions": LONG}, TOO_LONG, "input", "3900001"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "output": LONG}]}, TOO_LONG, "input", "3900000"),
    ("/v1/responses", {"input": [{"type": "function_call", "content": "", "arguments": LONG}]}, TOO_LONG, "input", ""),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}"}] * 5_000}, TOO_LONG, "input",
     "at most as many messages and parts; send fewer"),
    ("/tokenize", {"prompt": LONG}, TOO_LONG, "prompt", ""),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, TOO_LONG, "messages", ""),
    ("/detokenize", {"tokens": [1] * MANY}, "too_many_values", None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "code", "param", "text"), WORST)
def test_it_is_refused_with_its_reason(server, path: str, body: dict, code: str, param: str | None, text: str) -> None:
    before = len(server.engine.submitted)
    check(server.post(path, **body), 400, code, param, text)
    assert len(server.engine.submitted) == before


def test_what_just_fits_is_served(server) -> None:
    for prompt in ("x" * (CONTEXT - 1), [120] * (CONTEXT - 1), ["x" * (CONTEXT - 1)] * 2):
        assert server.post(prompt=prompt, max_tokens=1).status_code == 200
    found = server.post("/detokenize", tokens=[44] * 200_000)
    assert len(found.json()["prompt"]) == 200_000
    assert server.post("/tokenize", prompt="," * CONTEXT).json()["count"] == CONTEXT


JSON = st.recursive(
    st.none() | st.integers() | st.text('",[{\\a:}]\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('",\\[x', max_size=3), inner, max_size=5),
    max_leaves=30,
)


def count(value: object) -> tuple[int, int]:
    """Count values as `check_values` does, containers one for themselves and one for each member behind the first, and
    among them containers and named members."""
    if not isinstance(value, dict | list):
        return 0, 0
    members = [count(member) for member in (value.values() if isinstance(value, dict) else value)]
    values = 1 + max(len(members) - 1, 0) + sum(found for found, _ in members)
    return values, 1 + isinstance(value, dict) * len(members) + sum(parts for _, parts in members)


@given(JSON, st.booleans())
def test_values_are_counted_as_a_parser_would(value: object, ascii_only: bool) -> None:
    body, (found, parts) = json.dumps(value, ensure_ascii=ascii_only).encode(), count(value)
    check_values(body, found + 1, parts + 1)
    if found:
        with pytest.raises(ApiError, match=f"at most {found} JSON values"):
            check_values(body, found, parts + 1)
        with pytest.raises(ApiError, match=f"at most {parts} lists, objects and named members"):
            check_values(body, found + 1, parts)
