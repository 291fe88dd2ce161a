"""What a request leaves behind that begins in part, or not at all, and where long texts are worked on."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from adaserve_jax.constraints.tool_formats import FORMATS
from adaserve_jax.models.chat_prompt import PLAIN_CHAT
from adaserve_jax.server.conversation import MAX_ARGUMENTS, encode_chat
from adaserve_jax.server.errors import ApiError
from adaserve_jax.server.formatting import CompletionFormatter
from adaserve_jax.server.parse import LONG_TEXT
from adaserve_jax.server.schema import CalledFunction, Message, MessageToolCall
from adaserve_jax.server.settings import KeySettings, ServerSettings
from tests.server.scripted import ByteTokenizer
from tests.waiting import wait_until

KEY = KeySettings("team", "team", tokens_per_minute=60_000)
HEADERS = {"authorization": "Bearer team"}


@pytest.fixture
def keyed(start_server):
    with start_server(ServerSettings(keys=(KEY,))) as server:
        yield server


def post(server, **body):
    return server.http.post("/v1/completions", json=body, headers=HEADERS)


def check_all_given_back(server) -> None:
    account = server.state.keyring.find(b"team")
    wait_until(lambda: server.state.slots.used == 0 and account.in_flight == 0 and not server.state.in_flight)
    assert server.state.slots.waiting == []
    assert account._tokens.take(60_000 - 60) == 0, "what was charged is there again, but for prompts that began"


@pytest.mark.parametrize(("word", "status"), [("refuse", 400), ("full", 429), ("bug", 500)])
def test_each_choice_is_told_once_when_a_later_prompt_cannot_begin(keyed, word, status):
    told = []
    keyed.state.observers.append(told.append)
    answer = post(keyed, prompt=["slow a", "slow b", f"{word} c", "slow d"], n=2, max_tokens=300)
    assert answer.status_code == status
    check_all_given_back(keyed)
    rejected = [] if word == "bug" else [4, 5, 6, 7]
    assert sorted((each.index, each.ending) for each in told) == [
        *((index, "abort") for index in range(4)), *((index, "rejected") for index in rejected),
    ]  # fmt: skip


def test_what_cannot_be_shown_costs_no_tokens(keyed, monkeypatch):
    def fails(*_) -> str:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(keyed.state._tokenizer, "decode", fails)
        assert post(keyed, prompt=[65, 66], echo=True, max_tokens=100).status_code == 500
    check_all_given_back(keyed)


def test_a_failure_to_count_keeps_no_answer_from_its_client(keyed, monkeypatch):
    def fails(*_) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(keyed.state.metrics, "observe_tokens", fails)
        patch.setattr(keyed.state.metrics, "observe_end", fails)
        assert post(keyed, prompt="ab", max_tokens=9).json()["choices"][0]["text"] == "ababababa"
    wait_until(lambda: keyed.state.slots.used == 0)


class Noting(ByteTokenizer):
    """Which threads worked."""

    def __init__(self):
        self.threads: list[threading.Thread] = []

    def note(self) -> None:
        self.threads.append(threading.current_thread())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.note()
        return super().encode(text)

    def decode(self, ids: list[int]) -> str:
        self.note()
        return super().decode(ids)

    def spelled(self, token_id: int) -> bytes:
        self.note()
        return super().spelled(token_id)


@pytest.fixture(scope="module")
def noting(start_server):
    with start_server() as server:
        server.state._tokenizer = Noting()
        yield server


LONG = "a" * (LONG_TEXT + 1)
ECHO = {"echo": True, "max_tokens": 1}
TURN = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}


@pytest.mark.parametrize(
    ("path", "short", "long"),
    [
        ("/v1/completions", {"prompt": ["a" * 100] * 3}, {"prompt": ["a" * 100] * (LONG_TEXT // 100 + 1)}),
        ("/v1/completions", ECHO | {"prompt": [65]}, ECHO | {"prompt": [[65] * 100] * (LONG_TEXT // 100 + 1)}),
        ("/tokenize", {"prompt": "a"}, {"prompt": LONG}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True},
         {"prompt": LONG, "return_token_strs": True}),
        ("/detokenize", {"tokens": [65]}, {"tokens": [65] * (LONG_TEXT + 1)}),
        *(("/tokenize", {"messages": [TURN]}, {"messages": [TURN | beside]}) for beside in (
            {"content": LONG}, {"name": LONG}, {"reasoning_content": LONG}, {"tool_calls": [CALL]},
        )),
        ("/tokenize", {"messages": [TURN]}, {"messages": [TURN], "documents": [{"text": LONG}]}),
        ("/tokenize", {"messages": [TURN]}, {"messages": [TURN], "chat_template_kwargs": {"a": [[{LONG: 1}]]}}),
    ],
)  # fmt: skip
def test_long_texts_are_worked_on_apart(noting, path, short, long):
    tokenizer = noting.state._tokenizer
    tokenizer.threads.clear()
    assert noting.post(path, **short).status_code == 200
    (loop,) = set(tokenizer.threads)
    tokenizer.threads.clear()
    assert noting.post(path, **long).status_code == 200
    assert tokenizer.threads and loop not in tokenizer.threads


def test_arguments_of_very_many_values_are_not_parsed() -> None:
    """In a context that would hold their text."""
    call = MessageToolCall(function=CalledFunction(name="f", arguments=f"[{'[],' * MAX_ARGUMENTS}[]]"))
    spoken = Message(role="assistant", tool_calls=[call])
    where = re.escape(f"messages[0].tool_calls[0].function.arguments must hold at most {MAX_ARGUMENTS} lists")
    with pytest.raises(ApiError, match=where):
        asyncio.run(encode_chat(ByteTokenizer(), [spoken], FORMATS["hermes"], [], PLAIN_CHAT, ThreadPoolExecutor(1)))


def test_long_answers_are_written_apart(server, monkeypatch):
    """One with many log probabilities is long too."""
    threads = []

    def noted(*given):
        threads.append(threading.current_thread())
        return CompletionFormatter.event(*given[:2], usage=given[2], metrics=given[3])

    monkeypatch.setattr(CompletionFormatter, "full", noted)
    for short in ({"max_tokens": 3, "logprobs": 5}, {"max_tokens": 500}, {"max_tokens": 3, "n": 4}):
        assert server.post(prompt="ab", **short).status_code == 200
    (loop,) = set(threads)
    threads.clear()
    for long in ({"max_tokens": 498, "n": 4, "logprobs": 5}, {"max_tokens": 498, "n": 20}):
        choices = server.post(prompt='ab"choices":[]', echo=True, **long).json()["choices"]
        assert [choice["index"] for choice in choices] == [*range(long["n"])]
        assert len({choice["text"] for choice in choices}) == 1 and len(choices[0]["text"]) == 14 + 498
    assert len(threads) == 2 and loop not in threads


def test_answers_about_tokens_are_as_before(server):
    assert server.post("/tokenize", prompt="hé", return_token_strs=True).json() == {
        "tokens": [104, 195, 169], "count": 3, "max_model_len": 512, "token_strs": ["h", "\\xc3", "\\xa9"],
    }  # fmt: skip
    refused = server.post("/detokenize", tokens=[65] * (LONG_TEXT + 1) + [256])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    answer = server.post("/detokenize", tokens=[65], colour=1)
    assert answer.headers["content-type"] == "application/json" and "colour" in answer.headers["x-adaserve-warning"]
