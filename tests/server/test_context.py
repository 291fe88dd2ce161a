"""How many tokens prompt and output get together: the context, or the KV cache where it holds fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Running, running

KV_TOKENS = 100
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server whose KV cache holds fewer tokens than the context of 512."""
    with running(kv_tokens=KV_TOKENS) as made:
        yield made


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (RESPONSES, {"input": "hello"})])
def test_an_answer_without_a_limit_goes_on_to_the_end_of_a_small_cache(small, path, body):
    answer = small.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == KV_TOKENS


def test_default_limits_and_cuts_keep_to_a_small_cache(small):
    usage = small.post(COMPLETIONS, prompt="x" * 95).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (95, 5)
    usage = small.post(COMPLETIONS, prompt="x" * 300, truncate_prompt_tokens=-1).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (84, 16)


def test_a_limit_beyond_the_room_behind_the_prompt_is_lowered_with_a_warning(small):
    answer = small.post(COMPLETIONS, prompt="x" * 90, max_tokens=11)
    assert answer.json()["usage"]["completion_tokens"] == 10
    assert answer.headers["x-adaserve-warning"] == "max_tokens 11 is served as 10"
    assert "x-adaserve-warning" not in small.post(COMPLETIONS, prompt="x" * 90, max_tokens=10).headers
    several = small.post(COMPLETIONS, prompt=["x", "x" * 99], max_tokens=9)
    assert several.headers["x-adaserve-warning"] == "max_tokens 9 is served as 1"
    response = small.post(RESPONSES, input="hello", max_output_tokens=100)
    assert response.json()["usage"]["total_tokens"] == KV_TOKENS and response.json()["status"] == "incomplete"
    assert response.headers["x-adaserve-warning"].startswith("max_output_tokens 100 is served as ")


def test_what_exceeds_a_small_cache_is_refused_by_its_size(small):
    error = small.post(COMPLETIONS, prompt="x" * 90, max_tokens=101).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == (
        "this model's maximum context length is 100 tokens in this server's KV cache, got a prompt of 90 and "
        "max_tokens 101; lower max_tokens"
    )
    error = small.post(COMPLETIONS, prompt="x" * 100).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_what_is_told_of_the_model_is_what_it_takes(small):
    assert small.http.get("/v1/models").json()["data"][0]["max_model_len"] == KV_TOKENS
    assert small.post("/tokenize", prompt="x").json()["max_model_len"] == KV_TOKENS


def auto(served: Running, characters: int, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    """Return the tokens of the prompt, its end, and the answer's usage and warning. The template adds 17 characters."""
    answer = served.post(RESPONSES, input="x" * (characters - 18) + "y", truncation="auto", **fields)
    assert answer.status_code == 200, answer.text
    prompt = served.engine.submitted[-1].prompt_ids
    usage = answer.json()["usage"]
    assert usage["input_tokens"] == len(prompt) and bytes(prompt).endswith(b"y\nassistant:")
    return len(prompt), answer.headers.get("x-adaserve-warning", ""), usage


def test_automatic_truncation_leaves_a_prompt_that_fits(server):
    assert auto(server, 200, max_output_tokens=400)[:2] == (200, "max_output_tokens 400 is served as 312")
    assert auto(server, 200, max_output_tokens=4096)[:2] == (200, "max_output_tokens 4096 is served as 312")
    assert auto(server, 384)[:2] == (384, "")
    assert auto(server, 500, max_output_tokens=12)[:2] == (500, "")


def test_automatic_truncation_keeps_a_share_of_the_context_for_the_output(server):
    kept, warning, usage = auto(server, 600)
    assert (kept, usage["output_tokens"]) == (384, 128)
    assert warning == "truncation left out 216 tokens of the prompt"
    kept, warning, usage = auto(server, 600, max_output_tokens=300)
    assert (kept, usage["output_tokens"]) == (384, 128)
    assert warning == "truncation left out 216 tokens of the prompt, max_output_tokens 300 is served as 128"
    assert auto(server, 600, max_output_tokens=5)[:2] == (507, "truncation left out 93 tokens of the prompt")
    assert auto(server, 600, min_tokens=200)[0] == 312


def test_automatic_truncation_keeps_to_a_small_cache(small):
    kept, _, usage = auto(small, 300)
    assert (kept, usage["output_tokens"]) == (75, 25)


def test_what_the_request_says_of_the_cut_holds_before_automatic_truncation(server):
    kept, warning, _ = auto(server, 200, truncate_prompt_tokens=50, max_output_tokens=5)
    assert (kept, warning) == (50, "")
