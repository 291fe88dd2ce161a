"""Completions and chat through the real openai client and plain HTTP: texts, choices, streams, metrics, concurrency."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from adaserve_jax.models.config import GenerationDefaults
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.generation import response_metrics
from adaserve_jax.server.settings import ServerSettings
from tests.server.scripted import CACHED
from tests.server.sse import sse

TEXT = "naïve 漢字 🙂 text; "


def repeated(prompt: str, tokens: int) -> str:
    """What the scripted engine answers: the prompt's bytes over and over; a cut character becomes U+FFFD."""
    data = prompt.encode()
    return bytes(data[i % len(data)] for i in range(tokens)).decode(errors="replace")


def test_a_completion_through_the_openai_client(client):
    made = client.completions.create(model="scripted", prompt=TEXT, max_tokens=40, seed=3)
    assert made.object == "text_completion" and made.id.startswith("cmpl-") and made.model == "scripted"
    assert made.choices[0].text == repeated(TEXT, 40)
    assert made.choices[0].finish_reason == "length"
    prompt_tokens = len(TEXT.encode())
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (prompt_tokens, 40)
    assert made.usage.total_tokens == prompt_tokens + 40


def test_a_streamed_completion_through_the_openai_client_keeps_characters_whole(client):
    parts = list(client.completions.create(model="scripted", prompt=TEXT, max_tokens=60, stream=True))
    assert len(parts) > 5
    texts = [part.choices[0].text for part in parts]
    assert "".join(texts) == repeated(TEXT, 60)
    assert not any("�" in text for text in texts[:-1])
    assert [part.choices[0].finish_reason for part in parts][:-1] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "length"
    assert len({part.id for part in parts}) == 1


def test_a_chat_through_the_openai_client(client, server):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "ü"}]},
    ]
    made = client.chat.completions.create(model="scripted", messages=messages, max_completion_tokens=12)
    prompt = "system: be kind\nuser: ü\nassistant:"
    assert made.choices[0].message.content == repeated(prompt, 12)
    assert made.choices[0].message.role == "assistant"
    parts = list(client.chat.completions.create(
        model="scripted", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == repeated(prompt, 12)
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 12
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == CACHED
    assert all(part.usage is None for part in parts[:-1])


def test_parts_of_a_message_are_joined_by_line_breaks(server):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    server.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert bytes(server.engine.submitted[-1].prompt_ids) == b"user: one\ntwo\nassistant:"


def test_cached_tokens_are_those_that_no_choice_had_to_compute(server):
    """Choice c of a prompt found CACHED + c."""
    usage = server.post(prompt=["one", "two"], n=3).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED}


def test_a_salt_reaches_the_engine_as_it_is_without_keys(server):
    def salt_of(**body) -> str:
        assert server.post(prompt="abc", **body).status_code == 200
        return server.engine.submitted[-1].cache_salt

    assert [salt_of(), salt_of(cache_salt=None), salt_of(cache_salt="ü")] == ["", "", "ü"]


def test_the_default_limits(server):
    assert server.post(prompt="abc").json()["usage"]["completion_tokens"] == 16
    assert server.post(prompt=[1] * 505).json()["usage"]["completion_tokens"] == 7
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 400}])
    prompt_tokens = len("user: \nassistant:") + 400
    assert chat.json()["usage"] == {
        "prompt_tokens": prompt_tokens, "completion_tokens": 512 - prompt_tokens, "total_tokens": 512,
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_kept_apart(server, stream):
    prompts = ["one ", "zwei ", "trois "]
    body = {"prompt": prompts, "n": 2, "max_tokens": 13, "stream": stream}
    texts = dict.fromkeys(range(6), "")
    if stream:
        for event in sse(server, **body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        answer = server.post(**body).json()
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["completion_tokens"] == 6 * 13
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert texts == {2 * p + c: repeated(prompt, 13) for p, prompt in enumerate(prompts) for c in range(2)}


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab"], [97, 98], [[97, 98]]], ids=["text", "texts", "token ids", "lists of token ids"]
)
def test_every_form_of_prompt(server, prompt):
    assert server.post(prompt=prompt, max_tokens=5).json()["choices"][0]["text"] == "ababa"


def test_a_long_prompt_is_tokenised_too(server):
    answer = server.post("/tokenize", prompt="ä" * 9000)
    assert answer.json()["count"] == 18000


def test_sampling_fields_reach_the_engine(server):
    fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 2**64 - 1, "stop": "END", "n": 2}
    server.post(
        prompt="to the engine", max_tokens=3, top_k=-1, stop_token_ids=[7], ignore_eos=True, priority=-4, **fields
    )
    request = server.engine.submitted[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.seed, sampling.n, sampling.top_k, sampling.max_tokens) == (2**64 - 1, 2, 0, 3)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("END",), (7,), True)
    assert request.priority == -4
    server.post(prompt="nulls are defaults", temperature=None, top_p=None, n=None, stop=None, seed=None, stream=None)
    assert server.engine.submitted[-1].sampling == type(sampling)()


