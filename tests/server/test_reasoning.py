"""Thinking in chats: split from the answer by the model's marks, whole and streamed; counted, and left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from adaserve_jax.constraints.reasoning_formats import FORMATS
from adaserve_jax.errors import ConfigError, RequestError
from adaserve_jax.models.chat_prompt import PLAIN_CHAT, ChatPrompt
from adaserve_jax.sampling import SamplingParams, Thinking
from adaserve_jax.server.settings import ServerSettings
from tests.server.conftest import Running, running
from tests.server.scripted import ByteTokenizer
from tests.server.sse import sse

OPENING, CLOSING = 0xFE, 0xFF  # bytes that no UTF-8 has


class MarkedTokenizer(ByteTokenizer):
    """A byte tokenizer with two more tokens, the marks of a format; `opens`: its template begins the thinking."""

    def __init__(self, parser: str = "qwen3", *, opens: bool = False):
        form = FORMATS[parser]
        self._marks = {form.opening: OPENING, form.closing: CLOSING}
        self.chat_template = ByteTokenizer.chat_template + form.opening
        self._end = f"{form.opening}\n" if opens else ""

    def id_of(self, text: str) -> int | None:
        return self._marks.get(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        whole = text.encode()
        for mark, token in self._marks.items():
            whole = whole.replace(mark.encode(), bytes([token]))
        return list(whole)

    def apply_chat_template(self, messages: list[dict[str, str]], prompt: ChatPrompt = PLAIN_CHAT) -> list[int]:
        earlier = "".join(f"thought: {m['reasoning_content']}\n" for m in messages if "reasoning_content" in m)
        ids = [*self.encode(earlier), *super().apply_chat_template(messages, prompt)]
        return ids + self.encode(self._end * prompt.add_generation_prompt)


@pytest.fixture(scope="module", params=FORMATS)
def marked(request: pytest.FixtureRequest) -> Iterator[tuple[Running, str, str]]:
    """A server of a model with marks, and the marks."""
    form = FORMATS[request.param]
    with running(tokenizer=MarkedTokenizer(request.param)) as server:
        yield server, form.opening, form.closing


@pytest.fixture(scope="module")
def thinks() -> Iterator[Running]:
    with running(tokenizer=MarkedTokenizer()) as server:
        yield server


@pytest.fixture(scope="module")
def opened() -> Iterator[Running]:
    """Its template ends with the opening mark and a line break."""
    with running(tokenizer=MarkedTokenizer(opens=True)) as server:
        yield server


def ask(server: Running, text: str, **fields: Any) -> tuple[str | None, str | None, str, int]:
    """Thinking, answer, finish reason and count of thought tokens, the same in a stream and as a whole."""
    one = {"messages": [{"role": "user", "content": text}], **fields}
    answer = server.post("/v1/chat/completions", **one)
    assert answer.status_code == 200, answer.text
    (choice,), usage = answer.json()["choices"], answer.json()["usage"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    parts = {"content": "", "reasoning": "", "reasoning_content": ""}
    sent = sse(server, "/v1/chat/completions", **one, stream_options={"include_usage": True})
    deltas = [each["delta"] for event in sent for each in event["choices"]]
    for delta in deltas:
        for name in parts:
            parts[name] += delta.get(name) or ""
    assert parts["reasoning"] == parts["reasoning_content"] == (message.get("reasoning") or "")
    assert parts["content"] == (message["content"] or "")
    assert sent[-2]["choices"][0].get("stop_reason") == choice.get("stop_reason")
    assert choice.get("stop_reason") == ("\n\n" if "stop" in fields and "\n\n" in text else None)
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert sent[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    return message.get("reasoning"), message["content"], choice["finish_reason"], thought


def test_what_stands_between_the_marks_is_thinking(marked: tuple[Running, str, str]):
    server, opening, closing = marked
    assert ask(server, f"{opening}\nHm é…{closing}\n\nYes é.") == ("\nHm é…", "\n\nYes é.", "stop", 9)


@pytest.mark.parametrize("blank", ["\n", " \n", "\n\n\n"])
def test_white_space_may_stand_before_the_opening_mark(thinks: Running, blank: str):
    assert ask(thinks, f"{blank}<think>a</think>b") == ("a", "b", "stop", 1)
    assert ask(thinks, f"{blank}ab") == (None, f"{blank}ab", "stop", 0)
    assert ask(thinks, blank)[:2] == (None, blank)


def test_a_text_thinks_once_and_at_its_beginning(thinks: Running):
    assert ask(thinks, "a<think>b</think>c")[0] is None
    thought, answer, _, count = ask(thinks, "<think>a<think>b</think>c")
    assert (thought, answer, count) == ("a\N{REPLACEMENT CHARACTER}b", "c", 3)
    assert ask(thinks, "<think></think>c") == (None, "c", "stop", 0)


def test_a_template_that_opens_the_thinking_leaves_only_the_closing_mark(opened: Running):
    assert ask(opened, "Hm.</think>Yes.") == ("Hm.", "Yes.", "stop", 3)
    assert ask(opened, "Hm. What is <b>?") == ("Hm. What is <b>?", None, "stop", 16)


def test_a_mark_in_the_question_opens_nothing(thinks: Running):
    """The scripted answer repeats the question, which has the mark behind its first word."""
    assert ask(thinks, "What is <think>?")[0] is None
    ids = thinks.engine.submitted[-1].prompt_ids
    assert OPENING in ids and not thinks.engine.submitted[-1].sampling.thinking.started


@pytest.mark.parametrize(("said", "started"), [("<think>Hm, ", True), ("<think>Hm.</think>So", False), ("So", False)])
def test_a_message_that_is_continued_says_whether_it_thinks(opened: Running, said: str, started: bool):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    opened.post("/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=1)
    assert opened.engine.submitted[-1].sampling.thinking.started is started


def test_a_limit_of_tokens_ends_the_thinking_too(thinks: Running):
    assert ask(thinks, "<think>Hm, well</think>Yes", max_tokens=5) == ("Hm, ", None, "length", 4)


def test_stop_strings_end_thinking_and_answer(thinks: Running):
    """As in vLLM; one that is begun before a mark is not completed behind it."""
    assert ask(thinks, "<think>a\n\nb</think>c", stop="\n\n") == ("a", None, "stop", 3)
    assert ask(thinks, "<think>a</think>b\n\nc", stop=["\n\n"]) == ("a", "b", "stop", 1)
    assert ask(thinks, "<think>a\n</think>\nb", stop="\n\n") == ("a\n", "\nb", "stop", 2)


def test_thinking_is_left_out_and_counted(thinks: Running):
    text, usage = "<think>Hm.</think>Yes.", []
    for shown in (True, False):
        fields = {"messages": [{"role": "user", "content": text}], "include_reasoning": shown, "logprobs": True}
        body = thinks.post("/v1/chat/completions", **fields).json()
        usage.append(body["usage"])
        (choice,) = body["choices"]
        spelled = bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"])
        streamed = thinks.post("/v1/chat/completions", **fields, stream=True).text
        if shown:
            assert choice["message"]["reasoning"] == "Hm." and "reasoning" in streamed
            assert spelled == b"\xfeHm.\xffYes."
        else:
            assert "reasoning" not in choice["message"] and "reasoning" not in streamed and "H" not in streamed
            assert spelled == b"Yes."
        assert choice["message"]["content"] == "Yes."
    assert usage[0] == usage[1] and usage[0]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_calls_of_tools_come_after_thinking(thinks: Running):
    call = '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "say"}}]
    messages = [{"role": "user", "content": f"<think>Call: {call}?</think>{call}"}]
    with thinks.openai_client() as client:
        (choice,) = client.chat.completions.create(model="scripted", messages=messages, tools=tools).choices
    (made,) = choice.message.tool_calls
    assert (made.function.name, made.function.arguments, choice.finish_reason) == ("say", "{}", "tool_calls")
    assert (choice.message.reasoning, choice.message.content) == (f"Call: {call}?", None)


def test_a_call_in_the_thinking_behind_white_space_is_no_call(thinks: Running):
    call = '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "say"}}]
    assert ask(thinks, f"\n<think>Maybe {call}?</think>No.", tools=tools)[:3] == (f"Maybe {call}?", "No.", "stop")
    assert ask(thinks, "\nNo.", tools=tools)[:3] == (None, "\nNo.", "stop")


def test_an_earlier_answer_brings_its_thinking_to_the_template(thinks: Running, monkeypatch: pytest.MonkeyPatch):
    for name in ("reasoning", "reasoning_content"):
        earlier = {"role": "assistant", "content": "Yes.", name: "Hm."}
        messages = [{"role": "user", "content": "x"}, earlier, {"role": "user", "content": "y"}]
        ids = thinks.post("/tokenize", messages=messages).json()["tokens"]
        assert bytes(ids).startswith(b"thought: Hm.\n")
        monkeypatch.setattr(thinks.state.tokenizer, "chat_template", "<think>")  # it knows no tools
        assert thinks.post("/tokenize", messages=messages).json()["tokens"] == ids
        monkeypatch.undo()
    error = thinks.post("/v1/chat/completions", messages=[{"role": "user", "content": "x", "reasoning": "y"}]).json()
    assert "reasoning_content must be left out unless the role is assistant, got user" in error["error"]["message"]


def events_of(server: Running, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response; test_responses.py shows that the official client reads them."""
    with server.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer:
        lines = answer.read().decode().splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert named == [each["type"] for each in found]
    return found


