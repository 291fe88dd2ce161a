"""End to end: HTTP, SSE and targets on the embedded pair."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.server.sse import sse
from tests.waiting import wait_until

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def demo(demo_engine, serve_engine) -> Iterator:
    tokenizer = load_tokenizer("demo")
    with serve_engine(demo_engine, tokenizer, ServerSettings()) as server:
        yield server


def wait_idle(demo) -> None:
    def idle() -> bool:
        steps = demo.engine.stats().scheduler
        return not (steps.running or steps.waiting or steps.pages_used or demo.state.slots.used)

    wait_until(idle)


def stream(demo, **body) -> tuple[str, dict]:
    """The joined text and the last event."""
    with demo.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    decoded = [json.loads(event) for event in events[:-1]]
    return "".join(c["text"] for e in decoded for c in e["choices"]), decoded[-1]


def test_a_stream_and_a_body_are_the_same_text_and_tell_of_the_target(demo):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 7, "slo_tpot_ms": 500, "ignore_eos": True}
    text, last = stream(demo, **body)
    whole = demo.post(**body).json()
    assert text == whole["choices"][0]["text"] and len(text) > 10
    assert whole["usage"]["completion_tokens"] == 24
    for metrics in (last["metrics"], whole["metrics"]):
        assert metrics["slo"]["tpot_target_ms"] == 500
        assert metrics["slo"]["met"] == (metrics["slo"]["tpot_ms"] <= 500)
        spoken = metrics["speculative"]
        assert spoken["verify_steps"] >= 1
        assert spoken["accepted_tokens"] + spoken["verify_steps"] >= 23
        assert metrics["time_to_first_token_ms"] >= metrics["queue_time_ms"] >= 0
        as_vllm = metrics["speculative_decoding"]
        steps, by_accepted = as_vllm["num_spec_steps"], as_vllm["acceptance_histogram"]
        assert 1 <= steps == sum(by_accepted) <= spoken["verify_steps"]
        assert as_vllm["num_spec_tokens"] == len(by_accepted) - 1
        accepted = sum(number * count for number, count in enumerate(by_accepted))
        assert accepted == as_vllm["num_accepted_draft_tokens"] == spoken["accepted_tokens"]
        assert as_vllm["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert as_vllm["draft_acceptance_rate"] == pytest.approx(accepted / as_vllm["num_draft_tokens"])
    several = demo.post(**body, n=2).json()["metrics"]
    assert "speculative_decoding" not in several and several["speculative"]["verify_steps"] >= 2
    wait_idle(demo)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ],
)
def test_an_answer_says_which_stop_string_or_token_ended_it(demo, path, asked):
    fields = asked | {"max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def ended(**stops) -> tuple[str, object]:
        """The text, and what a body and a stream say has ended it."""
        (choice,) = demo.post(path, **fields, **stops).json()["choices"]
        said = [c for event in sse(demo, path, **fields, **stops) for c in event["choices"] if "stop_reason" in c]
        if "stop_reason" not in choice:
            assert not said and choice["finish_reason"] == "length"
        else:
            assert [(c["stop_reason"], c["finish_reason"]) for c in said] == [(choice["stop_reason"], "stop")]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice.get("stop_reason")

    text, reason = ended()
    assert reason is None
    middle = text[10:14]
    assert ended(stop=["no such text", middle]) == (text[: text.index(middle)], middle)
    ids = demo.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    stopped, reason = ended(stop_token_ids=ids)
    assert reason in ids and text.startswith(stopped) and len(stopped) < len(text)


def test_a_relative_target_is_a_multiple_of_the_baseline(demo):
    with demo.openai_client() as client:
        (model,) = client.models.list().data
        made = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Tom has 3 apples and eats one."}],
            max_tokens=8, temperature=0, extra_body={"slo_relative": 5},
        )  # fmt: skip
    assert model.id == "demo" and model.draft == "demo"
    assert made.choices[0].message.content
    assert made.metrics["slo"]["tpot_target_ms"] == pytest.approx(5 * model.baseline_ms, abs=1e-3)


@pytest.mark.parametrize("streams", [True, False])
def test_two_steps_after_a_client_is_gone_its_pages_are_free(demo, monkeypatch, streams):
    """While another request runs on, so that there are steps."""
    core, steps, aborted = demo.engine._core, [], []
    step, abort = core.step, demo.engine.abort

    def watched_step() -> list:
        chunks = step()
        stats = core.scheduler.stats
        steps.append((stats.running, stats.pages_used))
        return chunks

    def watched_abort(request_id: str) -> None:
        aborted.append(len(steps))
        abort(request_id)

    monkeypatch.setattr(core, "step", watched_step)
    monkeypatch.setattr(demo.engine, "abort", watched_abort)
    other = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1}
    gone = {"prompt": "x = 1\n" * 60, "max_tokens": 200, "stream": streams, "ignore_eos": True, "seed": 2}
    content = json.dumps(gone).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    with demo.http.stream("POST", "/v1/completions", json=other) as response:
        lines = response.iter_lines()
        next(lines)
        with socket.create_connection(("127.0.0.1", int(demo.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            wait_until(lambda: steps and steps[-1][0] == 2 and demo.state.slots.waiting == [])
            held = steps[-1][1]
        wait_until(lambda: aborted and len(steps) >= aborted[0] + 2)
        running, pages = steps[aborted[0] + 1]
        assert running == 1 and pages <= held - len(gone["prompt"]) // 6 // 16
    wait_idle(demo)
