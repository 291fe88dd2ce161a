"""The Responses API by the official client: texts, calls and forms, whole and streamed, in the order of its events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.models.chat_prompt import PLAIN_CHAT, ChatPrompt
from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.server.conftest import Running, running
from tests.server.scripted import ByteTokenizer, logprob_of
from tests.waiting import wait_until

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPENING = ["response.created", "response.in_progress"]
SAY = {"type": "function", "name": "say", "parameters": {"type": "object"}, "strict": True}
TOOLS = [SAY, {"type": "function", "name": "now", "description": "The time"}]
ARGUMENTS = ['{"t": "} \\" {\\\\", "more": {"é": []}}', "{}"]
CALLS = FORMATS["hermes"].write([("say", ARGUMENTS[0]), ("now", ARGUMENTS[1])])


def events_of(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, with framing, numbers and each event's shape checked by the client's own types."""
    with server.http.stream("POST", PATH, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        *framed, done, rest = answer.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for number, frame in enumerate(framed):
        named, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (named, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_python(event)
        found.append(event)
    return found


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def normal(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is fresh in each: names, times and measurements."""
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at", "metrics")}
    kept["output"] = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return kept


def test_a_text_and_every_field_of_its_response(client, server):
    made = client.responses.with_raw_response.create(
        model="scripted", input="hello", instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9,
        metadata={"a": "b"}, user="me", service_tier="flex", reasoning={"effort": "low"}, truncation="disabled",
        extra_body={"slo_tpot_ms": 40, "seed": 3, "top_k": 5, "stop": ["zzz"], "priority": 2},
    )  # fmt: skip
    assert "x-adaserve-warning" not in made.headers
    request = server.engine.submitted[-1]
    assert bytes(request.prompt_ids).decode() == "system: Be brief.\nuser: hello\nassistant:"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 5)
    assert (sampling.seed, sampling.stop, sampling.n, request.priority) == (3, ("zzz",), 1, 2)
    assert (request.slo.tpot_ms, request.slo_class) == (40, "batch")
    body = json.loads(made.text)
    Response.model_validate(body)
    answer = made.parse()
    assert answer.output_text == "system: B" and answer.id.startswith("resp_") and answer.model == "scripted"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (40, 9, 49)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 0)
    assert answer.metrics["slo"]["tpot_target_ms"] == 40 and answer.metrics["slo"]["met"] is True
    repeated = {
        "instructions": "Be brief.", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"},
        "user": "me", "service_tier": "flex", "truncation": "disabled", "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": True, "store": False, "background": False, "previous_response_id": None,
        "text": {"format": {"type": "text"}, "verbosity": None},
    }  # fmt: skip
    assert {name: body[name] for name in repeated} == repeated and body["reasoning"]["effort"] == "low"


def test_a_response_that_ends_by_itself_is_completed(client):
    """Where JSON is asked for, the scripted engine ends after the object in the prompt."""
    answer = client.responses.create(input='{"a": 1}', text={"format": {"type": "json_object"}})
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, '{"a": 1}')
    assert answer.completed_at >= answer.created_at and answer.output[0].status == "completed"


def test_the_events_of_a_text_in_their_order(server):
    """Seven tokens, three a step: the text comes in three pieces."""
    events = events_of(server, input="é!", max_output_tokens=8, slo_tpot_ms=50)
    assert kinds_of(events) == [
        *OPENING, "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    added, part, *deltas, text, part_done, item_done, last = events[2:]
    name = added["item"]["id"]
    assert added["item"] == {
        "id": name, "type": "message", "role": "assistant", "status": "in_progress", "content": [],
    }  # fmt: skip
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert "".join(event["delta"] for event in deltas) == text["text"] == part_done["part"]["text"] == "user: é"
    assert item_done["item"] == last["response"]["output"][0] and item_done["item"]["content"] == [part_done["part"]]
    places = {(event["item_id"], event["output_index"], event["content_index"]) for event in events[3:9]}
    assert places == {(name, 0, 0)}
    states = [event["response"]["status"] for event in events if "response" in event]
    assert states == ["in_progress", "in_progress", "incomplete"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert last["response"]["metrics"]["slo"]["met"] is True and last["response"]["usage"]["output_tokens"] == 8


def test_the_events_of_a_text_and_two_calls_in_their_order(server):
    body = {"input": f"Wait. {CALLS}", "tools": TOOLS}
    events = events_of(server, **body)
    kinds = kinds_of(events)
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1] or not kind.endswith(".delta")]
    call = [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    assert once == [
        *OPENING, "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        *call, *call, "response.completed",
    ]  # fmt: skip
    assert kinds.count("response.function_call_arguments.delta") > 4
    for index, (name, arguments) in enumerate(zip(("say", "now"), ARGUMENTS, strict=True), 1):
        one = [event for event in events if event.get("output_index") == index]
        added, *deltas, done, ended = one
        assert (added["item"]["name"], added["item"]["arguments"], added["item"]["status"]) == (name, "", "in_progress")
        assert "".join(event["delta"] for event in deltas) == done["arguments"] == arguments
        assert {event["item_id"] for event in (*deltas, done)} == {added["item"]["id"]}
        assert ended["item"] == {**added["item"], "arguments": arguments, "status": "completed"}
        assert ended["item"]["call_id"].startswith("call_") and added["item"]["id"].startswith("fc_")
    whole = server.post(PATH, **body).json()
    assert normal(whole) == normal(events[-1]["response"])
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "Wait. "


def test_a_call_that_is_cut_is_incomplete(server):
    most = len(CALLS[: CALLS.index("more")].encode()) - 3
    whole = server.post(PATH, input=CALLS, tools=TOOLS, max_output_tokens=most).json()
    (call,) = whole["output"]
    assert (whole["status"], call["status"], call["name"]) == ("incomplete", "incomplete", "say")
    assert len(call["arguments"]) > 3 and ARGUMENTS[0].startswith(call["arguments"])
    events = events_of(server, input=CALLS, tools=TOOLS, max_output_tokens=most)
    assert normal(events[-1]["response"]) == normal(whole) and events[-1]["type"] == "response.incomplete"


def test_an_answer_of_nothing_is_an_empty_message(server):
    """With tools the scripted engine answers with what the user said."""
    events = events_of(server, input="", tools=TOOLS)
    assert kinds_of(events) == [
        *OPENING, "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    (message,) = events[-1]["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("completed", "")


def test_the_clients_own_stream_reads_text_and_calls(client):
    with client.responses.stream(model="scripted", input=f"Wait. {CALLS}", tools=TOOLS) as made:
        snapshots = [event.snapshot for event in made if event.type == "response.function_call_arguments.delta"]
        final = made.get_final_response()
    assert ARGUMENTS[0] in snapshots and final.output_text == "Wait. "
    assert [(item.name, item.arguments) for item in final.output[1:]] == [("say", ARGUMENTS[0]), ("now", "{}")]


class Answer(BaseModel):
    name: str
    sizes: list[int]


def test_parsing_into_a_model(client, server):
    made = client.responses.parse(
        model="scripted", input='give me {"name": "ü", "sizes": [1, 2]} please', text_format=Answer
    )
    assert made.output_parsed == Answer(name="ü", sizes=[1, 2]) and made.status == "completed"
    assert '"sizes"' in server.engine.submitted[-1].sampling.json_schema
    assert made.text.format.name == "Answer" and made.text.format.schema_["required"] == ["name", "sizes"]
    with client.responses.stream(model="scripted", input='{"name": "x", "sizes": []}', text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(name="x", sizes=[])


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_log_probabilities_are_those_of_the_text(server, fields):
    events = events_of(server, input="é!", max_output_tokens=9, **fields)
    text = events[-1]["response"]["output"][0]["content"][0]
    top = fields.get("top_logprobs", 0)
    assert [one["bytes"] for one in text["logprobs"]] == [[byte] for byte in "user: é!".encode()]
    assert [one["logprob"] for one in text["logprobs"]] == [logprob_of(b, 0).logprob for b in "user: é!".encode()]
    assert {len(one["top_logprobs"]) for one in text["logprobs"]} == {top}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == text["logprobs"]
    whole = server.post(PATH, input="é!", max_output_tokens=9, **fields).json()
    assert whole["output"][0]["content"][0] == text


def test_calls_have_no_log_probabilities(server):
    whole = server.post(PATH, input=f"Wait é. {CALLS}", tools=TOOLS, top_logprobs=0, include=[
        "message.output_text.logprobs", "reasoning.encrypted_content",
    ]).json()  # fmt: skip
    (text,) = whole["output"][0]["content"]
    assert bytes(byte for one in text["logprobs"] for byte in one["bytes"]).decode() == text["text"] == "Wait é. "


def test_tools_of_other_types_are_left_out_and_named(server):
    answer = server.post(PATH, input="hello", tools=[{"type": "web_search", "filters": {}}, *TOOLS])
    assert answer.json()["tools"] == server.post(PATH, input="hello", tools=TOOLS).json()["tools"]
    assert answer.headers["x-adaserve-warning"] == "ignored fields: tools[0]"
    alone = server.post(PATH, input="hello", tools=[{"type": "local_shell"}])
    plain = server.post(PATH, input="hello")
    assert alone.json()["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_and_what_the_input_begins_with_are_one_system_message(server, role):
    """Many chat templates take one and refuse a second."""
    items = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "hello"}]
    server.post(PATH, instructions="Be kind.", input=items)
    prompt = bytes(server.engine.submitted[-1].prompt_ids).decode()
    server.post(PATH, instructions="Be kind.\n\nBe brief.", input="hello")
    assert prompt == bytes(server.engine.submitted[-1].prompt_ids).decode()
    assert prompt.count("system") == 1


CONVERSATION = [
    {"role": "user", "content": [{"type": "input_text", "text": "How is"}, {"type": "input_text", "text": "Oslo?"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "say", "arguments": '{"text": "Oslo"}'},
    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "snow"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    {"role": "developer", "content": "Answer."},
]  # fmt: skip
AS_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How is\nOslo?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "say", "arguments": '{"text": "Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "snow"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "developer", "content": "Answer."},
]  # fmt: skip


@pytest.fixture(scope="module")
def demo(demo_engine, serve_engine) -> Iterator[Running]:
    with serve_engine(demo_engine, load_tokenizer("demo"), ServerSettings()) as made:
        yield made


def test_a_conversation_is_the_same_by_both_apis(demo):
    """The embedded pair gets the same tokens, and so answers with the same text."""
    with demo.openai_client() as client:
        chat = client.chat.completions.create(model="demo", messages=AS_CHAT, seed=4, max_tokens=40)
        same = client.responses.create(
            model="demo", input=CONVERSATION, instructions="Be kind.", max_output_tokens=40, extra_body={"seed": 4}
        )
    assert same.output_text == chat.choices[0].message.content
    assert same.usage.input_tokens == chat.usage.prompt_tokens > 40


def test_an_agent_calls_a_tool_and_goes_on_with_its_result(demo):
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": parameters, "strict": True}]
    fixed: Any = {"model": "demo", "tools": tools, "max_output_tokens": 120, "extra_body": {"seed": 1}}
    with demo.openai_client() as client:
        asked: Any = [{"role": "user", "content": "How is the weather?"}]
        choice: Any = {"type": "function", "name": "weather"}
        made = client.responses.create(**fixed, input=asked, tool_choice=choice)
        (call,) = made.output
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo") and made.status == "completed"
        with client.responses.stream(**fixed, input=asked, tool_choice="required", parallel_tool_calls=False) as stream:
            (streamed,) = stream.get_final_response().output
        assert json.loads(streamed.arguments)["city"] in ("Rome", "Oslo")
        asked += [*made.output, {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}]
        final = client.responses.create(**fixed, input=asked, tool_choice="none")
    assert final.output_text and [item.type for item in final.output] == ["message"]


CONTEXT_IS = "this model's maximum context length is 512 tokens"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": 5}, "input", "input must be a text or a list of items, got 5"),
    ({"input": []}, "input", "input must be a list of at least 1, got []"),
    ({"input": None}, "input", "input must be a text or a list of items, got None"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input",
     "input[0] must be an item of type message, reasoning, function_call or function_call_output (items"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role must be 'user', 'assistant', "),
    ({"input": [{"role": "user"}]}, "input", "input[0].content must be given"),
    ({"input": [{"role": "user", "content": 1}]}, "input", "input[0].content must be a text or a list of parts, got 1"),
    ({"input": ["x"]}, "input", "input[0] must be an item of type"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_image"}]}]}, "input",
     "input[1].content must hold parts of type input_text or output_text, got a part of type 'input_image'"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text"}]}]}, "input",
     "input[0].output must hold parts of type input_text or output_text, got a part without a text"),
    ({"input": [{"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "[" * 70_000}]}, "input",
     f"{CONTEXT_IS}, which input so long exceeds"),
    ({"input": "x\ud800"}, "input", "input must be valid Unicode"),
    ({"user": "\ud800"}, None, "the request's fields must be valid Unicode and not nested too deeply"),
    ({"input": "x" * 10_000}, "input", "this model's maximum context length is 512 tokens, prompt and output together"),
    ({"input": "x" * 100_000}, "input", f"{CONTEXT_IS}, which input so long exceeds in any case"),
    ({"instructions": "x" * 100_000}, "input", f"{CONTEXT_IS}, which input so long exceeds"),
    ({"input": [{"role": "user", "content": "x"}] * 1000}, "input", f"{CONTEXT_IS}, so input must have at"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be an integer from 1 to"),
    ({"max_output_tokens": 600}, "max_output_tokens",
     "this model's maximum context length is 512 tokens, got a prompt of 22 and max_output_tokens 600; lower max_outp"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema must be given when its type is"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": float("inf")}}}}, "text",
     "text.format.schema must be JSON, not nested too deeply and without NaN or infinity"),
    ({"text": {"format": {"type": "text"}}, "regex": "a", "guided_choice": ["a"]}, "regex", "regex must be left out"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "regex must be left out where text.format"),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not implemented: only medium is accepted; say it"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice",
     "tool_choice must be none, auto or left out unless there are tools"),
    ({"tools": [{"name": "f"}]}, "tools", "tools[0] must be a tool with a type, such as function"),
    ({"tools": [{**SAY, "parameters": {"type": "array"}}]}, "tools", "tools[0].parameters must describe an object"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice",
     "tool_choice must name one of the tools say, now, got 'f'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "say"}}}, "tool_choice",
     "tool_choice.name must be given"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice must be none, auto or left out unless there are tools"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be"),
    ({"include": ["all"]}, "include", "include[0] must be 'message.output_text.logprobs'"),
    ({"truncation": "left"}, "truncation", "truncation must be 'auto' or 'disabled', got 'left'"),
    ({"slo_tpot_ms": -1}, "slo_tpot_ms", "slo_tpot_ms must be"),
    ({"stream_options": {"include_obfuscation": False}, "stream": False}, "stream_options",
     "stream_options must be left out unless stream is"),
    ({"model": "gpt-9"}, "model", "model 'gpt-9' is not served here"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_refused_is_named_as_it_came(server, fields, param, message, stream):
    content = json.dumps({"input": "hello", "stream": stream} | fields)
    answer = server.http.post(PATH, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["message"].startswith(message), error
    assert error["param"] == param


class BareTokenizer(ByteTokenizer):
    """Prompts are what was said and nothing else, so that its first word tells the scripted engine what to do."""

    def apply_chat_template(self, messages: list[dict[str, str]], prompt: ChatPrompt = PLAIN_CHAT) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))


@pytest.fixture(scope="module")
def bare() -> Iterator[Running]:
    with running(tokenizer=BareTokenizer()) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "error", "code"), [
    ("refuse this", openai.BadRequestError, "invalid_value"),
    ("late-refuse this", openai.BadRequestError, "invalid_value"),
    ("full queue", openai.RateLimitError, "queue_full"),
    ("late-full queue", openai.RateLimitError, "queue_full"),
    ("bug here", openai.InternalServerError, "internal_error"),
])  # fmt: skip
def test_errors_before_the_first_token_have_their_status(bare, words, error, code, stream):
    with bare.openai_client() as client, pytest.raises(error) as caught:
        client.responses.create(input=words, stream=stream)
    assert (caught.value.code, caught.value.param) == (code, "input" if "refuse" in words else None)
    assert ("retry-after" in caught.value.response.headers) == (code == "queue_full")
    wait_until(lambda: bare.state.slots.used == 0)


def test_a_failure_midway_is_an_event_and_a_status(bare):
    events = events_of(bare, input="fail now", max_output_tokens=30)
    assert kinds_of(events) == [
        *OPENING, "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.failed",
    ]  # fmt: skip
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["error"]["type"]) == (
        "failed", "server_error", "engine_error",
    )  # fmt: skip
    assert failed["error"]["message"] == "the scripted failure" and failed["usage"] is None
    (message,) = failed["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", events[-2]["delta"])
    whole = bare.post(PATH, input="fail now", max_output_tokens=30)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_error")


def test_the_request_counts_in_metrics_and_records_like_a_chat(server):
    told = []
    server.state.observers.append(told.append)
    try:
        server.post(PATH, input="hello", max_output_tokens=4, slo_class="interactive")
        wait_until(lambda: bool(told))
    finally:
        server.state.observers.remove(told.append)
    assert (told[0].origin.operation, told[0].slo_class, told[0].ending) == ("chat", "interactive", "length")


def test_what_is_ignored_is_named_at_any_depth(server):
    fields = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "colour": 1}}
    made = server.post(
        PATH, input="x", max_output_tokens=2, store=True, include=["reasoning.encrypted_content"], **fields
    )
    assert made.headers["x-adaserve-warning"] == "ignored fields: store, reasoning.summary, text.colour"
