"""The requests of load generators, as their own code builds them, and their own way of counting tokens.

Written from guidellm 0.8.1 (backends/openai/request_handlers.py), aiperf 0.13.0 (endpoints/openai_chat.py,
openai_completions.py) and inference-perf 0.7.0 (apis/chat.py, completion.py, streaming_parser.py). What they
report is right if `usage` is: none of them may count events, since an event can hold several tokens.
"""

from __future__ import annotations

import json

import pytest

from tests.server.scripted import STRIDE
from tests.server.sse import sse

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "naïve 漢字 🙂 text; "


def text_of(event: dict) -> str:
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def guidellm(path: str, tokens: int | None) -> dict:
    """Streams, with the counts in every event; a wanted length is asked for with ignore_eos."""
    limit = "max_tokens" if path == COMPLETIONS else "max_completion_tokens"
    body = {"model": "scripted", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if tokens is not None:
        body |= {limit: tokens, "ignore_eos": True}
    if path == COMPLETIONS:
        return body | {"prompt": f"prefix {TEXT}"}
    content = [{"type": "text", "text": TEXT}]
    return body | {"messages": [{"role": "system", "content": "prefix"}, {"role": "user", "content": content}]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_guidellm(server, path):
    """It asks /health, takes the first model, and keeps the last `usage` that it saw; lines are split at newlines."""
    assert server.http.get("/health").status_code == 200
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    events = sse(server, path, **guidellm(path, 64) | {"model": model})
    usages = [event["usage"] for event in events if event.get("usage")]
    assert len(usages) == len(events)
    request = server.engine.submitted[-1]
    assert usages[-1]["completion_tokens"] == 64 and usages[-1]["prompt_tokens"] == len(request.prompt_ids)
    assert request.sampling.ignore_eos and request.sampling.max_tokens == 64
    updates = [event for event in events if text_of(event)]
    assert len(updates) < 64, "events are fewer than tokens, so that counting them would be wrong"
    counts = [event["usage"]["completion_tokens"] for event in updates]
    assert counts == sorted(set(counts)), "every text comes with new tokens"


def test_guidellm_without_a_stream(server):
    body = guidellm(COMPLETIONS, 20)
    del body["stream_options"]
    answer = server.post(**body).json()
    assert answer["usage"]["completion_tokens"] == 20 and answer["id"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("per_chunk", [False, True])
def test_aiperf(server, path, per_chunk):
    """Prompts are lists of texts; limits of chats are max_completion_tokens; a last event brings the counts.

    It reads the object's kind of each event, and the first choice's text.
    """
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if per_chunk else {})
    body = {"model": "scripted", "stream_options": options}
    if path == COMPLETIONS:
        body |= {"prompt": [TEXT], "max_tokens": 50, "ignore_eos": True, "min_tokens": 50}
    else:
        body |= {"messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 50}
    headers = {"accept": "text/event-stream", "x-request-id": "0b6d", "x-correlation-id": "7"}
    events = sse(server, path, headers, **body)
    kind = "text_completion" if path == COMPLETIONS else "chat.completion.chunk"
    assert {event["object"] for event in events} == {kind}
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 50
    assert all((event["usage"] is not None) == per_chunk for event in events[:-1])
    assert isinstance(events[-1]["metrics"], dict)


def counted_like_inference_perf(raw: bytes) -> tuple[int, dict, int]:
    """Events with text, the merged `usage`, and characters, as its parser of streams finds them."""
    usage, texts = {}, []
    for message in raw.split(b"\n\n"):
        if not message.startswith(b"data:") or (data := message.removeprefix(b"data: ").strip()) == b"[DONE]":
            continue
        event = json.loads(data)
        if isinstance(event.get("usage"), dict):
            usage |= event["usage"]
        if text := text_of(event):
            texts.append(text)
    return len(texts), usage, len("".join(texts))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_inference_perf(server, path):
    """It infers the model from /v1/models, sends its SLO in headers that the server may ignore, and splits the stream
    at empty lines."""
    asked = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    body = {"model": server.http.get("/v1/models").json()["data"][0]["id"], **asked, "max_tokens": 30,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    headers = {"x-slo-tpot-ms": "50", "x-slo-ttft-ms": "1000", "content-type": "application/json"}
    answer = server.http.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 200
    chunks, usage, characters = counted_like_inference_perf(answer.content)
    assert usage["completion_tokens"] == 30 and usage["prompt_tokens"] == len(server.engine.submitted[-1].prompt_ids)
    assert 30 / STRIDE / 2 <= chunks <= 30 and characters <= 30
    unary = server.http.post(path, json={k: v for k, v in body.items() if not k.startswith("stream")}).json()
    assert unary["usage"]["completion_tokens"] == 30 and len(unary["choices"]) == 1
