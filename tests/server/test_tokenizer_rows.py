"""A tokenizer with more tokens than the target has rows, and a draft with more rows than the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.server.serve import load_tokenizer
from adaserve_jax.server.settings import ServerSettings
from tests.engines import TINY
from tests.models.checkpoints import byte_tokenizer, write_checkpoint

pytestmark = pytest.mark.slow

ROWS = byte_tokenizer().get_vocab_size()
PAD, WORD = "<|pad|>", "antidisestablishment"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [WORD]}}, "required": ["a"], "additionalProperties": False}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}


def loving(folder: Path, token: int) -> Path:
    """Make a checkpoint predict one token nearly always: its row of the head is the sum of all others, enlarged."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"].copy()
    head[token] = head[np.arange(len(head)) != token].sum(axis=0) * 3
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A fine-tune with 40 tokens more than rows, so that masks of the tokenizer are longer than the model's; drafts of
    the base, one of which has rows for these ids and likes to draft one of them."""
    folder, tuned = tmp_path_factory.mktemp("rows"), byte_tokenizer()
    tuned.add_special_tokens([PAD])
    tuned.add_tokens([WORD, *(f'{{"{index}": ' for index in range(38))])
    assert tuned.token_to_id(PAD) == ROWS and tuned.get_vocab_size() == ROWS + 40
    draft = {"seed": 1, "num_hidden_layers": 1}
    return {
        "target": write_checkpoint(folder / "target", tokenizer=tuned, vocab_size=ROWS),
        "draft": write_checkpoint(folder / "draft", vocab_size=ROWS, **draft),
        "wide": loving(write_checkpoint(folder / "wide", tokenizer=tuned, vocab_size=ROWS + 40, **draft), ROWS + 39),
    }


@pytest.fixture(scope="module")
def http(models: dict[str, Path], serve_engine: Any) -> Iterator[httpx.Client]:
    config = EngineConfig(target=str(models["target"]), draft=str(models["wide"]), **TINY)
    engine = LocalEngine(config)
    engine.start()
    with serve_engine(engine, load_tokenizer(str(models["target"])), ServerSettings()) as server:
        yield server.http
    stats = engine.stats()
    engine.close()
    assert stats.restarts == 0 and stats.compiles_after_ready == 0


def completion(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "the in", "max_tokens": 16, "ignore_eos": True} | body)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("completions", {"prompt": f"the {PAD}"}, "prompt", f"got '{PAD}' ({ROWS}), which only its tokenizer has"),
        ("completions", {"prompt": ["the", WORD]}, "prompt", f"got '{WORD}' ({ROWS + 1}), which only its tokenizer"),
        ("completions", {"prompt": [5, ROWS]}, "prompt", f"token ids must be from 0 to {ROWS - 1}, got {ROWS}"),
        ("completions", {"logit_bias": {str(ROWS): 100}}, "logit_bias", f"from 0 to {ROWS - 1}, got {ROWS}"),
        (
            "chat/completions", {"messages": [{"role": "user", "content": PAD}]}, "messages",
            f"messages must hold tokens of the model, whose ids are from 0 to {ROWS - 1}",
        ),
    ],
)  # fmt: skip
def test_ids_without_a_row_are_refused(http: httpx.Client, path: str, body: Any, param: str, said: str) -> None:
    answer = http.post(f"/v1/{path}", json={"prompt": "the"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert said in error["message"]


def test_they_are_tokenised_and_never_generated(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": PAD + WORD}).json()["tokens"] == [ROWS, ROWS + 1]
    for temperature in (0, 1, 20):
        answer = completion(http, temperature=temperature, seed=3, logprobs=20, n=4).json()
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == 16
            named = {*logprobs["tokens"], *(token for each in logprobs["top_logprobs"] for token in each)}
            assert not named & {PAD, WORD}


def test_grammars_bans_and_minima_respect_them(http: httpx.Client) -> None:
    """The schema's only text would be spelled with the added word, which the model cannot write: so it is in others."""
    answer = completion(http, max_tokens=40, temperature=1, seed=1, **JSON).json()
    assert json.loads(answer["choices"][0]["text"]) == {"a": WORD}
    free = completion(http, temperature=0).json()["choices"][0]
    words = [WORD, PAD, *(free["text"][:count] + WORD for count in range(1, 12))]
    banned = completion(http, temperature=0, bad_words=words, min_tokens=4).json()["choices"][0]
    assert banned["text"] == free["text"]


@pytest.mark.parametrize("draft", ["draft", "wide"])
def test_the_text_is_the_same_under_every_policy_and_draft(models: dict[str, Path], draft: str) -> None:
    sampling = [SamplingParams(max_tokens=16, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.7)]
    sampling.append(SamplingParams(max_tokens=40, seed=5, json_schema=json.dumps(SCHEMA)))
    texts = set()
    with LLM(str(models["target"]), str(models[draft]), **TINY) as llm:
        for policy in ("ar", "spec:2", "adaserve"):
            llm.set_policy(policy)
            outputs = llm.generate(["the in"] * 3, sampling)
            texts.add(tuple(tuple(output.token_ids) for output in outputs))
    (found,) = texts
    assert all(token < ROWS for ids in found for token in ids)
