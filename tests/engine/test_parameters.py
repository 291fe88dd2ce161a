"""Every sampling parameter under every policy: the text and its end are those of plain decoding with the same seed.

Which texts the models write does not matter here: what each test needs of a text (a stop string that occurs, a seed
without near-ties) is found from plain runs first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.engine.llm import Completion
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.tree.sampling import DeviceSampling, draw, gumbel_noise
from tests.oracles.llama import oracle_logits

SPECULATIVE = ("spec:4", "adaserve")
HARD = SLO(tpot_ms=5)  # worth speculating for
SEEDS = (11, 12, 13, 14)
SEEDS_OF_EOS = (5727, 6132)
"""Seeds whose noise is highest at the end of text, for the fifth token behind TEXT."""
TEXT = "def add(a, b):\n    return"
PLAIN = SamplingParams(max_tokens=12, temperature=0.9, ignore_eos=True)
draw_jitted, noise_jitted = jax.jit(draw), jax.jit(gumbel_noise, static_argnums=3)
NEAR_TIE = 1e-3
"""Logits of different bucket sizes differ by less than a tenth of this."""


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    sampling: SamplingParams


@pytest.fixture(scope="module")
def llm(demo_engine: LocalEngine) -> Iterator[LLM]:
    yield LLM.over(demo_engine)
    demo_engine.set_policy("adaserve")


def run(llm: LLM, policy: str, cases: list[Case], slo: SLO = HARD) -> list[list[Completion]]:
    """All cases at once under `policy`; the choices of each."""
    llm.set_policy(policy)
    outputs = llm.generate([case.prompt for case in cases], [case.sampling for case in cases], slo=slo)
    return [output.choices for output in outputs]


def texts(choices: list[Completion]) -> list[tuple[list[int], str, str | None]]:
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]


@dataclass(frozen=True)
class Plain:
    """A case with what plain decoding gives for it. scores: f64[tokens, V] of each choice, the oracle's logits."""

    case: Case
    choices: list[Completion]
    scores: list[np.ndarray]


def scored(cases: list[Case], outputs: list[list[Completion]]) -> list[Plain]:
    """One call of the oracle for all texts, side by side: none sees another."""
    texts = [
        case.prompt + choice.token_ids[:-1] for case, choices in zip(cases, outputs, strict=True) for choice in choices
    ]
    lengths = [len(text) for text in texts]
    position = np.concatenate([np.arange(length) for length in lengths])
    owner = np.repeat(np.arange(len(texts)), lengths)
    mask = (owner[:, None] == owner) & (position[:, None] >= position)
    logits = oracle_logits(resolve_folder("demo", "target"), np.concatenate(texts), position, mask)
    by_text = iter(np.split(logits, np.cumsum(lengths)[:-1]))
    return [
        Plain(case, choices, [next(by_text)[len(case.prompt) - 1 :] for _ in choices])
        for case, choices in zip(cases, outputs, strict=True)
    ]


def has_near_tie(sampling: SamplingParams, start: int, choice: int, token_ids: list[int], scores: np.ndarray) -> bool:
    """Whether logits that differ by up to NEAR_TIE can draw another token anywhere in the text."""
    count = len(token_ids)
    others = np.random.default_rng(0).uniform(-NEAR_TIE, NEAR_TIE, (4, PLAIN.max_tokens, scores.shape[1]))
    others[:, :count] += scores
    rows = 4 * PLAIN.max_tokens  # always as many, so that drawing compiles once
    assert sampling.seed is not None
    sampler = DeviceSampling(
        np.tile(np.array([sampling.seed, 0], np.uint32), (rows, 1)), np.full(rows, choice, np.int32),
        np.full(rows, sampling.temperature, np.float32), np.full(rows, sampling.top_k, np.int32),
        np.full(rows, sampling.top_p, np.float32), np.full(rows, sampling.min_p, np.float32),
    )  # fmt: skip
    position = np.tile(start + np.arange(PLAIN.max_tokens, dtype=np.int32), 4)
    drawn = np.asarray(draw_jitted(others.reshape(rows, -1).astype(np.float32), sampler, position))
    return bool((drawn.reshape(4, -1)[:, :count] != token_ids).any())


def without_near_ties(llm: LLM, cases: dict[str, Case]) -> dict[str, Plain]:
    """Each case with the first of SEEDS whose text holds no near-tie: there a difference would be no error."""
    found: dict[str, Plain] = {}
    for seed in SEEDS:
        names = [name for name in cases if name not in found]
        if not names:
            break
        seeded = [replace(cases[name], sampling=replace(cases[name].sampling, seed=seed)) for name in names]
        for name, plain in zip(names, scored(seeded, run(llm, "ar", seeded)), strict=True):
            sampling, start = plain.case.sampling, len(plain.case.prompt)
            texts = enumerate(zip(plain.choices, plain.scores, strict=True))
            if not any(has_near_tie(sampling, start, index, c.token_ids, scores) for index, (c, scores) in texts):
                found[name] = plain
    assert found.keys() == cases.keys(), "every seed of a case meets a near-tie"
    return found


