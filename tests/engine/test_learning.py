"""An engine that learns while it serves: versions rise, texts stay, a restart goes on, and what fails ends learning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from adaserve_jax import LLM
from adaserve_jax.distill import lengths
from adaserve_jax.distill.learner import Learner
from adaserve_jax.engine.llm import GenerateOutput
from adaserve_jax.errors import CheckpointError, RequestError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.runtime.capture import Pending, TargetRows
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.stats import LearningStats
from adaserve_jax.types import SamplingParams
from tests.models.checkpoints import write_checkpoint

LEARN: dict[str, Any] = {
    "learn_rate": 0.005, "learn_every": 4, "learn_steps": 2, "learn_top_k": 320, "learn_buffer": 64,
    "learn_held_out": 0.25, "learn_share": 1.0, "learn_delay_ms": 10_000.0,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "max_requests": 8, "max_context": 64, "page_size": 8, "num_pages": 64, "max_depth": 2, "max_width": 1,
    "max_tree_tokens": 24, "row_edges": (8,), "token_edges": (32,), "elastic": "off", "policy": "spec:2",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target whose texts repeat themselves, and two drafts that know nothing of it."""
    folder = tmp_path_factory.mktemp("models")
    target = write_checkpoint(folder / "target")
    drafts = [write_checkpoint(folder / name, seed=seed, num_hidden_layers=1) for seed, name in ((1, "a"), (2, "b"))]
    return {"target": str(target), "draft": str(drafts[0]), "drafts": (f"other={drafts[1]}",)}


def engine_of(models: dict[str, Any], learn: dict[str, Any] | None = None, **options: Any) -> LLM:
    learning = LearnConfig(**(LEARN if learn is None else LEARN | learn))
    return LLM(**(models | SMALL | {"learning": learning, **options}))


@pytest.fixture(scope="module", autouse=True)
def one_length() -> Iterator[None]:
    """Of micro-steps, so that little is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "longest_within", lambda limit_s, measured: 64 if measured(64) else 0)
        yield


@pytest.fixture(scope="module")
def llm(models: dict[str, Any]) -> Iterator[LLM]:
    with engine_of(models) as llm:
        yield llm
        assert llm.stats().compiles_after_ready == 0


def learner_of(llm: LLM) -> Learner:
    learner = llm._engine._learner
    assert learner is not None
    return learner


def prompts(seed: int, count: int = 4) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 300, (count, 6)).tolist()


def serve(llm: LLM, seed: int, **options: Any) -> list[GenerateOutput]:
    return llm.generate(prompts(seed), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), **options)


def rested(llm: LLM) -> LearningStats:
    """Once nothing is left to learn."""
    settled = threading.Event()
    while not learner_of(llm).rests:
        settled.wait(0.005)
    return llm.stats().learning


def test_versions_rise_and_acceptance_does_while_texts_stay(llm: LLM) -> None:
    before = rested(llm)
    first = [output.token_ids for output in serve(llm, 0)]
    for seed in range(1, 9):
        serve(llm, seed)
    stats = rested(llm)
    print(stats)
    assert stats.version["default"] > before.version["default"]
    assert stats.updates["default"] >= 3
    assert [output.token_ids for output in serve(llm, 0)] == first
