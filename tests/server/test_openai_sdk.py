"""The official client works without changes: both kinds, streams, choices, log probabilities, errors."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from pydantic import BaseModel

from adaserve_jax.server.settings import ServerSettings
from tests.server.scripted import logprob_of
from tests.slow import slow_after

MESSAGES = [{"role": "user", "content": "hi ü"}]
PROMPT = "user: hi ü\nassistant:"


def test_every_sampling_argument_of_the_client_is_taken(client, server):
    made = client.chat.completions.with_raw_response.create(
        model="scripted", messages=MESSAGES, max_completion_tokens=12, n=2, stop=["END", "STOP"], temperature=0.3,
        top_p=0.8, seed=4, presence_penalty=1, frequency_penalty=-1, logit_bias={"65": -5}, logprobs=True,
        top_logprobs=2, user="me", response_format={"type": "text"}, service_tier="auto", stream=False,
        extra_body={"slo_tpot_ms": 25, "top_k": 5, "min_p": 0.1, "min_tokens": 3, "repetition_penalty": 1.1,
                    "bad_words": ["no"], "ignore_eos": True, "stop_token_ids": [7], "priority": 1},
    )  # fmt: skip
    assert "x-adaserve-warning" not in made.headers and made.headers["x-request-id"]
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.n, sampling.stop, sampling.temperature) == (12, 2, ("END", "STOP"), 0.3)
    assert (sampling.top_p, sampling.seed, sampling.top_k, sampling.min_p) == (0.8, 4, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.bad_words, sampling.min_tokens) == (((65, -5.0),), ("no",), 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((7,), True, 2)
    answer = made.parse()
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.service_tier == "auto"
    assert answer.metrics["slo"]["tpot_target_ms"] == 25 and answer.usage.completion_tokens == 24
    for choice in answer.choices:
        assert choice.message.content == PROMPT.encode()[:12].decode() and choice.message.refusal is None
        assert [math.exp(one.logprob) <= 1 for one in choice.logprobs.content] == [True] * 12
        first = choice.logprobs.content[0]
        assert (first.token, first.bytes, len(first.top_logprobs)) == ("u", [117], 2)
        assert [top.logprob for top in first.top_logprobs] == [value for _, value in logprob_of(117, 2).top]


def test_a_stream_of_several_choices_with_log_probabilities_and_usage(client):
    made = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_tokens=len(PROMPT.encode()), n=2, logprobs=True, stream=True,
        stream_options={"include_usage": True}, service_tier="flex",
    )  # fmt: skip
    texts, tokens, last = ["", ""], [b"", b""], None
    for chunk in made:
        last = chunk
        assert chunk.service_tier == "flex"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                tokens[choice.index] += b"".join(bytes(one.bytes) for one in choice.logprobs.content)
    assert texts == [PROMPT, PROMPT] and tokens == [PROMPT.encode()] * 2
    assert last.usage.completion_tokens == 2 * len(PROMPT.encode()) and last.metrics["slo"]["met"] is None


def test_a_completion_with_echo_and_one_with_log_probabilities(client):
    echoed = client.completions.create(model="scripted", prompt="abc", max_tokens=4, echo=True)
    assert echoed.choices[0].text == "abcabca"
    told = client.completions.create(model="scripted", prompt="aé", max_tokens=3, logprobs=1)
    logprobs = told.choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"] and logprobs.text_offset == [0, 1, 1]
    assert [set(one) for one in logprobs.top_logprobs] == [{token} for token in logprobs.tokens]


def test_the_client_that_does_not_block(server):
    async def both() -> tuple[str, str, list]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def streamed() -> str:
                text = ""
                made = await client.chat.completions.create(
                    model="scripted", messages=MESSAGES, max_tokens=6, stream=True
                )
                async for chunk in made:
                    text += chunk.choices[0].delta.content or ""
                return text

            whole, text = await asyncio.gather(
                client.completions.create(model="scripted", prompt="abc", max_tokens=6), streamed()
            )
            return whole.choices[0].text, text, [model.id async for model in client.models.list()]

    assert asyncio.run(both()) == ("abcabc", PROMPT[:6], ["scripted"])


def test_a_wrong_key_is_an_authentication_error(start_server):
    with start_server(ServerSettings(api_key="right")) as keyed, keyed.openai_client() as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert client.with_options(api_key="right").models.list().data[0].id == "scripted"


def test_an_error_in_the_middle_of_a_stream_is_raised(client):
    made = client.completions.create(model="scripted", prompt="fail now", stream=True)
    with pytest.raises(openai.APIError, match="the scripted failure"):
        list(made)


class Answer(BaseModel):
    name: str
    sizes: list[int]


@pytest.mark.parametrize("beta", slow_after(1, [False, True]))
def test_parsing_into_a_model(client, server, beta):
    """The scripted engine answers with the object in the prompt; that the schema arrives is what is tested."""
    completions = client.beta.chat.completions if beta else client.chat.completions
    made = completions.parse(
        model="scripted", messages=[{"role": "user", "content": 'give me {"name": "ü", "sizes": [1, 2]} please'}],
        response_format=Answer,
    )  # fmt: skip
    assert made.choices[0].message.parsed == Answer(name="ü", sizes=[1, 2])
    assert made.choices[0].finish_reason == "stop"
    schema = server.engine.submitted[-1].sampling.json_schema
    assert '"sizes"' in schema and '"additionalProperties":false' in schema


def test_parsing_a_stream(client):
    messages = [{"role": "user", "content": '{"name": "x", "sizes": []}'}]
    with client.chat.completions.stream(model="scripted", messages=messages, response_format=Answer) as made:
        kinds = [event.type for event in made]
        assert made.get_final_completion().choices[0].message.parsed == Answer(name="x", sizes=[])
    assert "content.delta" in kinds and kinds[-1] == "content.done"
