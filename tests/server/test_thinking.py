"""Thinking on the embedded pair, whose tokenizer has two marks here: limits that hold, and grammars that begin behind
it, with the same text under every policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.errors import RequestError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.sampling import SamplingParams, Thinking
from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.server.conftest import Running
from tests.slow import slow_after

pytest.importorskip("llguidance", reason="llguidance is not installed; `make test` installs it")

POLICIES = ("ar", "adaserve")
MARKS = {"<think>": 2046, "</think>": 2047}
FIXED = {"messages": [{"role": "user", "content": "Think."}], "temperature": 0.9, "max_tokens": 36}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def marked_tokenizer(folder: Path, *, opens: bool) -> Path:
    """Give the pair's tokenizer the marks in place of its two last tokens, which no other is merged from."""
    source = resolve_folder("demo", "target")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    old = {token_id: token for token, token_id in vocabulary.items()}
    merges = tokenizer["model"]["merges"]
    for mark, token_id in MARKS.items():
        merges = [one for one in merges if "".join(one if isinstance(one, list) else one.split(" ")) != old[token_id]]
        del vocabulary[old[token_id]]
        vocabulary[mark] = token_id
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": mark, **flags})
    tokenizer["model"]["merges"] = merges
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# </think> #}" + "{% if add_generation_prompt %}<think>\n{% endif %}" * opens
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["opened", "unopened"])
def served(request: pytest.FixtureRequest, demo_engine, serve_engine, tmp_path_factory) -> Iterator[Running]:
    """A template that opens the thinking, and one that leaves it to the model."""
    folder = marked_tokenizer(tmp_path_factory.mktemp("marks") / "model", opens=request.param)
    with serve_engine(demo_engine, load_tokenizer(str(folder)), ServerSettings()) as server:
        yield server


@pytest.fixture(scope="module")
def opened(demo_engine, serve_engine, tmp_path_factory) -> Iterator[Running]:
    folder = marked_tokenizer(tmp_path_factory.mktemp("marks") / "model", opens=True)
    with serve_engine(demo_engine, load_tokenizer(str(folder)), ServerSettings()) as server:
        yield server


def opens(server: Running) -> bool:
    """Whether the chat template opens the thinking."""
    return "<think>" in server.state.tokenizer.chat_template


def ask(
    server: Running, *, policies: tuple[str, ...] = POLICIES, **fields: Any
) -> tuple[dict[str, Any], int, list[str]]:
    """Return message, count of thought tokens and spelled tokens of an answer, the same under each of `policies`."""
    found, accepted = [], 0
    for policy in policies:
        server.engine.set_policy(policy)
        answer = server.post("/v1/chat/completions", **{**FIXED, "seed": 7, "logprobs": True, **fields})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        (choice,) = body["choices"]
        for call in choice["message"].get("tool_calls", []):
            del call["id"]
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        accepted += body["metrics"]["speculative"]["accepted_tokens"]
        found.append((choice["message"], body["usage"]["completion_tokens_details"]["reasoning_tokens"], tokens))
    server.engine.set_policy("adaserve")
    assert found == found[:1] * len(policies)
    assert accepted > 0 or "allowed_token_ids" in fields or len(found[0][2]) < 30
    return found[0]


def test_thinking_ends_at_its_limit_and_not_before(opened: Running):
    _, thought, free = ask(opened)
    assert thought == len(free) == 36
    for most in (0, 7, 30):
        message, thought, tokens = ask(opened, max_thinking_tokens=most)
        assert thought == most and tokens[:most] == free[:most] and tokens[most] == "</think>"
        assert "".join(tokens[:most]) == (message.get("reasoning") or "")
        answer = [token for token in tokens[most + 1 :] if not token.startswith("<|")]
        assert "".join(answer) == message["content"]
    of_one = ("adaserve",)  # compared with what both policies gave
    assert ask(opened, policies=of_one, thinking_token_budget=30)[2] == tokens
    assert ask(opened, policies=of_one, max_thinking_tokens=-1)[2] == free


def test_a_limit_is_kept_whatever_else_is_forbidden(opened: Running):
    fields = {"allowed_token_ids": [300, 301, 302], "min_tokens": 30, "logit_bias": {"2047": -100}}
    _, thought, tokens = ask(opened, max_thinking_tokens=5, **fields)
    assert thought == 5 and tokens.index("</think>") == 5 and tokens.count("</think>") == 1


def test_a_limit_counts_from_the_opening_mark_of_the_model(served: Running):
    _, thought, tokens = ask(served, max_thinking_tokens=4, logit_bias={"2046": 100}, max_tokens=9)
    before = [] if opens(served) else ["<think>"]
    assert thought == 4 and tokens[: len(before) + 5] == [*before, *["<think>"] * 4, "</think>"]


@pytest.mark.parametrize("bias", slow_after(1, [0, 9]))
def test_json_begins_behind_the_thinking(opened: Running, bias: int):
    """The closing mark is forced, or comes where the model draws it."""
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for seed in range(2):
        fields = {"seed": seed, "max_thinking_tokens": 20, "logit_bias": {"2047": bias}}
        message, thought, tokens = ask(opened, response_format=form, **fields)
        assert json.loads(message["content"])["a"] in ("x", "yes")
        assert thought == tokens.index("</think>") == len(tokens[:20]) if not bias else thought <= 20


def test_an_answer_of_a_form_may_think_first(served: Running):
    message, _, tokens = ask(served, regex="[ab]{5}")
    if opens(served):
        assert message["content"] is None and len(tokens) == 36
    else:
        assert set(message["content"]) <= {*"ab"} and len(message["content"]) == 5 and "reasoning" not in message
    message, thought, _ = ask(served, regex="[ab]{5}", logit_bias={"2046": 100}, max_thinking_tokens=6)
    assert thought == 6 and set(message["content"]) <= {*"ab"} and len(message["content"]) == 5


def test_calls_are_held_to_their_schema_behind_the_thinking(opened: Running):
    tools = [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}]
    message, thought, _ = ask(opened, tools=tools, tool_choice="required", max_thinking_tokens=12, max_tokens=48)
    call = message["tool_calls"][0]["function"]
    assert thought == 12 and call["name"] == "say" and json.loads(call["arguments"])["a"] in ("x", "yes")


def test_limits_that_cannot_be_kept_are_refused(opened: Running, server: Running):
    for name, value in (("max_thinking_tokens", -2), ("thinking_token_budget", -7), ("max_thinking_tokens", 10**20)):
        error = opened.post("/v1/chat/completions", **FIXED, **{name: value}).json()["error"]
        assert error["message"] == f"{name} must be -1 or an integer from 0 to 2147483647, got {value}"
    error = server.post("/v1/chat/completions", **FIXED, max_thinking_tokens=3).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert "max_thinking_tokens must be left out, got 3: this model has no marks of thinking" in error["message"]
    assert server.post("/v1/chat/completions", **FIXED, max_thinking_tokens=-1).status_code == 200
    with pytest.raises(RequestError, match="max_thinking_tokens must be an integer from 0 on, or none, got -1"):
        SamplingParams(max_thinking_tokens=-1, thinking=Thinking(1, 2))
    with pytest.raises(RequestError, match="max_thinking_tokens must be left out where thinking has no marks, got 3"):
        SamplingParams(max_thinking_tokens=3)
    with pytest.raises(RequestError, match="thinking must be marked by ids of the vocabulary, 0 to 99, got 1 and 100"):
        Constraints(100, load_tokenizer("demo")).check(SamplingParams(max_thinking_tokens=3, thinking=Thinking(1, 100)))
