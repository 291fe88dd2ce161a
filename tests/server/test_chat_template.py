"""How a chat becomes a prompt, over HTTP with a real tokenizer: the model's template and a client's, bounded."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import AdaServeError, QueueFullError, RequestError
from adaserve_jax.models import chat_prompt, template_process
from adaserve_jax.models.chat_prompt import ChatPrompt, TemplateProcesses
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.models.checkpoints import byte_tokenizer, write_tokenizer
from tests.server.scripted import ScriptedEngine
from tests.slow import slow_after
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tom  has"}, {"role": "assistant", "content": " 3 "}]
TEMPLATE = (
    "{{ bos_token }}{%- for m in messages %}\n    [{{ m.role }}]{{ m['content'] }}{% if m.role == 'x' %}{% break %}"
    "{% endif %}\n{%- endfor %}{{ kind | default('') | tojson }}{{ documents | default([], true) | length }}"
    "{{ reasoning_effort }}{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    around = byte_tokenizer()
    end = "<|endoftext|>"
    around.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, around.token_to_id(end))])
    write_tokenizer(folder, around, TEMPLATE)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(EngineConfig(target="models/scripted"))
    engine.vocab_size = 512  # that of the tokenizer, or more
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine, tokenizer: Tokenizer, serve_engine) -> Iterator[Any]:
    with serve_engine(engine, tokenizer, ServerSettings(trust_request_chat_template=True)) as server:
        yield server


def prompt_of(served: Any, tokenizer: Tokenizer, **fields: Any) -> str:
    answer = served.post(CHAT, messages=MESSAGES, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-adaserve-warning" not in answer.headers
    ids = served.engine.submitted[-1].prompt_ids
    return b"".join(s if isinstance(s := tokenizer.spelled(i), bytes) else s.encode() for i in ids).decode()


def error_of(served: Any, **fields: Any) -> dict[str, Any]:
    refused = served.post(CHAT, messages=MESSAGES, max_tokens=1, **fields)
    assert refused.status_code == 400, refused.text
    return refused.json()["error"]


TALK = "[user]Tom  has    [assistant] 3 "


ENDS = [
    ({}, '""0[assistant]'),
    ({"continue_final_message": True}, None),
    ({"chat_template_kwargs": {"kind": "<ü>"}}, '"<ü>"0[assistant]'),
    ({"documents": [{"title": "a", "text": "b"}]}, '""1[assistant]'),
    ({"add_generation_prompt": False}, '""0'),
    ({"continue_final_message": True, "add_generation_prompt": False}, None),
    ({"continue_final_message": False, "add_generation_prompt": True}, '""0[assistant]'),
    ({"chat_template_kwargs": {"kind": [1, None]}}, "[1, null]0[assistant]"),
    ({"reasoning_effort": "low"}, '""0low[assistant]'),
    ({"reasoning_effort": "none"}, '""0none quick[assistant]'),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, '""0none[assistant]'),
]


@pytest.mark.parametrize(("fields", "end"), ENDS)
def test_a_template_gets_what_the_request_says(served, tokenizer: Tokenizer, fields, end):
    prompt = prompt_of(served, tokenizer, **fields)
    assert prompt.endswith(TALK + end if end is not None else TALK), prompt


@pytest.mark.parametrize(("fields", "end"), slow_after(4, ENDS, several=True))
def test_a_template_of_the_client_gets_the_same(served, tokenizer: Tokenizer, fields, end):
    """Both ways of rendering agree, to the last space."""
    prompt = prompt_of(served, tokenizer, **fields, chat_template=TEMPLATE)
    assert prompt.endswith(TALK + end if end is not None else TALK), prompt


def test_marks_of_answers_for_training_are_read_as_transformers_reads_them(engine, serve_engine, tmp_path: Path):
    template = (
        "{% set n = 0 %}{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n"
        "{{ m.content }}{% set n = 1 %}{{ n }}\n  {% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{{ n }}"
        "{% endfor %}"
    )
    write_tokenizer(tmp_path, byte_tokenizer(), template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with serve_engine(engine, tokenizer, ServerSettings(trust_request_chat_template=True)) as server:
        own = prompt_of(server, tokenizer)
        assert own == prompt_of(server, tokenizer, chat_template=template) == "Tom  has0 3 1\n0"
        error = error_of(server, chat_template="{% generation %}{{ messages }}")
        assert "endgeneration" in error["message"]


def test_tools_go_through_the_template_that_is_used(served, tokenizer: Tokenizer):
    """One that knows tools gets them as they are; for any other they stand in a message. Cut and open ends stay."""
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    told = prompt_of(served, tokenizer, **tools, continue_final_message=True)
    assert told.endswith(TALK) and '[system]You can call these functions:\n{"name": "f", "parameters"' in told
    assert prompt_of(served, tokenizer, **tools, continue_final_message=True, chat_template=TEMPLATE) == told
    shown = prompt_of(served, tokenizer, **tools, chat_template="{{ tools | tojson }}" + TEMPLATE)
    assert shown.startswith('[{"type": "function", "function": {') and shown.endswith(TALK + '""0[assistant]')
    assert '"name": "f"' in shown and "You can call" not in shown
    assert prompt_of(served, tokenizer, **tools, truncate_prompt_tokens=20) == shown[-20:]


def test_names_of_speakers_reach_the_template(served):
    """Whether it knows tools or not; the result of a tool is told without where it does not."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "s", "name": "rules"},
        {"role": "user", "content": "u", "name": "Ana"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r", "name": "f"},
    ]
    names = "{% for m in messages %}{{ m.role }}={{ m.name }} {% endfor %}"
    for template, shown in (
        (names, b"system=rules user=Ana assistant= user= "),
        (names + "{% if tools %}{% endif %}", b"system=rules user=Ana assistant= tool=f "),
    ):
        tool = {"type": "function", "function": {"name": "f"}}
        answer = served.post(CHAT, messages=turns, tools=[tool], max_tokens=1, chat_template=template)
        assert answer.status_code == 200, answer.text
        ids = served.engine.submitted[-1].prompt_ids
        assert b"".join(map(served.state.tokenizer.spelled, ids)) == shown