@pytest.mark.parametrize("used", [True, False])
def test_sampling_that_is_left_out_is_the_models(start_server, used):
    with start_server(ServerSettings(use_generation_config=used)) as server:
        server.engine.defaults = GenerationDefaults(temperature=0.6, top_k=20)
        server.post(prompt="x", max_tokens=2, top_k=5)
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6 if used else 1.0, 5, 1.0)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], top_k=None, temperature=1)
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.top_k) == (1.0, 20 if used else 0)


def test_a_chat_without_tools_may_say_so(server):
    none = {"tools": [], "tool_choice": "none"}
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=2, **none)
    assert chat.status_code == 200 and "x-adaserve-warning" not in chat.headers


@pytest.mark.parametrize("stream", [False, True])
def test_the_metrics_object(server, stream):
    body = {"prompt": "measure", "max_tokens": 10, "slo_tpot_ms": 1000, "slo_ttft_ms": 5000}
    if stream:
        events = sse(server, **body)
        assert all("metrics" not in event for event in events[:-1])
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        metrics = events[-1]["metrics"]
    else:
        metrics = server.post(**body).json()["metrics"]
    assert set(metrics) == {"time_to_first_token_ms", "queue_time_ms", "tokens_per_second", "speculative", "slo"}
    assert metrics["speculative"] == {"verify_steps": 4, "accepted_tokens": 6, "mean_accepted": 1.5}
    assert metrics["queue_time_ms"] == pytest.approx(1.0)
    assert metrics["time_to_first_token_ms"] >= 0 and metrics["tokens_per_second"] > 0
    slo = metrics["slo"]
    assert (slo["tpot_target_ms"], slo["ttft_target_ms"], slo["met"]) == (1000.0, 5000.0, True)
    assert 0 < slo["tpot_ms"] < 1000


