"""A field of another server that would change the text is served or refused; only what cannot change it is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from adaserve_jax.sampling import SamplingParams
from adaserve_jax.server.request_model import IGNORED, not_served
from adaserve_jax.server.responses_schema import ResponsesBody
from adaserve_jax.server.schema import ChatBody, CompletionBody, OtherChatFields, OtherFields
from tests.server.conftest import Running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
}
MODELS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/v1/responses": ResponsesBody}
VLLM_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens
min_p min_tokens model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty
request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids
stream stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
best_of early_stopping guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
guided_whitespace_pattern logits_processors
"""
VLLM_ONLY_CHAT = """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
return_prompt_text tool_choice tools top_logprobs
"""
VLLM_COMPLETIONS = frozenset(VLLM_BOTH.split()) | {"prompt", "prompt_embeds", "suffix"}
VLLM_CHAT = frozenset(VLLM_BOTH.split()) | frozenset(VLLM_ONLY_CHAT.split())
VLLM_RESPONSE_NAMES = """
background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
prompt_cache_key request_id mm_processor_kwargs priority cache_salt enable_response_messages
previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
vllm_xargs
"""
VLLM_RESPONSES = frozenset(VLLM_RESPONSE_NAMES.split())


def cases(mark: str) -> list[tuple[str, str, list[Any]]]:
    return [(path, *each) for path, model in MODELS.items() for each in not_served(model, mark).items()]


def test_every_field_of_vllm_is_known():
    assert set(CompletionBody.model_fields) >= VLLM_COMPLETIONS
    assert set(ChatBody.model_fields) >= VLLM_CHAT
    assert set(ResponsesBody.model_fields) >= VLLM_RESPONSES
    assert {*OtherFields.model_fields} <= {*OtherChatFields.model_fields}


@pytest.mark.parametrize(("path", "name", "neutral"), cases("enum"))
def test_what_is_not_served_is_refused_with_the_reason_unless_it_asks_for_nothing(server, path, name, neutral):
    for value in neutral:
        answer = server.post(path, **BODIES[path], **{name: value})
        assert answer.status_code == 200 and "x-adaserve-warning" not in answer.headers
    refused = server.post(path, **BODIES[path], **{name: "something else"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not implemented: only ")
    other = server.post(path, **BODIES[path], **{name: 7})
    assert other.status_code == 400


def sampling(server: Running, path: str, **fields: Any) -> tuple[SamplingParams, str]:
    """Send a request; return what the engine is asked for, and the warning of the answer."""
    answer = server.post(path, **BODIES[path], **fields)
    assert answer.status_code == 200
    return server.engine.submitted[-1].sampling, answer.headers.get("x-adaserve-warning", "")


@pytest.fixture(scope="module")
def plain(server: Running) -> dict[str, SamplingParams]:
    """Return what the engine is asked for without any of the fields, by path."""
    found = {path: sampling(server, path) for path in BODIES}
    assert {warning for _, warning in found.values()} == {""}
    return {path: asked for path, (asked, _) in found.items()}


@pytest.mark.parametrize(("path", "name", "neutral"), cases(IGNORED))
def test_what_is_ignored_is_named_and_leaves_the_request_as_it_is(server, plain, path, name, neutral):
    for value in (None, *neutral):
        assert sampling(server, path, **{name: value}) == (plain[path], "")
    assert sampling(server, path, **{name: {"some": "value"}}) == (plain[path], f"ignored fields: {name}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_max_completion_tokens_is_max_tokens(server, path):
    usage = server.post(path, **BODIES[path], max_completion_tokens=5).json()["usage"]
    assert usage["completion_tokens"] == 5
    error = server.post(path, **BODIES[path], max_completion_tokens=0).json()["error"]
    assert error["param"] == "max_completion_tokens"


TEN = "0123456789"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, "6789"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "6789"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "0123"),
        ({"truncate_prompt_tokens": 10}, TEN),
        ({"truncate_prompt_tokens": 400}, TEN),
        ({"truncate_prompt_tokens": -1}, TEN),
        ({"truncation_side": "right"}, TEN),
    ],
)
def test_a_prompt_is_cut_where_the_request_says(server, fields, kept):
    for prompt in (TEN, list(TEN.encode())):
        answer = server.post(prompt=prompt, max_tokens=2, echo=True, **fields).json()
        assert bytes(server.engine.submitted[-1].prompt_ids).decode() == kept
        assert answer["usage"]["prompt_tokens"] == len(kept)
        assert answer["choices"][0]["text"] == kept + kept[:2]
    assert server.post(prompt=[TEN, "ab"], max_tokens=1, **fields).json()["usage"]["prompt_tokens"] == len(kept) + min(
        2, len(kept)
    )


def test_a_prompt_of_any_length_is_cut_to_what_fits(server):
    context = server.state.info.max_context
    for path, body, output in (
        ("/v1/completions", {"prompt": "x" * 2000}, 16),
        ("/v1/completions", {"prompt": "x" * 2000, "max_tokens": 100}, 100),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}], "min_tokens": 40}, 40),
    ):
        usage = server.post(path, **body, truncate_prompt_tokens=-1).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (context - output, output)
    refused = server.post(prompt="x" * 2000, truncate_prompt_tokens=context).json()["error"]
    assert refused["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [0, -2])
def test_a_number_of_tokens_that_is_none(server, value):
    error = server.post(prompt="x", truncate_prompt_tokens=value).json()["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")
    assert f"truncate_prompt_tokens must be -1 or above 0, got {value}" in error["message"]
