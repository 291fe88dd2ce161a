"""What the sampling fields do to real text, over HTTP on the embedded pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings

pytestmark = pytest.mark.slow
PROMPT = "def add(a, b):"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def demo(demo_engine, tokenizer, serve_engine) -> Iterator:
    with serve_engine(demo_engine, tokenizer, ServerSettings()) as server:
        yield server


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