@pytest.mark.parametrize(
    ("path", "asked", "kind"),
    [
        ("/v1/completions", {"prompt": "x"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "chat.completion.chunk"),
    ],
)
def test_usage_comes_last_and_carries_the_metrics(server, path, asked, kind):
    events = sse(server, path, **asked, n=2, max_tokens=5, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 10
    assert {event["object"] for event in events} == {kind}
    assert "metrics" in events[-1]
    assert all(event["usage"] is None and "metrics" not in event for event in events[:-1])
    assert all("usage" not in event for event in sse(server, path, **asked, max_tokens=5))


@pytest.mark.parametrize(
    ("fields", "tpot_ms", "ttft_ms", "slo_class"),
    [
        ({}, None, None, "default"),
        ({"slo_tpot_ms": 25}, 25.0, None, "default"),
        ({"slo_tpot_ms": 1e-6, "slo_ttft_ms": 1e9}, 0.1, 600_000.0, "default"),
        ({"slo_tpot_ms": 1e300}, 60_000.0, None, "default"),
        ({"slo_relative": 1.5}, 15.0, None, "default"),
        ({"slo_relative": 1e-6}, 0.1, None, "default"),
        ({"slo_class": "interactive"}, 50.0, None, "interactive"),
        ({"slo_class": "chat", "slo_tpot_ms": 70}, 70.0, None, "chat"),
        ({"slo_class": "chat", "slo_relative": 3}, 30.0, None, "chat"),
        ({"service_tier": "priority"}, 50.0, None, "interactive"),
        ({"service_tier": "flex", "slo_ttft_ms": 9}, None, 9.0, "batch"),
        ({"service_tier": "auto"}, None, None, "default"),
    ],
)
def test_targets_are_clamped_classed_and_told(server, fields, tpot_ms, ttft_ms, slo_class):
    slo = server.post(prompt="x", max_tokens=4, **fields).json()["metrics"]["slo"]
    expected = [None if value is None else pytest.approx(value) for value in (tpot_ms, ttft_ms)]
    assert [slo["tpot_target_ms"], slo["ttft_target_ms"]] == expected
    assert (slo["met"] is None) == (tpot_ms is None and ttft_ms is None)
    assert server.engine.submitted[-1].slo_class == slo_class


def test_a_target_that_the_servers_limits_change_is_named(server):
    told = server.post(prompt="x", max_tokens=4, slo_tpot_ms=0.01, slo_ttft_ms=50, slo_e2e_ms=9000).headers
    assert told["x-adaserve-warning"] == "slo_tpot_ms 0.01 is served as 0.1"
    streamed = server.post(prompt="x", max_tokens=4, slo_tpot_ms=1e9, stream=True).headers
    assert streamed["x-adaserve-warning"] == "slo_tpot_ms 1000000000 is served as 60000"
    relative = server.post(prompt="x", max_tokens=4, slo_relative=1e-6).headers
    assert relative["x-adaserve-warning"] == "slo_relative 1e-06 is served as slo_tpot_ms 0.1"
    assert "x-adaserve-warning" not in server.post(prompt="x", max_tokens=4, slo_tpot_ms=50).headers


def test_unknown_fields_are_ignored_and_named(server):
    body = json.dumps({"prompt": "x", "colour": 1, "zoom\n€": 2, "a" * 999: 3})
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert answer.headers["x-adaserve-warning"] == f"ignored fields: {'a' * 40}, colour, zoom??"
    nameless = server.http.post("/v1/completions", json={"prompt": "x", "": 1})
    assert nameless.headers["x-adaserve-warning"] == "ignored fields: ''"
    many = server.post(prompt="x", **{f"f{i:03}": i for i in range(100)}).headers["x-adaserve-warning"]
    assert many.endswith("f015 and 84 more")
    asked = server.http.post("/v1/completions?api-version=3&x=1", json={"prompt": "x", "colour": 1})
    expected = "ignored fields: colour; ignored query parameters: api-version, x"
    assert asked.headers["x-adaserve-warning"] == expected
    assert (
        "query parameters: a" in server.http.post("/tokenize?a=1", json={"prompt": "x"}).headers["x-adaserve-warning"]
    )
    streamed = server.post(prompt="x", stream=True, colour=1)
    assert streamed.headers["x-adaserve-warning"] == "ignored fields: colour"


@pytest.mark.parametrize(
    "name", ["slo_tpot", "tpot_ms", "ttft_slo_ms", "e2e_ms", "deadline_ms", "max_queue", "SLO_TPOT_MS"]
)
def test_an_unknown_field_that_looks_like_a_target_is_refused(server, name):
    before = len(server.engine.submitted)
    answer = server.post(prompt="x", **{name: 5})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_slo", name)
    assert error["message"].startswith(f"{name} is not a field; targets and limits are slo_tpot_ms, ")
    assert len(server.engine.submitted) == before


def test_32_concurrent_streams_lose_and_mix_nothing(server):
    def one(i: int) -> tuple[str, dict]:
        events = sse(server, prompt=f"{TEXT}{i} ", max_tokens=90 + i, slo_tpot_ms=20 + 10 * (i % 3))
        return "".join(c["text"] for e in events for c in e["choices"]), events[-1]["metrics"]

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(one, range(32)))
    for i, (text, metrics) in enumerate(results):
        assert text == repeated(f"{TEXT}{i} ", 90 + i)
        assert metrics["slo"]["tpot_target_ms"] == pytest.approx(20 + 10 * (i % 3))
    assert server.state.slots.used == 0 and not server.state.in_flight


def test_the_metrics_of_several_choices_are_of_the_slowest_and_of_all():
    """Two choices that share an arrival: one of 3 tokens in time, one of 5 that is late and out of reach."""
    quick = RequestMetrics(
        10.0, 10.1, 10.5, 11.5, output_tokens=3, tpot_slo_s=1.0, verify_steps=2, accepted_tokens=1, slo_feasible=True
    )
    slow = RequestMetrics(
        10.0, 10.2, 10.4, 18.4, output_tokens=5, tpot_slo_s=1.0, verify_steps=4, accepted_tokens=2, slo_feasible=False
    )
    for choices in ([quick, slow], [slow, quick]):
        found = response_metrics(choices)
        assert (found.time_to_first_token_ms, found.queue_time_ms, found.slo.tpot_ms) == (500.0, 200.0, 2000.0)
        assert found.tokens_per_second == round(8 / 8.4, 3)
        assert (found.speculative.verify_steps, found.speculative.accepted_tokens) == (6, 3)
        assert (found.slo.met, found.slo.feasible) == (False, False)
    alone = response_metrics([quick]).slo
    assert (alone.met, alone.feasible, alone.tpot_ms) == (True, True, 500.0)