def test_a_template_without_tools_gets_letters_as_they_are(served):
    """In the tools that are listed, and in calls that were made."""
    tool = {"type": "function", "function": {"name": "f", "description": "Wörter, 語"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "Zürich, \\u8a9e"}'}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    assert served.post(CHAT, messages=turns, tools=[tool], max_tokens=1).status_code == 200
    ids = served.engine.submitted[-1].prompt_ids
    text = b"".join(s if isinstance(s := served.state.tokenizer.spelled(i), bytes) else b"" for i in ids).decode()
    assert '"description": "Wörter, 語"' in text and '{"a": "Zürich, 語"}' in text and "\\u" not in text


def test_a_tool_is_shown_in_the_order_that_models_were_trained_on(served, tokenizer: Tokenizer):
    """Whatever order the client's own members had; its schema stays as it is."""
    schema = '{"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}, "a": {"default": null}}}'
    told = {"parameters": json.loads(schema), "description": "Says.", "name": "f"}
    template = "{{ tools | tojson }}" + TEMPLATE
    shown = prompt_of(served, tokenizer, tools=[{"function": told, "type": "function"}], chat_template=template)
    function = f'{{"name": "f", "description": "Says.", "parameters": {schema}}}'
    assert shown.startswith(f'[{{"type": "function", "function": {function}}}]'), shown


def test_special_tokens_are_those_of_the_template_unless_they_are_asked_for(served, tokenizer: Tokenizer):
    text = prompt_of(served, tokenizer)
    for wanted in (True, False):
        assert prompt_of(served, tokenizer, add_special_tokens=wanted) == "<|endoftext|>" * wanted + text
        assert served.engine.submitted[-1].prompt_ids == tokenizer.encode(text, wanted)
    for wanted in (True, False):
        served.post(prompt="Tom", max_tokens=1, add_special_tokens=wanted)
        assert served.engine.submitted[-1].prompt_ids == tokenizer.encode("Tom", wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"kind": "a"}},
        {"reasoning_effort": "low"},
        {"documents": [{"title": "a", "text": "b"}]},
        {"chat_template": "{{ messages[0].content }}"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_tokenize_gives_the_tokens_of_the_chat(served, fields):
    def tokens(**fields: Any) -> list[int]:
        answer = served.post("/tokenize", messages=MESSAGES, **fields)
        assert answer.status_code == 200 and "x-adaserve-warning" not in answer.headers
        return answer.json()["tokens"]

    served.post(CHAT, messages=MESSAGES, max_tokens=1, **fields)
    assert tokens(**fields) == served.engine.submitted[-1].prompt_ids != tokens()


def test_tokenize_gives_the_tokens_of_a_prompt(served, tokenizer: Tokenizer):
    for wanted in (None, True, False):
        answer = served.post("/tokenize", prompt="Tom", add_special_tokens=wanted)
        assert answer.json()["tokens"] == tokenizer.encode("Tom", wanted is not False)
    refused = served.post("/tokenize", messages=MESSAGES, chat_template_kwargs={"tools": 1}).json()["error"]
    assert refused["param"] == "chat_template_kwargs"


def test_no_variable_reaches_an_option_of_the_library(served):
    from transformers import PreTrainedTokenizerBase

    options = signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"self", "kwargs"}
    for name in options:
        answer = served.post("/tokenize", messages=MESSAGES, chat_template_kwargs={name: None})
        assert answer.status_code == 400 and repr(name) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt",
         "must be false or left out where continue_final_message is true"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs",
         "chat_template_kwargs must hold variables of the template, got 'chat_template'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "got 'tokenize'"),
        ({"chat_template_kwargs": {"a b": True}}, "chat_template_kwargs", "got 'a b'"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "valid dictionary"),
        ({"documents": ["x"]}, "documents", "valid dictionary"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt", "valid boolean"),
        ({"chat_template": "{% if %}"}, "chat_template",
         "chat_template must be a Jinja template that renders these messages: Expected an expression"),
        ({"chat_template": "{{" * 32_000}, "chat_template", "maximum recursion depth"),
        ({"chat_template": "x" * 65_537}, "chat_template", "at most 65536 characters, got 65537"),
        ({"chat_template": "{{ messages.__class__.__mro__ }}"}, "chat_template", "access to attribute '__class__'"),
        ({"chat_template": "{{ 'x' * 10 ** 10 }}"}, "chat_template", "MemoryError"),
        ({"chat_template": "{{ '%0999999999d' | format(1) }}"}, "chat_template", "MemoryError"),
        ({"chat_template": "{{ 'x' * 5 * 10 ** 6 }}"}, "chat_template", "its text is longer than 4194304 characters"),
        ({"chat_template": "{{ messages[0].role }}", "continue_final_message": True}, "chat_template",
         "it does not show the final message as it is, which continue_final_message needs"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused(served, fields, param, text):
    error = error_of(served, **fields)
    assert error["param"] == param and text in error["message"], error


def test_a_template_that_takes_too_long_is_refused(served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_prompt, "CPU_LIMIT_S", 1)
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    error = error_of(served, chat_template=template)
    assert error["param"] == "chat_template" and "it takes more than 1 s or 512 MiB" in error["message"], error


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
    ],
)
def test_what_the_sandbox_of_clients_templates_refuses(template: str, text: str):
    """Render in this process; a server gives what the sandbox says as the reason of its refusal."""
    sandbox = template_process.environment()
    with pytest.raises(Exception, match=text):
        template_process.render(sandbox, template, {"messages": MESSAGES}, chat_prompt.MAX_RENDERED_CHARS)


