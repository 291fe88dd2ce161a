"""Penalties, biases, bans, grammars and log probabilities through the whole engine: the text is that of plain decoding
with the same seed, whatever policy, tree, load or preemption."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.constraints.masks import all_but
from adaserve_jax.engine.build import Assembly
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.engine.llm import Completion, GenerateOutput
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import RequestError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from tests.oracles.llama import oracle_logits

HARD = SLO(tpot_ms=0.5)
TEXT = "def add(a, b):\n    return"
BANNED = ("self", "return", "a + b", "\n")
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.0, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.4, "n": 2},
    "bias": {"logit_bias": {5: 4.0, 100: -100.0, 300: 3.0}},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False, "temperature": 30.0},
    "bad_words": {"bad_words": BANNED, "temperature": 0.0},
    "allowed": {"allowed_token_ids": tuple(range(40, 400, 7)), "logit_bias": {47: 2.0}},
    "all": {
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {7: 2.0},
        "min_tokens": 4, "bad_words": ("def",), "logprobs": 3, "top_k": 40, "top_p": 0.95,
    },
}  # fmt: skip
"""By what they try; each is run with a seed of its own."""
LIST = {"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 3, "maxItems": 4}
if find_spec("llguidance") is not None:
    ASKED["regex"] = {"regex": r"( [a-z]+){3,9}\.", "bad_words": (" the",)}
    ASKED["choice"] = {"choice": ("sunny all day", "sunny at first", "rain"), "temperature": 2.0, "n": 3}
    ASKED["grammar"] = {"grammar": 'root ::= term (" + " term)+ ";"\nterm ::= [a-c] | "(" root ")"', "min_tokens": 4}
    ASKED["json_schema"] = {"json_schema": json.dumps(LIST), "logit_bias": {5: 1.0}}
ALL_POLICIES = (
    "spec:3", "adaserve", "nightjar", "specinfer", "adaserve-paper", "off", "tetris:3", "dspark:3", "adaspec",
    "jitserve",
)  # fmt: skip


def params_of(tokens: int) -> list[SamplingParams]:
    base: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.8, "ignore_eos": True}
    return [SamplingParams(**{**base, "seed": seed, **asked}) for seed, asked in enumerate(ASKED.values())]


def run(
    llm: LLM, policy: str, params: Sequence[SamplingParams], prompts: Sequence[str] | None = None
) -> list[GenerateOutput]:
    llm.set_policy(policy)
    return llm.generate(list(prompts or [TEXT] * len(params)), list(params), slo=HARD)


def choices(outputs: list[GenerateOutput]) -> list[list[Completion]]:
    """Without metrics, which times are in."""
    return [[replace(choice, metrics=None) for choice in output.choices] for output in outputs]


def check_policies(llm: LLM, policies: Sequence[str], tokens: int) -> list[list[Completion]]:
    params = params_of(tokens)
    plain = choices(run(llm, "ar", params))
    for policy in policies:
        before = llm.stats().scheduler.accepted_tokens
        assert choices(run(llm, policy, params)) == plain, policy
        assert policy not in ("spec:3", "specinfer") or llm.stats().scheduler.accepted_tokens > before
    return plain


def plain_text(llm: LLM, bad_words: tuple[str, ...]) -> list[int]:
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, bad_words=bad_words)
    return run(llm, "ar", [asked])[0].token_ids


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[start : start + len(word)] == word for start in range(len(tokens)))


def test_every_parameter_gives_the_text_of_plain_decoding(deterministic: LLM) -> None:
    plain = dict(zip(ASKED, check_policies(deterministic, ["spec:3", "specinfer"], 12), strict=True))
    assert len({tuple(choice.token_ids) for each in plain.values() for choice in each}) == sum(map(len, plain.values()))
    may_end = ("min_tokens", "json_schema", "regex", "choice", "grammar")
    assert all(len(choice.token_ids) == 12 for name, (choice, *_) in plain.items() if name not in may_end)
    assert len(plain["min_tokens"][0].token_ids) >= 9
    free, banned = (plain_text(deterministic, words) for words in ((), BANNED))
    assert plain["bad_words"][0].token_ids == banned
    spelled = [deterministic.tokenizer.spell(space + word) for word in BANNED for space in ("", " ")]
    assert any(contains(free, word) for word in spelled) and not any(contains(banned, word) for word in spelled)
    assert {name: len(each[0].logprobs) for name, each in plain.items() if each[0].logprobs} == {"all": 12}
    assert all(token in range(40, 400, 7) for token in plain["allowed"][0].token_ids)
    if "json_schema" in plain:
        assert all(each.text in ASKED["choice"]["choice"] for each in plain["choice"])
        (written,) = plain["regex"]
        assert re.fullmatch(ASKED["regex"]["regex"], written.text) or written.finish_reason == "length"
        assert " the " not in written.text
        assert re.match(r"(\(+)?[abc] \+ ", plain["grammar"][0].text)
        (listed,) = plain["json_schema"]
        assert listed.finish_reason == "stop" and len(json.loads(listed.text)) in (3, 4)


@pytest.mark.slow
def test_every_parameter_under_every_policy(deterministic: LLM) -> None:
    check_policies(deterministic, ALL_POLICIES, 48)


@pytest.mark.slow
def test_neighbours_that_ask_for_nothing_do_not_notice(deterministic: LLM) -> None:
    params = params_of(12)
    alone = choices(run(deterministic, "ar", params[:1]))
    for policy in ("ar", "spec:3"):
        assert choices(run(deterministic, policy, params))[:1] == alone


def test_min_tokens_keeps_the_end_of_text_away(deterministic: LLM) -> None:
    """A bias makes it the next token as soon as it may come."""
    (eos,) = deterministic.tokenizer.eos_token_ids
    asked = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={eos: 100.0})
    for policy in ("ar", "spec:3"):
        outputs = run(deterministic, policy, [asked, replace(asked, min_tokens=5)])
        assert [len(output.token_ids) for output in outputs] == [1, 6]
        assert all(output.token_ids[-1] == eos and output.finish_reason == "stop" for output in outputs)


@pytest.mark.slow
def test_preemption_loses_no_count(demo_engine: LocalEngine) -> None:
    """10 requests that grow to 132 tokens each, in a pool of 1,024: at temperature 20 the noise decides by far more
    than rounding does, and a count that was lost would show."""
    llm = LLM.over(demo_engine)
    ids = (llm.tokenizer.encode(TEXT) * 10)[:60]
    prompts = [ids[first:] + ids[:first] for first in range(10)]
    params = [
        SamplingParams(
            max_tokens=72, temperature=20.0, ignore_eos=True, seed=seed, frequency_penalty=2.0, presence_penalty=2.0,
            repetition_penalty=8.0, min_tokens=40, logprobs=0,
        )
        for seed in range(10)
    ]  # fmt: skip
    plain: list[list[int]] = []
    for policy in ("ar", "spec:4"):
        llm.set_policy(policy)
        outputs = llm.generate(prompts, params)
        assert sum(output.metrics.preemptions for output in outputs) > 0
        plain = plain or [output.token_ids for output in outputs]
        assert [output.token_ids for output in outputs] == plain
        assert all(len(output.choices[0].logprobs) == 72 for output in outputs)
    llm.set_policy("adaserve")
    (alone,) = llm.generate([prompts[3]], [params[3]])
    assert alone.token_ids == plain[3]


def test_logprobs_are_the_log_softmax_of_the_raw_logits(deterministic: LLM) -> None:
    """Penalties and temperature move the text and not what is told of it; a stop string cuts both alike."""
    asked = SamplingParams(
        max_tokens=20, temperature=0.9, seed=3, logprobs=4, presence_penalty=1.0, top_k=30, ignore_eos=True
    )
    (whole,) = run(deterministic, "ar", [asked])
    stop = whole.text[len(whole.text) // 2 :][:2]
    results = [run(deterministic, policy, [asked, replace(asked, stop=(stop,))]) for policy in ("ar", "spec:3")]
    assert choices(results[0]) == choices(results[1])
    raw = oracle_logits(resolve_folder("demo", "target"), whole.prompt_token_ids + whole.token_ids)
    expected = log_softmax(raw, axis=1)[len(whole.prompt_token_ids) - 1 :]
    for output in results[1]:
        told = output.choices[0].logprobs
        assert [each.token_id for each in told] == output.token_ids
        assert len(told) == 20 or output.finish_reason == "stop"
        for each, row in zip(told, expected, strict=False):
            assert abs(each.logprob - row[each.token_id]) < 1e-4
            assert [token for token, _ in each.top] == np.argsort(-row)[:4].tolist()
            np.testing.assert_allclose([value for _, value in each.top], np.sort(row)[::-1][:4], atol=1e-4)
    assert len(results[1][1].token_ids) < 20


class Sums:
    """A grammar over token ids: the sum of the output and the next token is never divisible by 3; complete once it has
    `schema` tokens. After `stuck` tokens nothing is allowed."""

    def __init__(self, vocab_size: int, stuck: int):
        self.vocab_size = vocab_size
        self.stuck = stuck
        self.state: dict[str, tuple[int, int, int]] = {}

    def prepare(self, schema: str, kind: str = "json_schema") -> Future[int]:
        start: Future[int] = Future()
        start.set_result(int(schema))
        return start

    def add(self, request_id: str, start: int) -> None:
        self.state[request_id] = (0, 0, start)

    def discard(self, request_id: str) -> None:
        self.state.pop(request_id, None)

    def advance(self, request_id: str, token_ids: Sequence[int]) -> bool:
        total, count, most = self.state[request_id]
        for token in token_ids:
            assert count < self.stuck and (total + token) % 3
            total, count = total + token, count + 1
        self.state[request_id] = (total, count, most)
        return count >= most

    def fill(self, request_id: str, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray) -> None:
        start, count, _ = self.state[request_id]
        at = {0: (start, count)}
        for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            if parent >= 0:
                at[node] = (at[parent][0] + token, at[parent][1] + 1)
            total, count = at[node]
            without = range(-total % 3, self.vocab_size, 3) if count < self.stuck else range(self.vocab_size)
            masks[node] = all_but(self.vocab_size, without)


@pytest.fixture
def with_grammars(deterministic: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    vocab_size = deterministic.info.vocab_size
    tokenizer = Tokenizer.from_folder(resolve_folder("demo", "target"))

    def constraints(assembly: Assembly, config: object) -> Constraints:
        return Constraints(vocab_size, tokenizer, Sums(vocab_size, stuck=14))

    with monkeypatch.context() as patch:
        patch.setattr(Assembly, "constraints", constraints)
        yield deterministic
    deterministic.set_policy("ar")


def test_a_grammar_holds_under_every_policy(with_grammars: LLM) -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True, json_schema=length, logprobs=0)
        for temperature, length in ((0.0, "12"), (0.8, "9"), (0.8, "13"))
    ]
    plain = choices(run(with_grammars, "ar", params))
    assert [(len(each.token_ids), each.finish_reason) for (each,) in plain] == [(12, "stop"), (9, "stop"), (13, "stop")]
    for (each,) in plain:
        assert (np.cumsum(each.token_ids) % 3).all()
    for policy in ("spec:3", "specinfer"):
        assert choices(run(with_grammars, policy, params)) == plain


@pytest.mark.parametrize("policy", ["spec:3", pytest.param("ar", marks=pytest.mark.slow)])
def test_a_text_that_nothing_may_follow_ends_with_an_error(with_grammars: LLM, policy: str) -> None:
    """The other requests of the step go on."""
    asked = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with_grammars.set_policy(policy)
    chunks = list(with_grammars.stream(TEXT, replace(asked, json_schema="14")))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 14 and chunks[-1].finish_reason == "stop"
    seen: list[OutputChunk] = []
    with pytest.raises(RequestError, match="allow no token after this text") as caught:
        seen.extend(with_grammars.stream(TEXT, replace(asked, json_schema="15")))
    assert caught.value.code == "no_token_allowed"
    assert sum(len(chunk.token_ids) for chunk in seen) == 14
    (after,) = with_grammars.generate(TEXT, asked)
    assert len(after.token_ids) == 24


def test_what_cannot_be_is_refused_at_admission(deterministic: LLM) -> None:
    vocab_size = deterministic.info.vocab_size
    with pytest.raises(RequestError, match=f"from 0 to {vocab_size - 1}, got {vocab_size}"):
        deterministic.generate(TEXT, SamplingParams(logit_bias={vocab_size: 1.0}))
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        deterministic.generate(TEXT, SamplingParams(bad_words=("\ud800",)))
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match=f"allowed_token_ids must be ids of the vocabulary, 0 to {vocab_size - 1}"):
        deterministic.generate(TEXT, SamplingParams(allowed_token_ids=[vocab_size]))
    with pytest.raises(RequestError, match="grammar must be left out where regex is given: a text can fit only one"):
        SamplingParams(regex="a", grammar="b")
    if find_spec("llguidance") is not None:
        with pytest.raises(RequestError, match="objekt") as caught:
            deterministic.generate(TEXT, SamplingParams(json_schema='{"type": "objekt"}'))
        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")


def test_several_processes_do_not_edit() -> None:
    assembly = SimpleNamespace(
        executor=SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=8))),
        tokenizer=None,
        _grammars=None,
        _no_grammars="",
    )
    constraints = Assembly.constraints(assembly, EngineConfig(num_processes=2, coordinator="host:1"))  # type: ignore[arg-type]
    constraints.check(SamplingParams(temperature=0.5))
    with pytest.raises(RequestError, match="several processes") as caught:
        constraints.check(SamplingParams(frequency_penalty=1.0))
    assert (caught.value.param, caught.value.code) == ("frequency_penalty", "unsupported_parameter")


def test_nothing_is_kept_of_choices_that_ended(with_grammars: LLM) -> None:
    """By their length, by a grammar, or because nobody reads them any more."""
    with_grammars.set_policy("spec:3")
    asked = SamplingParams(max_tokens=12, ignore_eos=True, json_schema="10", presence_penalty=1.0)
    stream = with_grammars.stream(TEXT, asked)
    next(stream)
    stream.close()
    with_grammars.generate([TEXT, TEXT], [asked, SamplingParams(max_tokens=3, logprobs=1)])
    constraints: Constraints = with_grammars._engine._core._constraints
    assert not constraints.active and not constraints._grammars.state  # type: ignore[union-attr]
