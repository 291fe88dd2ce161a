"""What the sampling fields do to real text, over HTTP on the embedded pair."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.server.sse import sse

pytestmark = pytest.mark.slow
PROMPT = "def add(a, b):"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Tom has 3 apples and eats one."}], "max_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def demo(demo_engine, tokenizer, serve_engine) -> Iterator:
    with serve_engine(demo_engine, tokenizer, ServerSettings()) as server:
        yield server


def text_of(answer) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_bias_decides(demo, tokenizer):
    (token,) = tokenizer.encode("x")
    assert text_of(demo.post(**GREEDY, logit_bias={str(token): 100})) == "x" * 24
    plain = text_of(demo.post(**GREEDY))
    banned = tokenizer.encode(plain)[0]
    assert text_of(demo.post(**GREEDY, logit_bias={str(banned): -100})) != plain


def test_a_bias_of_a_token_that_there_is_not(demo):
    refused = demo.post(**GREEDY, logit_bias={str(demo.state.info.vocab_size): 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


def test_the_end_is_held_off(demo, tokenizer):
    """A bias makes end-of-text the likeliest of all; min_tokens forbids it all the same."""
    end = {"logit_bias": {str(tokenizer.eos_token_ids[0]): 100}, "ignore_eos": False}
    at_once = demo.post(**GREEDY | end).json()
    assert (at_once["usage"]["completion_tokens"], at_once["choices"][0]["finish_reason"]) == (1, "stop")
    later = demo.post(**GREEDY | end, min_tokens=8).json()
    assert (later["usage"]["completion_tokens"], later["choices"][0]["finish_reason"]) == (9, "stop")


def test_bad_words_are_never_spelled(demo):
    plain = text_of(demo.post(**GREEDY))
    word = max(plain.split(), key=len)
    assert word not in text_of(demo.post(**GREEDY, bad_words=[word, f" {word}"]))


def test_penalties_make_tokens_rarer(demo, tokenizer):
    def most_repeated(**fields) -> int:
        text = text_of(demo.post(**GREEDY | {"max_tokens": 64} | fields))
        return max(Counter(tokenizer.encode(text)).values())

    plain = most_repeated()
    assert most_repeated(frequency_penalty=2) < plain
    assert most_repeated(repetition_penalty=2) < plain


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text(demo, tokenizer, stream):
    body = CHAT | {"logprobs": True, "top_logprobs": 5}
    found, text = [], ""
    path = "/v1/chat/completions"
    for event in sse(demo, path, **body) if stream else [demo.post(path, **body).json()]:
        for choice in event["choices"]:
            text += (choice["delta"].get("content") or "") if stream else choice["message"]["content"]
            found += (choice["logprobs"] or {"content": []})["content"]
    assert b"".join(bytes(one["bytes"] or []) for one in found).decode() == text
    for one in found:
        tops = [top["logprob"] for top in one["top_logprobs"]]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True) and one["logprob"] <= tops[0] + 1e-5
        assert sum(math.exp(top) for top in tops) <= 1.001
    assert min(one["logprob"] for one in found) < -0.01


def test_log_probabilities_do_not_change_the_text(demo):
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "ignore_eos": True}
    told = demo.post(**body, logprobs=3)
    assert text_of(told) == text_of(demo.post(**body))
    logprobs = told.json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24 and "".join(logprobs["tokens"]) == text_of(told)
    columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    for token, value, top, offset in zip(*columns, strict=True):
        assert top[token] == value and 3 <= len(top) <= 4
        assert text_of(told)[offset:].startswith(token)


@pytest.mark.parametrize("format_", [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
        "additionalProperties": False}}},
], ids=["any object", "schema"])  # fmt: skip
def test_structured_output_is_json(demo, format_):
    answer = demo.post(prompt="Answer: ", max_tokens=128, seed=1, response_format=format_).json()
    choice = answer["choices"][0]
    assert choice["text"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop" or format_["type"] == "json_schema":
        assert isinstance(json.loads(choice["text"]), dict)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"guided_regex": "^ ?[a-z]{2,5}(, [a-z]{2,5}){1,3}!$"}, " ?[a-z]{2,5}(, [a-z]{2,5}){1,3}!"),
        ({"guided_choice": ["blue as the sea", "grey", "(a|b)"]}, r"blue as the sea|grey|\(a\|b\)"),
        ({"ebnf": 'root ::= num ([+*] num){1,2} ";"\nnum ::= [1-9][0-9]{0,2}'},
         r"[1-9][0-9]{0,2}([+*][1-9][0-9]{0,2}){1,2};"),
        ({"structured_outputs": {"grammar": 'start: "n=" %json {"enum": [true, [1, 2]]}'}}, r"n=(true|\[1, ?2\])"),
        ({"structured_outputs": {"json": {"enum": ["a", 5]}}}, '"a"|5'),
    ],
)  # fmt: skip
def test_a_form_holds_and_is_the_same_in_pieces_and_with_every_seed_again(demo, path, form, fits):
    asked = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    found = set()
    for seed in range(3):
        body = asked | form | {"seed": seed, "max_tokens": 64, "temperature": 1.5}
        choice = demo.post(path, **body).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(fits, text) and choice["finish_reason"] == "stop"
        pieces = [one for event in sse(demo, path, **body) for one in event["choices"]]
        assert "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in pieces) == text
        found.add(text)
    assert len(found) > 1 or "structured_outputs" in form or "guided_choice" in form


@pytest.mark.parametrize(
    ("form", "param", "text"),
    [
        ({"guided_regex": "("}, "guided_regex", "guided_regex must be a regular expression that can be enforced"),
        ({"ebnf": "answer"}, "ebnf", "neither Lark, which has a rule"),
        ({"guided_json": {"type": "no such type"}}, "guided_json", "guided_json must hold a JSON schema that can be"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs must be a regular"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no such type"}}}},
         "response_format", "no such type"),
    ],
)  # fmt: skip
def test_a_form_that_is_none_is_refused(demo, form, param, text):
    refused = demo.post(**GREEDY, **form)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param) and text in error["message"]


def test_no_other_token_is_drawn(demo, tokenizer):
    allowed = sorted({token for word in ("one", " two", " red") for token in tokenizer.encode(word)})
    text = text_of(demo.post(**GREEDY | {"temperature": 1, "seed": 3}, allowed_token_ids=allowed))
    pieces = {tokenizer.decode([token]) for token in allowed}
    assert text and set(text) <= set("".join(pieces))


def test_an_answer_goes_on_with_the_last_message(demo, tokenizer):
    talk = [*CHAT["messages"], {"role": "assistant", "content": "Tom has 2"}]
    told = demo.post("/v1/chat/completions", messages=talk, continue_final_message=True, temperature=0, max_tokens=8)
    rendered = "<|user|>" + CHAT["messages"][0]["content"] + "<|assistant|>Tom has 2"
    plain = demo.post(prompt=tokenizer.encode(rendered, False), temperature=0, max_tokens=8)
    assert told.json()["choices"][0]["message"]["content"] == text_of(plain)


def test_echo_is_the_prompt_and_its_text(demo, tokenizer):
    plain = text_of(demo.post(**GREEDY))
    assert text_of(demo.post(**GREEDY, echo=True)) == PROMPT + plain
    ids = GREEDY | {"prompt": tokenizer.encode(PROMPT), "echo": True}
    assert text_of(demo.post(**ids)) == PROMPT + plain