def test_variables_that_break_the_models_template_are_the_callers_error(engine, serve_engine, tmp_path: Path):
    write_tokenizer(tmp_path, byte_tokenizer(), "{{ messages[0].content }}{{ kind + 1 if kind else '' }}")
    with serve_engine(engine, Tokenizer.from_folder(tmp_path), ServerSettings()) as server:
        assert server.post(CHAT, messages=MESSAGES, max_tokens=1).status_code == 200
        error = error_of(server, chat_template_kwargs={"kind": "a"})
        assert (error["param"], error["code"]) == ("messages", "invalid_messages")
        error = error_of(server, continue_final_message=True)
        assert error["code"] == "invalid_messages"


def test_a_client_may_send_no_template_unless_the_server_trusts_it(server):
    error = server.post(CHAT, messages=MESSAGES, chat_template="{{ messages }}").json()["error"]
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "this server runs without --trust-request-chat-template" in error["message"]


@pytest.mark.parametrize("at_once", [0, 1])
def test_a_template_that_has_no_turn_or_no_time_left_is_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(chat_prompt, "WALL_LIMIT_S", 0.1)
    monkeypatch.setattr(chat_prompt, "AT_ONCE", at_once)
    with pytest.raises(QueueFullError, match="too many chat templates are being rendered; retry later"):
        TemplateProcesses().render(ChatPrompt(template="x"), MESSAGES, {})


