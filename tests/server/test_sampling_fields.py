"""Every sampling field reaches the engine as the API says; log probabilities and counts come back exactly."""

from __future__ import annotations

import json

import pytest

from adaserve_jax.types import SamplingParams
from tests.server.scripted import CONTEXT, STRIDE, logprob_of
from tests.server.sse import sse

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "naïve 漢字"}]
TEXT = "é漢🙂a"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": -2, "frequency_penalty": 0.5}, {"presence_penalty": -2, "frequency_penalty": 0.5}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"min_tokens": 5}, {"min_tokens": 5}),
        ({"logit_bias": {"0": -100, "65": 2.5}}, {"logit_bias": ((0, -100.0), (65, 2.5))}),
        ({"bad_words": ["no", "漢"]}, {"bad_words": ("no", "漢")}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "ü"}}}},
            {"json_schema": '{"const":"ü"}'},
        ),
        ({"presence_penalty": None, "logit_bias": None, "bad_words": None, "response_format": None}, {}),
        ({"logit_bias": {}, "bad_words": [], "min_tokens": 0, "repetition_penalty": 1}, {}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_field_reaches_the_engine(server, path, fields, expected):
    asked = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = server.post(path, **asked, max_tokens=9, **fields)
    assert answer.status_code == 200 and "x-adaserve-warning" not in answer.headers
    assert server.engine.submitted[-1].sampling == SamplingParams(max_tokens=9, **expected)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"logprobs": None}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_the_two_ways_to_ask_for_log_probabilities(server, path, fields, expected):
    asked = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    assert server.post(path, **asked, max_tokens=2, **fields).status_code == 200
    assert server.engine.submitted[-1].sampling.logprobs == expected


def test_a_least_length_and_a_limit_that_is_left_out(server):
    """A chat's limit is all that there is; the 16 tokens of completions are cut to what fits, but not below."""
    chat = server.post(CHAT, messages=[{"role": "user", "content": "x"}], min_tokens=100).json()
    assert chat["usage"]["completion_tokens"] == CONTEXT - len("user: x\nassistant:")
    assert server.post(prompt="x" * 500, min_tokens=12).json()["usage"]["completion_tokens"] == 12
    assert server.engine.submitted[-1].sampling.min_tokens == 12


def characters_before(data: bytes, count: int) -> int:
    """Whole characters in the first `count` bytes: those whose last byte is there."""
    return len(data[:count].decode(errors="ignore"))


def shown(token: int) -> str:
    return chr(token) if token < 128 else f"\\x{token:02x}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_of_completions(server, stream, top):
    """One token is one byte here, so that most tokens are parts of characters."""
    body = {"prompt": [TEXT, "abc"], "max_tokens": 14, "n": 2, "logprobs": top}
    found = {i: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for i in range(4)}
    texts = dict.fromkeys(found, "")
    for event in sse(server, **body) if stream else [server.post(**body).json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            for name, values in found[choice["index"]].items():
                values += choice["logprobs"][name] or []
    for index, got in found.items():
        data = (TEXT, "abc")[index // 2].encode()
        tokens = [data[i % len(data)] for i in range(14)]
        name = [shown(t) if t < 128 else f"bytes:{shown(t)}" for t in range(256)]
        assert got["tokens"] == [name[t] for t in tokens]
        assert got["token_logprobs"] == [logprob_of(t, 0).logprob for t in tokens]
        tops = [{name[t]: value for t, value in logprob_of(token, top).top} for token in tokens]
        assert got["top_logprobs"] == (tops if top else [])
        assert got["text_offset"] == [characters_before(bytes(tokens), i) for i in range(14)]
        for i, offset in enumerate(got["text_offset"]):
            if tokens[i] < 128:
                assert texts[index][offset] == chr(tokens[i])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats_put_characters_together(server, stream):
    body = {"messages": MESSAGES, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    found, texts, most = [], "", 0
    for event in sse(server, CHAT, **body) if stream else [server.post(CHAT, **body).json()]:
        (choice,) = event["choices"]
        texts += choice["delta"].get("content", "") if stream else choice["message"]["content"]
        if choice["logprobs"] is not None:
            assert set(choice["logprobs"]) == {"content", "refusal"}
            found += choice["logprobs"]["content"]
            most = max(most, len(choice["logprobs"]["content"]))
    tokens = (f"user: {MESSAGES[0]['content']}\nassistant:".encode() * 2)[:40]
    assert b"".join(bytes(one["bytes"]) for one in found) == tokens
    assert texts == tokens.decode(errors="replace")
    for one, token in zip(found, tokens, strict=True):
        expected = logprob_of(token, 2)
        assert (one["token"], one["logprob"]) == (shown(token), expected.logprob)
        assert one["top_logprobs"] == [{"token": shown(t), "logprob": value, "bytes": [t]} for t, value in expected.top]
    assert not stream or STRIDE <= most < 40, "events hold several tokens, and not all of them"


def test_nothing_is_said_of_tokens_unless_it_is_asked_for(server):
    assert server.post(prompt="x").json()["choices"][0]["logprobs"] is None
    assert all(event["choices"][0]["logprobs"] is None for event in sse(server, CHAT, messages=MESSAGES, max_tokens=5))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["one ", "zwei "], [list(b"one "), list(b"zwei ")]], ids=["texts", "token ids"])
def test_echo_puts_each_prompt_before_each_of_its_choices(server, stream, prompt):
    body = {"prompt": prompt, "n": 2, "max_tokens": 5, "echo": True}
    texts = dict.fromkeys(range(4), "")
    for event in sse(server, **body) if stream else [server.post(**body).json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "one one o", 1: "one one o", 2: "zwei zwei ", 3: "zwei zwei "}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("at_end", [False, True])
def test_continuous_usage_counts_the_tokens_of_every_event_so_far(server, path, at_end):
    """One token is one byte, so that what was shown says how many tokens there were, but for cut characters."""
    asked = {"prompt": TEXT} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"continuous_usage_stats": True, "include_usage": at_end}
    events = sse(server, path, **asked, n=2, max_tokens=23, stream_options=options)
    prompt_tokens = len(server.engine.submitted[-1].prompt_ids)
    shown, counts = "", []
    for event in events:
        for choice in event["choices"]:
            shown += choice.get("text") or choice.get("delta", {}).get("content", "")
        usage = event["usage"]
        assert usage["prompt_tokens"] == prompt_tokens
        assert usage["total_tokens"] == prompt_tokens + usage["completion_tokens"]
        if (
            event["choices"]
            and not any(choice["finish_reason"] for choice in event["choices"])
            and "\ufffd" not in shown
        ):
            assert 0 <= usage["completion_tokens"] - len(shown.encode()) <= 2 * 3
        counts.append(usage["completion_tokens"])
    assert counts == sorted(counts) and counts[-1] == 46 and max(counts) == 46
    assert any(counts[i + 1] - counts[i] == STRIDE for i in range(len(counts) - 1)), "several tokens in one event"
    assert (events[-1]["choices"] == []) == at_end


def test_usage_stays_out_of_events_where_it_is_not_asked_for(server):
    assert all("usage" not in e for e in sse(server, prompt="x", stream_options={"continuous_usage_stats": False}))
