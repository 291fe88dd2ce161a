"""Checks of a request where it enters an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaserve_jax.engine.client import EngineInfo, GenerateRequest, check_prompt, check_request
from adaserve_jax.errors import RequestError
from adaserve_jax.sampling import Thinking
from adaserve_jax.types import SLO, SamplingParams

INFO = EngineInfo("t", None, "ar", "cpu", "0", 48, 4, 40, 0.01, kv_tokens=32)


def test_a_request_that_fits_passes() -> None:
    check_request(GenerateRequest("a", [3] * 16, SamplingParams(max_tokens=16)), INFO)


@pytest.mark.parametrize(
    ("prompt", "tokens", "param", "code", "text"),
    [
        ([], 1, "prompt", "empty_prompt", "prompt must have at least one token, got none"),
        ([3] * 48, 1, "prompt", "context_length_exceeded", "context length is 32 tokens, .*, got a prompt of 48"),
        ([3] * 32, 1, "prompt", "context_length_exceeded", "context length is 32 tokens, .*, got a prompt of 32"),
        ([3] * 16, 17, "max_tokens", "context_length_exceeded", r"KV cache of 32 tokens, got 16 \+ 17; shorten"),
        ([3] * 16, 1000, "max_tokens", "context_length_exceeded", r"got 16 \+ 32; shorten"),
        ([40], 1, "prompt", "invalid_value", "token ids must be from 0 to 39, got 40"),
    ],
)
def test_a_request_that_can_never_be_served(prompt: list[int], tokens: int, param: str, code: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        check_request(GenerateRequest("a", prompt, SamplingParams(max_tokens=tokens)), INFO)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("tokens", [48, 0])
def test_an_error_names_the_field_of_the_prompt(tokens: int) -> None:
    with pytest.raises(RequestError, match="messages must" if not tokens else "got a prompt of 48") as caught:
        check_prompt(tokens, 48, "messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("draft", "drafts", "text"),
    [
        (None, (), "draft_tag must be absent: this engine has no draft; got 'code'"),
        ("remote", (), "must be absent: this engine asks a draft service, which has one draft; got 'code'"),
        ("demo", ("default", "other"), "draft_tag must name one of the drafts: default, other; got 'code'"),
    ],
)
def test_a_draft_that_no_request_can_choose_is_refused(draft: str | None, drafts: tuple[str, ...], text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        check_request(GenerateRequest("r", [1], draft_tag="code"), replace(INFO, draft=draft, drafts=drafts))
    assert caught.value.param == "draft_tag"


def test_a_target_of_the_thinking_needs_marks() -> None:
    slo = SLO(thinking_tpot_ms=20)
    check_request(GenerateRequest("r", [1], SamplingParams(thinking=Thinking(1, 2)), slo), INFO)
    text = "slo_thinking_tpot_ms must be absent from a request whose thinking has no marks, got 20"
    with pytest.raises(RequestError, match=text) as caught:
        check_request(GenerateRequest("r", [1], SamplingParams(), slo), INFO)
    assert (caught.value.param, caught.value.code) == ("slo_thinking_tpot_ms", "unsupported_parameter")