def test_the_responses_api_has_reasoning_items(thinks: Running):
    call = '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "name": "say"}]
    for text, kinds in (("<think>Hm é.</think>Yes.", ["reasoning", "message"]), ("Yes.", ["message"]),
                        (f"<think>Hm é.</think>{call}", ["reasoning", "function_call"])):  # fmt: skip
        one: dict[str, Any] = {"input": text, "tools": tools, "include": ["message.output_text.logprobs"]}
        body = thinks.post("/v1/responses", **one).json()
        assert [item["type"] for item in body["output"]] == kinds
        assert {item["status"] for item in body["output"]} == {"completed"}
        thought = body["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert thought == (len("Hm é.".encode()) if "reasoning" in kinds else 0)
        if "reasoning" in kinds:
            assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm é."}]
        if "message" in kinds:
            (part,) = body["output"][-1]["content"]
            assert part["text"] == "".join(each["token"] for each in part["logprobs"]) == "Yes."
        events = events_of(thinks, **one)
        shown = [each["delta"] for each in events if each["type"] == "response.reasoning_text.delta"]
        assert "".join(shown) == ("Hm é." if "reasoning" in kinds else "")
        done = [each["text"] for each in events if each["type"] == "response.reasoning_text.done"]
        assert done == ["Hm é."] * ("reasoning" in kinds)
        assert [item["type"] for item in events[-1]["response"]["output"]] == kinds
        assert [each["sequence_number"] for each in events] == [*range(len(events))]
    hidden = thinks.post("/v1/responses", input="<think>Hm.</think>Yes.", include_reasoning=False).json()
    assert [item["type"] for item in hidden["output"]] == ["message"]


def test_thinking_that_is_cut_is_an_incomplete_item(thinks: Running):
    body = thinks.post("/v1/responses", input="<think>Hm.</think>Yes.", max_output_tokens=3).json()
    (item,) = body["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("reasoning", "incomplete", "Hm")
    assert body["status"] == "incomplete"


def test_reasoning_items_come_back_with_the_answer_that_they_led_to(thinks: Running):
    items = thinks.post("/v1/responses", input="<think>Hm.</think>Yes.").json()["output"]
    for later in (items[1:], [{"type": "function_call", "call_id": "c", "name": "say", "arguments": "{}"}]):
        said = [{"role": "user", "content": "x"}, items[0], *later, {"role": "user", "content": "y"}]
        assert thinks.post("/v1/responses", input=said).status_code == 200
        assert bytes(thinks.engine.submitted[-1].prompt_ids).startswith(b"thought: Hm.\n")


def test_reasoning_items_between_an_answer_and_its_calls_come_back_with_them(thinks: Running):
    items = thinks.post("/v1/responses", input="<think>Hm.</think>Yes.").json()["output"]
    again = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": " Ah."}]}
    call = {"type": "function_call", "call_id": "c", "name": "say", "arguments": "{}"}
    said = [{"role": "user", "content": "x"}, *items, again, call, again, call, {"role": "user", "content": "y"}]
    assert thinks.post("/v1/responses", input=said).status_code == 200
    assert bytes(thinks.engine.submitted[-1].prompt_ids).startswith(b"thought: Hm. Ah. Ah.\n")


def test_models_without_marks_and_completions_have_no_thinking(server: Running, thinks: Running):
    body = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "<think>"}], max_tokens=3).json()
    assert "completion_tokens_details" not in body["usage"] and "reasoning" not in body["choices"][0]["message"]
    assert server.engine.submitted[-1].sampling.thinking is None
    thinks.post(prompt="<think>", max_tokens=3)
    assert thinks.engine.submitted[-1].sampling.thinking is None


def test_the_parser_is_named_or_found():
    for parser, found in (("none", None), ("qwen3", (OPENING, CLOSING)), ("auto", (OPENING, CLOSING))):
        with running(ServerSettings(reasoning_parser=parser), MarkedTokenizer()) as made:
            made.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
            thinking = made.engine.submitted[-1].sampling.thinking
            assert (thinking and (thinking.opening, thinking.closing)) == found
    unwritten = MarkedTokenizer()
    unwritten.chat_template = ByteTokenizer.chat_template
    with running(tokenizer=unwritten) as made:
        assert made.state.marks is None
    with (
        pytest.raises(ConfigError, match="reasoning_parser must be a format whose marks are tokens of the model"),
        running(ServerSettings(reasoning_parser="mistral"), MarkedTokenizer()),
    ):
        raise AssertionError("it served")


def test_marks_are_two_different_tokens():
    with pytest.raises(RequestError, match="thinking must be marked by two different token ids, got"):
        Thinking(3, 3)
    wrong: Any = 5
    with pytest.raises(RequestError, match="thinking must be a Thinking, or none, got 5"):
        SamplingParams(thinking=wrong, regex="a")