def assert_same_under_speculation(llm: LLM, cases: list[Case], plain: list[list[Completion]]) -> None:
    for policy in SPECULATIVE:
        for case, choices, expected in zip(cases, run(llm, policy, cases), plain, strict=True):
            assert texts(choices) == texts(expected), (policy, case.sampling)
        # `adaserve` speculates where that is faster, which depends on the machine; a new policy counts from 0
        assert policy == "adaserve" or llm.stats().scheduler.accepted_tokens > 0


def cases_of(llm: LLM) -> dict[str, Case]:
    prompt = llm.tokenizer.encode(TEXT)
    long_prompt = (llm.tokenizer.encode(TEXT + " a + b\n\n") * 30)[:150]  # a step takes 64 tokens

    def case(ids: list[int] = prompt, **changes: float) -> Case:
        return Case(ids, replace(PLAIN, **changes))  # type: ignore[arg-type]

    return {
        "greedy": case(temperature=0.0),
        "cold": case(temperature=0.3),
        "hot": case(temperature=1.5),
        "top_k": case(top_k=5),
        "top_p": case(top_p=0.6),
        "min_p": case(min_p=0.1),
        "all filters": case(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
        "one token": case(max_tokens=1),
        "two tokens": case(max_tokens=2),
        "prompt of one token": case(prompt[:1]),
        "prompt of several chunks": case(long_prompt, max_tokens=8),
        "four choices": case(n=4, max_tokens=8, top_p=0.98),
    }


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[str, Plain]:
    return without_near_ties(llm, cases_of(llm))


def test_every_way_to_sample(llm: LLM, plain: dict[str, Plain]) -> None:
    assert_same_under_speculation(llm, [p.case for p in plain.values()], [p.choices for p in plain.values()])


def test_ends_by_length(plain: dict[str, Plain]) -> None:
    for name, p in plain.items():
        wanted = p.case.sampling.max_tokens
        assert [(len(c.token_ids), c.finish_reason) for c in p.choices] == [(wanted, "length")] * p.case.sampling.n, (
            name
        )


def test_the_end_of_the_context(llm: LLM) -> None:
    """At temperature 20 the noise decides, by far more than rounding."""
    prompt = (llm.tokenizer.encode(TEXT) * 100)[:505]
    cases = [Case(prompt, SamplingParams(max_tokens=100, temperature=20.0, seed=1, ignore_eos=True))]
    ((choice,),) = plain = run(llm, "ar", cases)
    assert (len(choice.token_ids), choice.finish_reason) == (512 - 505, "length")
    assert_same_under_speculation(llm, cases, plain)


def test_filters_take_what_they_say(llm: LLM, plain: dict[str, Plain]) -> None:
    """Each token is among those that the oracle's logits leave, up to rounding at the threshold."""
    for name in ("top_k", "top_p", "min_p", "all filters"):
        sampling, (choice,), (scores,) = plain[name].case.sampling, plain[name].choices, plain[name].scores
        for token, row in zip(choice.token_ids, scores / sampling.temperature, strict=True):
            likelier = row > row[token] + 1e-3
            top = np.flatnonzero(np.argsort(np.argsort(-row)) < (sampling.top_k or len(row)))
            chances = np.exp(row[top] - row.max())
            assert sampling.top_k == 0 or likelier.sum() < sampling.top_k
            assert chances[likelier[top]].sum() / chances.sum() < sampling.top_p + 1e-3
            assert row[token] >= row.max() + np.log(max(sampling.min_p, 1e-30)) - 1e-3


def test_one_choice_left_is_the_greedy_one(llm: LLM, plain: dict[str, Plain]) -> None:
    greedy, expected = plain["greedy"].case, plain["greedy"].choices
    filters = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})
    cases = [replace(greedy, sampling=replace(greedy.sampling, temperature=1.0, **only)) for only in filters]
    for policy in ("ar", *SPECULATIVE):
        assert [texts(choices) for choices in run(llm, policy, cases)] == [texts(expected)] * len(cases)


def test_choices_of_one_seed_differ_and_come_again(llm: LLM, plain: dict[str, Plain]) -> None:
    case, choices = plain["four choices"].case, plain["four choices"].choices
    assert len({tuple(choice.token_ids) for choice in choices}) == 4
    (again,) = run(llm, "ar", [case])
    assert texts(again) == texts(choices)
    (alone,) = run(llm, "spec:4", [replace(case, sampling=replace(case.sampling, n=1))])
    assert texts(alone) == texts(choices[:1])


STOPPED = ["ar", "spec:4", pytest.param("adaserve", marks=pytest.mark.slow)]


