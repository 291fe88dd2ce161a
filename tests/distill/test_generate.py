"""Drawn texts are the engine's, follow p, q or their mixture token by token, and do not depend on their neighbours."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from adaserve_jax.distill.generate import Drawing, Generator
from adaserve_jax.engine.llm import LLM
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import load_params
from adaserve_jax.types import SamplingParams
from tests.engines import TINY
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits


def _read(folder: Path) -> tuple[Params, ModelConfig]:
    config = ModelConfig.from_folder(folder)
    return load_params(folder, config), config


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_texts_of_the_target_are_the_engines(tmp_path: Path, temperature: float) -> None:
    """The same noise by seed and position. A prompt of several prefill chunks is among them."""
    target = write_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=1)
    params, config = _read(target)
    generator = Generator(config, None, rows=3, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, size).astype(np.int32) for size in (5, 90, 1, 17)]
    seeds = [7, 2**40 + 3, 11, 2**63]
    with LLM(str(target), policy="ar", dtype="f32", **TINY | {"draft": None, "max_context": 128}) as llm:
        sampling = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed) for seed in seeds]
        expected = llm.generate([prompt.tolist() for prompt in prompts], sampling)
        drawing = Drawing(mix=1.0, max_tokens=24, temperature=temperature, eos_ids=config.eos_token_ids)
        texts = generator.texts((params, None), prompts, seeds, drawing)
        for text, prompt, each in zip(texts, prompts, expected, strict=True):
            assert text[len(prompt) :].tolist() == each.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("mix", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])  # 1.0: the texts of the target
def test_tokens_are_drawn_from_the_mixture(tmp_path: Path, mix: float) -> None:
    """The first token after one prompt, by many seeds, against mix p + (1 - mix) q of the float64 oracle."""
    shape = {"vocab_size": 24, "num_hidden_layers": 1, "eos_token_id": None}
    target = write_checkpoint(tmp_path / "target", seed=1, **shape)
    draft = write_checkpoint(tmp_path / "draft", seed=2, **shape)
    prompt, temperature, count = [3, 17, 5], 1.5, 1200
    p, q = (_softmax(oracle_logits(folder, prompt)[-1] / temperature) for folder in (target, draft))
    assert np.abs(p - q).sum() > 0.5
    (target_params, target_config), (draft_params, draft_config) = _read(target), _read(draft)
    generator = Generator(target_config, draft_config, rows=512, dtype=jnp.float32)
    drawing = Drawing(mix=mix, max_tokens=1, temperature=temperature, eos_ids=())
    texts = generator.texts((target_params, draft_params), [np.array(prompt)] * count, range(count), drawing)
    assert all(len(text) == 4 for text in texts)
    found = np.bincount([text[-1] for text in texts], minlength=24)
    assert scipy.stats.chisquare(found, count * (mix * p + (1 - mix) * q)).pvalue > 0.01
    assert scipy.stats.chisquare(found, count * q).pvalue < 1e-6


def test_a_draft_with_more_rows_draws_what_its_target_has(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "eos_token_id": None}
    target = ModelConfig.from_folder(write_checkpoint(tmp_path / "target", vocab_size=24, **shape))
    params, draft = _read(write_checkpoint(tmp_path / "draft", vocab_size=320, **shape))
    drawing = Drawing(mix=0.0, max_tokens=8, temperature=1.5, eos_ids=())
    generator = Generator(target, draft, rows=4, dtype=jnp.float32)
    texts = generator.texts((None, params), [np.array([3, 17, 5])] * 4, range(4), drawing)
    assert [len(text) for text in texts] == [11] * 4
    assert max(text.max() for text in texts) < 24


@pytest.mark.slow
def test_a_text_depends_on_its_seed_and_ends_at_eos(tmp_path: Path) -> None:
    """Not on the other texts, nor on how many are drawn at once."""
    target = write_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=1)
    draft = write_checkpoint(tmp_path / "draft", seed=2, num_hidden_layers=1, intermediate_size=40)
    params, configs = zip(_read(target), _read(draft), strict=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, size).astype(np.int32) for size in (1, 5, 70, 9, 2)]
    drawing = Drawing(mix=0.5, max_tokens=20, temperature=1.0, eos_ids=tuple(range(16)))
    seen: list[int] = []
    generator = Generator(*configs, rows=4, dtype=jnp.float32)
    together = generator.texts(params, prompts, range(5), drawing, seen.append)
    assert seen == sorted(seen) and seen[-1] == 5
    for seed, (prompt, text) in enumerate(zip(prompts, together, strict=True)):
        np.testing.assert_array_equal(generator.texts(params, [prompt], [seed], drawing)[0], text)
        output = text[len(prompt) :]
        np.testing.assert_array_equal(text[: len(prompt)], prompt)
        assert len(output) == 20 or output[-1] < 16
        assert (output[:-1] >= 16).all()
    assert len({len(text) - len(prompt) for text, prompt in zip(together, prompts, strict=True)}) > 1
    other = generator.texts(params, prompts[:1], [99], drawing)[0]
    assert other.tolist() != together[0].tolist()
