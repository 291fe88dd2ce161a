"""Log probabilities of prompts over HTTP: `echo` with `logprobs`, and `prompt_logprobs`, in every form of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.scripted import logprob_of
from tests.server.sse import sse

TEXT = "naïve €uro"
CHAT = "/v1/chat/completions"


def named(token: int) -> str:
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def expected_echo(text: str, output: int, top: int) -> dict[str, list[Any]]:
    """What the scripted engine makes of a prompt, whose bytes it gives back."""
    prompt = list(text.encode())
    tokens = [*prompt, *(prompt[i % len(prompt)] for i in range(output))]
    tops = [{named(t): value for t, value in (*logprob_of(token, top).top, (token, logprob_of(token, 0).logprob))}
            for token in tokens]  # fmt: skip
    return {
        "tokens": [named(token) for token in tokens],
        "token_logprobs": [None, *(logprob_of(token, 0).logprob for token in tokens[1:])],
        "top_logprobs": [None, *tops[1:]] if top else [],
        "text_offset": [len(bytes(tokens[:count]).decode(errors="ignore")) for count in range(len(tokens))],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("output", [0, 1, 14])
@pytest.mark.parametrize("top", [0, 3])
def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Running, stream: bool, output: int, top: int) -> None:
    body = {"prompt": [TEXT, "abc", "d"], "max_tokens": output, "n": 2, "logprobs": top, "echo": True}
    found: dict[int, dict[str, list[Any]]] = {
        i: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for i in range(6)
    }
    texts, reasons, usage = dict.fromkeys(found, ""), {}, None
    options = {"stream_options": {"include_usage": True}}
    for event in sse(server, **body, **options) if stream else [server.post(**body).json()]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
            assert "prompt_logprobs" not in choice
            for name, values in found[choice["index"]].items():
                values += choice["logprobs"][name] or []
    for index, got in found.items():
        prompt = (TEXT, "abc", "d")[index // 2]
        wanted = expected_echo(prompt, output, top)
        if not (output or len(prompt) > 1):
            wanted["top_logprobs"] = []
        assert got == wanted
        data = prompt.encode()
        assert texts[index] == prompt + bytes(data[i % len(data)] for i in range(output)).decode(errors="replace")
        assert reasons[index] == "length"
    assert usage is not None and usage["completion_tokens"] == 6 * output
    assert usage["prompt_tokens"] == len(TEXT.encode()) + 4


def test_a_prompt_comes_back_alone_without_log_probabilities_too(server: Running) -> None:
    answer = server.post(prompt=TEXT, max_tokens=0, echo=True).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (TEXT, "length", None)
    assert answer["usage"]["completion_tokens"] == 0
    counts = [
        event["usage"]["completion_tokens"]
        for event in sse(
            server, prompt=TEXT, max_tokens=0, echo=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    ]  # fmt: skip
    assert set(counts) == {0}
    assert server.post(prompt="x" * 511, max_tokens=0, echo=True).json()["usage"]["prompt_tokens"] == 511
    assert server.post(prompt=TEXT, max_tokens=0).status_code == 400
    assert server.post(prompt=TEXT, max_tokens=0, max_completion_tokens=0, echo=True).status_code == 400


def entries(prompt: bytes, top: int) -> list[dict[str, Any] | None]:
    listed: list[dict[str, Any] | None] = [None]
    for token in prompt[1:]:
        told = logprob_of(token, top)
        found = {token: (told.logprob, told.rank)} | {t: (value, i) for i, (t, value) in enumerate(told.top, 1)}
        listed.append({
            str(t): {"logprob": value, "rank": rank, "decoded_token": named(t)} for t, (value, rank) in found.items()
        })  # fmt: skip
    return listed


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_are_listed_by_token_id(server: Running, top: int) -> None:
    body = {"prompt": [TEXT, "a"], "max_tokens": 3, "n": 2, "prompt_logprobs": top}
    for choice in server.post(**body).json()["choices"]:
        assert choice["prompt_logprobs"] == entries((TEXT, "a")[choice["index"] // 2].encode(), top)
        assert choice["logprobs"] is None
    chat = server.post(CHAT, messages=[{"role": "user", "content": TEXT}], n=2, max_tokens=4, prompt_logprobs=top)
    assert chat.json()["prompt_logprobs"] == entries(f"user: {TEXT}\nassistant:".encode(), top)
    assert [choice["logprobs"] for choice in chat.json()["choices"]] == [None, None]
    assert "prompt_logprobs" not in server.post(CHAT, messages=[{"role": "user", "content": TEXT}]).json()


def test_both_forms_together_have_as_many_tokens_as_each_asks_for(server: Running) -> None:
    asked = {"prompt": TEXT, "max_tokens": 2, "echo": True}
    for echoed, listed in ((1, 4), (4, 1), (0, 0)):
        choice = server.post(**asked, logprobs=echoed, prompt_logprobs=listed).json()["choices"][0]
        assert choice["prompt_logprobs"] == entries(TEXT.encode(), listed)
        wanted = expected_echo(TEXT, 2, echoed)
        assert choice["logprobs"] == wanted | {"top_logprobs": wanted["top_logprobs"] or None}


def test_an_answer_holds_only_so_many(server: Running) -> None:
    asked = {"prompt": ["x" * 500] * 13, "max_tokens": 1}
    for fields, field in (({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")):
        error = server.post(**asked, **fields).json()["error"]
        assert error["param"] == field
        assert (
            f"{field} must ask for at most 131072 log probabilities of the prompts' tokens, got 136500"
            in (error["message"])
        )
        assert server.post(**asked | {"prompt": ["x" * 500] * 2}, **fields).status_code == 200
    assert "got 273000" in server.post(**asked, echo=True, logprobs=20, prompt_logprobs=20).json()["error"]["message"]
