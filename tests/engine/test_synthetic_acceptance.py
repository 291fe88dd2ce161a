"""Synthetic acceptance in the engine: chains accept the length that was asked for, and the engine says so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.errors import ConfigError, RequestError
from tests.engines import DEMO

PROMPTS = ["def f(x):\n", "import os\n", "class A:\n"] * 2


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        **DEMO | {"policy": "spec:4", "synthetic_acceptance": "2.5", "max_width": 1, "token_edges": (64,)}
    ) as each:
        yield each


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"frequency_penalty": 0.5}))],
)
def test_chains_accept_the_length_on_average(llm: LLM, params: dict) -> None:
    sampling = SamplingParams(max_tokens=120, ignore_eos=True, seed=1, **params)
    found = [output.metrics for output in llm.generate(PROMPTS, sampling)]
    assert sum(each.accepted_tokens for each in found) / sum(each.verify_steps for each in found) == pytest.approx(
        2.5, abs=0.15
    )
    assert all(each.output_tokens == 120 for each in found)


@pytest.mark.slow
def test_the_engine_says_so_and_refuses_what_cannot_be(llm: LLM) -> None:
    assert llm.info.synthetic_acceptance == "1,1,0.5"
    with pytest.raises(
        RequestError, match="json_schema must be absent: this engine accepts drafted tokens by synthetic"
    ):
        llm.generate(PROMPTS[0], SamplingParams(json_schema=json.dumps({"type": "object"})))
    for policy in ("adaserve@suffix", "spec:4@suffix+model"):
        with pytest.raises(ConfigError, match="policy must draft by a model with synthetic_acceptance, got"):
            llm.set_policy(policy)


def test_acceptance_without_a_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance needs a draft, whose tokens are accepted"):
        LLM(**DEMO | {"draft": None, "synthetic_acceptance": "2.5"})
