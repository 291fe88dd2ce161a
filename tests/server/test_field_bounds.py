"""What other servers take is taken, and /openapi.json says what numbers may be: a request on a bound is served, one
beyond is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from adaserve_jax.server.responses_schema import ResponsesBody
from adaserve_jax.server.schema import MIN_SEED, ChatBody, CompletionBody
from tests.server.conftest import Running

MESSAGES = [{"role": "user", "content": "hello"}]


def numbers_of(schema: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return what a field may be if it is a number."""
    kinds = schema["properties"].get(field, {}).get("anyOf", ())
    return [kind for kind in kinds if kind.get("type") in ("integer", "number")]


EXTRA: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "n": {"max_tokens": 1}, "max_tokens": {"echo": True}
}  # fmt: skip
"""Fields that others need beside them."""
BODIES = {
    "CompletionBody": CompletionBody.model_json_schema(), "ChatBody": ChatBody.model_json_schema(),
    "ResponsesBody": ResponsesBody.model_json_schema(),
}  # fmt: skip
ELSEWHERE = {
    "priority", "truncate_prompt_tokens", "max_thinking_tokens", "thinking_token_budget", "slo_thinking_tpot_ms",
}  # fmt: skip
"""Numbers whose bounds other tests show."""
NUMBERS = [
    name
    for name in {name: None for body in BODIES.values() for name in body["properties"]}
    if name not in ELSEWHERE and any(numbers_of(body, name) for body in BODIES.values())
]
BODY_OF = {
    "top_logprobs": "ChatBody", "max_completion_tokens": "ChatBody", "max_output_tokens": "ResponsesBody",
}  # fmt: skip
"""Numbers that completions do not have."""
LONGEST = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
"""Fields whose largest value no context of this model holds."""


def schema_of(server: Running, body: str, field: str) -> dict[str, Any]:
    document = server.http.get("/openapi.json").json()
    (found,) = numbers_of(document["components"]["schemas"][body], field)
    return found


def ask(server: Running, field: str, value: float) -> tuple[int, Any]:
    path, text = {
        "CompletionBody": ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        "ChatBody": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        "ResponsesBody": ("/v1/responses", {"input": "a"}),
    }[BODY_OF.get(field, "CompletionBody")]
    answer = server.http.post(path, json={**text, **EXTRA.get(field, {}), field: value})
    return answer.status_code, (answer.json().get("error") or {}).get("param")


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_are_taken_up_to_their_documented_bounds(server: Running, field: str) -> None:
    found = schema_of(server, BODY_OF.get(field, "CompletionBody"), field)
    step = 1 if found["type"] == "integer" else 0.001
    if "exclusiveMinimum" in found:
        assert ask(server, field, found["exclusiveMinimum"] + step)[0] == 200
        assert ask(server, field, found["exclusiveMinimum"]) == (400, field)
        return
    assert ask(server, field, found["minimum"])[0] == 200
    assert ask(server, field, found["minimum"] - step) == (400, field)
    if (most := found.get("maximum", math.inf)) < math.inf:
        assert field in LONGEST or ask(server, field, most)[0] == 200
        assert ask(server, field, most + step) == (400, field)


def test_no_prompt_is_documented_as_empty(server: Running) -> None:
    prompt = server.http.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    text, texts, ids, lists = prompt["anyOf"]
    assert text["minLength"] == texts["items"]["minLength"] == 1
    assert texts["minItems"] == ids["minItems"] == lists["minItems"] == lists["items"]["minItems"] == 1


def submitted(server: Running, **fields: Any) -> Any:
    assert server.post(prompt="abc", max_tokens=2, **fields).status_code == 200
    return server.engine.submitted[-1].sampling


def test_values_that_other_servers_take_mean_what_they_mean_there(server: Running) -> None:
    assert submitted(server, seed=-1).seed is None
    assert submitted(server, seed=-2).seed == 2**64 - 2 and submitted(server, seed=MIN_SEED).seed == 2**63
    nucleus = submitted(server, top_p=0, top_k=40)
    assert (nucleus.top_p, nucleus.top_k) == (1.0, 1), "the smallest nucleus is the likeliest token"
    assert submitted(server, suffix="").max_tokens == 2
    assert submitted(server, stop=[]).stop == ()
