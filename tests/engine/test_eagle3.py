"""An EAGLE-3 head as the draft of an engine: the text is the target's own in every mode and policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from adaserve_jax import LLM, LearnConfig, SamplingParams
from adaserve_jax.errors import UnsupportedModelError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.loading import load_params
from tests.engines import DEMO, EXACT, seeded_texts
from tests.models.adapters import write_adapter
from tests.models.checkpoints import write_eagle3
from tests.program import run_program
from tests.waiting import wait_until

PROMPTS = ["def add(a, b):\n", "x = [1, 2, 3]\n" * 4, "x = [1, 2, 3]\n" * 4 + "y", "Sara buys 4 pens for $2 each.", "a"]
TOKENS = 20


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the embedded target, without an embedding of its own."""
    return write_eagle3(
        tmp_path_factory.mktemp("head"), features=256, own_embedding=False, vocab_size=2048, hidden_size=256,
        intermediate_size=96, head_dim=64, draft_vocab_size=1500, max_position_embeddings=32,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def exact(head: Path) -> Iterator[LLM]:
    with LLM(draft=str(head), **EXACT | {"num_pages": 20}) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_every_other_draft_and_policy(exact: LLM, deterministic: LLM, temperature: float) -> None:
    deterministic.set_policy("ar")
    expected = seeded_texts(deterministic, PROMPTS, temperature, TOKENS)
    for policy in ("spec:3", "adaserve", "adaserve@model", "adaserve@suffix+model", "nightjar", "ar"):
        exact.set_policy(policy)
        before = exact.stats().scheduler.draft_tokens
        assert seeded_texts(exact, PROMPTS, temperature, TOKENS) == expected, policy
        drafted = exact.stats().scheduler.draft_tokens - before
        assert drafted > 0 or policy in ("ar", "nightjar")


@pytest.mark.slow
def test_default_mode_gives_the_same_text_but_for_near_ties(head: Path) -> None:
    with LLM(draft=str(head), **DEMO) as llm:
        results = []
        for policy in ("ar", "spec:3"):
            llm.set_policy(policy)
            results.append(seeded_texts(llm, PROMPTS, 0.8, TOKENS))
        assert llm.stats().scheduler.draft_tokens > 0
    assert sum(a != b for a, b in zip(*results, strict=True)) <= 1


@pytest.mark.slow
def test_a_head_learns_while_it_serves(head: Path, tmp_path: Path) -> None:
    """Versions rise and acceptance with them, the text stays, and what was learned is written as a head. Texts of
    adapters, whose features are not the model's own, teach it nothing."""
    learned = tmp_path / "learned"
    adapter = write_adapter(tmp_path / "adapter", resolve_folder("demo", "target"), seed=1, rank=4, alpha=1.0)
    options = (
        DEMO
        | {"lora": (f"code={adapter}",)}
        | {"num_pages": 128, "policy": "spec:3", "max_width": 1, "token_edges": (64,)}
    )
    learning = LearnConfig(
        learn_every=4, learn_steps=4, learn_held_out=0.25, learn_rate=3e-3, learn_share=1.0, learn_delay_ms=500.0,
        learn_folder=str(learned),
    )  # fmt: skip
    with LLM(draft=str(head), learning=learning, **options) as llm:
        before = seeded_texts(llm, PROMPTS, 0.0, TOKENS)
        rounds = 0
        while (stats := llm.stats().learning).updates.get("default", 0) < 2:
            rounds += 1
            assert rounds < 100, stats
            prompts = [f"x{rounds} = [{index}, " for index in range(8)]
            llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
        assert sum(a != b for a, b in zip(seeded_texts(llm, PROMPTS, 0.0, TOKENS), before, strict=True)) <= 1
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=TOKENS), adapter="code")
        assert llm.stats().learning.left_out["adapter"] == 1
        kept, left_out = (llm.stats().learning.records, llm.stats().learning.left_out.get("no_positions", 0))
        llm.generate([[5]], SamplingParams(max_tokens=1))  # the first token of a text teaches a head nothing
        wait_until(lambda: llm.stats().learning.left_out.get("no_positions", 0) == left_out + 1)
        assert llm.stats().learning.records == kept
    options = ["--from-checkpoint", str(learned), "--draft", str(head), "--target", "demo", "--out"]
    assert run_program("distill", *options, str(tmp_path / "out")) == 0
    written = ModelConfig.from_folder(tmp_path / "out", may_be_head=True)
    assert written == ModelConfig.from_folder(head, may_be_head=True)
    target = resolve_folder("demo", "target")
    ours, theirs = (load_params(folder, written, target=target) for folder in (tmp_path / "out", head))
    assert not np.array_equal(ours["fc"], theirs["fc"])
    np.testing.assert_array_equal(ours["head_row"], theirs["head_row"])


def test_a_head_is_refused_where_a_model_is_needed(head: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is an EAGLE-3 head, which is no model without its target"):
        LLM(target=str(head), draft=None)