def test_long_inputs_do_not_wait_for_the_templates_of_others(
    tokenizer: Tokenizer, serve_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """More templates wait than the server has threads for long inputs."""
    python, begun, gate = (tmp_path / name for name in ("python", "begun", "gate"))
    python.write_text(f"#!/bin/sh\n: > {begun}\nwhile [ ! -e {gate} ]; do /bin/sleep 0.05; done\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    engine = ScriptedEngine(EngineConfig(target="long"))
    engine.vocab_size = 512
    engine.start()
    settings = ServerSettings(trust_request_chat_template=True)
    with serve_engine(engine, tokenizer, settings) as server, ThreadPoolExecutor(40) as clients:
        post = partial(server.post, CHAT, messages=MESSAGES, max_tokens=1, chat_template="x")
        waiting = [clients.submit(post) for _ in range(40)]
        wait_until(begun.exists)
        assert server.post("/tokenize", prompt="a" * 20_000).status_code == 200
        gate.touch()
        assert 200 not in {each.result().status_code for each in waiting}
    engine.close()


def test_the_wait_and_the_process_have_one_deadline(monkeypatch: pytest.MonkeyPatch):
    taken, given = [], []

    class Places:
        """Lets nobody through for so long as the caller may wait, and then does."""

        def __init__(self, _: int):
            pass

        def acquire(self, timeout: float) -> bool:
            taken.append(timeout)
            return not threading.Event().wait(timeout)

        def release(self) -> None:
            pass

    def run(*_: Any, timeout: float, **__: Any) -> Any:
        given.append(timeout)
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(chat_prompt, "WALL_LIMIT_S", 0.1)
    monkeypatch.setattr("threading.Semaphore", Places)
    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(QueueFullError, match="too many chat templates are being rendered; retry later"):
        TemplateProcesses().render(ChatPrompt(template="x"), MESSAGES, {})
    assert taken == pytest.approx([0.1]) and given[0] <= 0


def test_a_process_that_fails_itself_is_not_the_templates_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    python = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(python))

    def render(program: str) -> str:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
        return TemplateProcesses().render(ChatPrompt(template="x"), MESSAGES, {})

    for program in ("echo MemoryError >&2; exit 1", "kill -9 $$"):
        with pytest.raises(RequestError, match="it takes more than 2 s or 512 MiB"):
            render(program)
    assert not caplog.messages
    with pytest.raises(AdaServeError, match="the process that renders chat templates failed; the server's") as caught:
        render("echo no module named jinja2 >&2; exit 1")
    assert not isinstance(caught.value, RequestError) and caught.value.code == "engine_error"
    assert caplog.messages == ["the process of a chat template ended with status 1: no module named jinja2"]


def test_a_client_can_bring_the_template_that_a_model_lacks(engine, serve_engine, tmp_path: Path):
    write_tokenizer(tmp_path, byte_tokenizer(), None)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with serve_engine(engine, tokenizer, ServerSettings(trust_request_chat_template=True)) as server:
        assert error_of(server)["code"] == "no_chat_template"
        assert prompt_of(server, tokenizer, chat_template="Q: {{ messages[0].content }}") == "Q: Tom  has"