@pytest.mark.parametrize("policy", STOPPED)
def test_stop_strings(llm: LLM, plain: dict[str, Plain], policy: str) -> None:
    """Strings that occur: inside a token, over a boundary, at the beginning and the end; one alone and several."""
    cases: list[Case] = []
    wanted: list[tuple[str, str]] = []
    for name in ("hot", "all filters", "prompt of one token"):
        case, (choice,) = plain[name].case, plain[name].choices
        text = choice.text.rstrip("\N{REPLACEMENT CHARACTER}")
        assert len(text) >= 8
        middle = len(text) // 2
        for stop in (
            (text[:1],),
            (text[-1:],),
            (text[middle : middle + 4],),
            (text[-3:], text[middle - 2 : middle + 5]),
        ):
            cases.append(replace(case, sampling=replace(case.sampling, stop=stop)))
            # the one that completes first, and of those that complete together the longest
            end, length = min((text.index(s) + len(s), -len(s)) for s in stop)
            wanted.append((text[: end + length], text[end + length : end]))
    for case, (choice,), (text, reason) in zip(cases, run(llm, policy, cases), wanted, strict=True):
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", reason), case.sampling.stop
        assert not any(stop in choice.text for stop in case.sampling.stop)
        assert llm.tokenizer.decode(choice.token_ids).startswith(text)
    shown = ""
    for chunk in llm.stream(cases[2].prompt, cases[2].sampling, slo=HARD):
        shown += chunk.text
        assert wanted[2][0].startswith(shown), "a part of a stop string was shown"
    assert shown == wanted[2][0]


@pytest.mark.parametrize("policy", STOPPED)
def test_stop_tokens(llm: LLM, plain: dict[str, Plain], policy: str) -> None:
    cases: list[Case] = []
    wanted: list[list[int]] = []
    for name in ("hot", "top_p", "min_p"):
        case, (choice,) = plain[name].case, plain[name].choices
        for token in choice.token_ids[1::5]:
            cases.append(replace(case, sampling=replace(case.sampling, stop_token_ids=(token,))))
            wanted.append(choice.token_ids[: choice.token_ids.index(token) + 1])
    for (choice,), token_ids in zip(run(llm, policy, cases), wanted, strict=True):
        assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (token_ids, "stop", token_ids[-1])


def test_end_of_text(llm: LLM) -> None:
    """At temperature 100 the noise decides, for the draft as for the target, so there are seeds whose fifth token is
    the end of text, whatever the models are: an end inside an accepted path."""
    (eos,) = llm.tokenizer.eos_token_ids
    prompt = llm.tokenizer.encode(TEXT)
    at, vocab_size = len(prompt) + 4, llm.info.vocab_size
    leads = lead_of(eos, at, vocab_size, np.array(SEEDS_OF_EOS))
    assert leads.min() > 0.7, f"take others: {seeds_that_draw(eos, at, vocab_size)}"
    hot = Case(prompt, replace(PLAIN, temperature=100.0, max_tokens=12))
    cases = [replace(hot, sampling=replace(hot.sampling, seed=seed)) for seed in SEEDS_OF_EOS]
    listening = [replace(case, sampling=replace(case.sampling, ignore_eos=False)) for case in cases]
    plain = run(llm, "ar", cases)
    ends = [choice.token_ids.index(eos) + 1 for (choice,) in plain]
    assert 5 in ends
    for policy in ("ar", *SPECULATIVE):
        assert [texts(choices) for choices in run(llm, policy, cases)] == [texts(choices) for choices in plain]
        for (choice,), (through,), end in zip(run(llm, policy, listening), plain, ends, strict=True):
            assert (choice.token_ids, choice.finish_reason) == (through.token_ids[:end], "stop")
            assert choice.stop_reason is None
            assert choice.text == llm.tokenizer.decode(through.token_ids[: end - 1])
            assert choice.metrics is not None
            assert policy != "spec:4" or choice.metrics.accepted_tokens > 0


def lead_of(token: int, position: int, vocab_size: int, seeds: np.ndarray) -> np.ndarray:
    """Return by how much each seed's noise at `position` is higher at `token` than anywhere else."""
    words = np.stack([seeds, np.zeros_like(seeds)], axis=1).astype(np.uint32)
    zeros = np.zeros(len(seeds), np.int32)
    noise = np.array(noise_jitted(words, zeros, zeros + np.int32(position), vocab_size))
    own = noise[:, token].copy()
    noise[:, token] = -np.inf
    return own - noise.max(axis=1)


def seeds_that_draw(token: int, position: int, vocab_size: int) -> list[int]:
    """Return seeds whose noise at `position` is clearly highest at `token`."""
    found: list[int] = []
    for start in range(0, 16000, 1000):
        seeds = np.arange(start, start + 1000)
        found += seeds[lead_of(token, position, vocab_size, seeds) > 0.7].tolist()
        if len(found) >= 2:
            break
    return found
