"""The official client on the embedded pair: texts, streams, tools in a loop, structured output, Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.chat_client import streamed

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
ASKED = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {
    "type": "object", "additionalProperties": False, "required": ["city"],
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}


class Report(BaseModel):
    city: Literal["Rome", "Oslo"]
    degrees: list[Literal["cold", "warm"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_seed_gives_the_same_text_whole_streamed_and_again(client):
    fields = {"model": client.models.list().data[0].id, "messages": ASKED, "seed": 4, "max_tokens": 24}
    made = client.chat.completions.create(**fields)
    text, _, reason = streamed(client, **fields)
    assert text == made.choices[0].message.content and text
    assert reason == made.choices[0].finish_reason
    again = client.chat.completions.create(**fields, extra_body={"slo_tpot_ms": 5000})
    assert again.choices[0].message.content == text and again.usage == made.usage


def test_a_call_of_a_tool_and_the_answer_to_its_result(client):
    fields = {"model": "demo", "tools": [TOOL], "seed": 2, "max_tokens": 80}
    (choice,) = client.chat.completions.create(**fields, messages=ASKED, tool_choice="required").choices
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    _, calls, _ = streamed(client, **fields, messages=ASKED, tool_choice="required")
    assert calls[0][1:] == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    talk = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    (last,) = client.chat.completions.create(**fields, messages=talk, tool_choice="none").choices
    assert last.message.tool_calls is None and last.message.content


def test_structured_output_is_parsed(client):
    made = client.chat.completions.parse(model="demo", messages=ASKED, response_format=Report, max_tokens=100, seed=1)
    report = made.choices[0].message.parsed
    assert made.choices[0].finish_reason == "stop" and isinstance(report, Report) and len(report.degrees) <= 2


def test_responses_whole_and_streamed(client):
    fields = {"model": "demo", "input": "How is the weather?", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        seen = list(events)
    assert seen[-1].type == f"response.{whole.status}" and seen[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == whole.output_text
    assert whole.usage.output_tokens <= 16 and whole.output_text
