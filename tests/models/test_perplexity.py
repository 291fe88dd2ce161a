"""Perplexity and KL are those of a float64 oracle, over windows that score each token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers.processors import TemplateProcessing

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.perplexity import cut, measure_perplexity
from adaserve_jax.models.tokenizer import Tokenizer
from tests.models.checkpoints import EOS, byte_tokenizer, write_checkpoint, write_tensors, write_tokenizer
from tests.oracles.llama import oracle_logits
from tests.oracles.quantized import dequantized_checkpoint

TEXTS = ["the thing and the other thing", "é", "a 漢字 text that is longer than one window of tokens"]
WINDOW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("perplexity") / "given")


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("sliding", [5, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_scores_equal_the_oracle(folder: Path, sliding: int | None, tmp_path: Path) -> None:
    if sliding is not None:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": sliding}
        folder = write_checkpoint(tmp_path / "mistral", **mistral)
    other = dequantized_checkpoint(folder, tmp_path / "rounded")
    plain, int8 = measure_perplexity(folder, TEXTS, ("none", "int8"), window=WINDOW, max_tokens=1000)
    tokenizer = Tokenizer.from_folder(folder)
    age = np.arange(WINDOW)[:, None] - np.arange(WINDOW)
    seen = (age >= 0) & (age < (sliding or WINDOW))
    nats, other_nats, kl, same = [], [], [], []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids) - 1, WINDOW):
            inputs, labels = ids[start : start + WINDOW], ids[start + 1 : start + 1 + WINDOW]
            inputs, rows = inputs[: len(labels)], np.arange(len(labels))
            mask = seen[: len(labels), : len(labels)]
            p, q = (log_softmax(oracle_logits(path, inputs, mask=mask)) for path in (folder, other))
            nats += list(-p[rows, labels])
            other_nats += list(-q[rows, labels])
            kl += list((np.exp(p) * (p - q)).sum(1))
            same += list(p.argmax(1) == q.argmax(1))
    assert plain.tokens == int8.tokens == len(nats)
    assert plain.nats == pytest.approx(sum(nats), rel=1e-5)
    assert int8.nats == pytest.approx(sum(other_nats), rel=1e-5)
    assert plain.perplexity == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
    assert (plain.kl_mean, plain.kl_max, plain.same_likeliest) == (0, 0, 1)
    assert int8.kl_mean == pytest.approx(np.mean(kl), rel=0.01)
    assert int8.kl_max == pytest.approx(np.max(kl), rel=0.01)
    assert int8.same_likeliest == pytest.approx(np.mean(same), abs=1.5 / len(same))
    unscored = sum(len(tokenizer.decode(tokenizer.encode(text)[:1]).encode()) for text in TEXTS[::2])
    # A first token or a window's edge may lie inside a character, which then counts as a replacement character.
    assert plain.text_bytes == pytest.approx(sum(len(text.encode()) for text in TEXTS) - unscored, abs=8)
    assert plain.bits_per_byte == pytest.approx(plain.nats / np.log(2) / plain.text_bytes)
    assert 3.5 < plain.weight_bytes / int8.weight_bytes < 4


def test_windows_score_each_token_once_or_are_taken_evenly(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "".join(chr(97 + index % 26) for index in range(50))
    ids = tokenizer.encode(text)
    windows = cut(tokenizer, [text, "x"], 8, 1000)
    assert windows.lengths.tolist() == [8] * 6 + [1]
    found = [row[1 : 1 + length] for row, length in zip(windows.tokens, windows.lengths, strict=True)]
    assert np.concatenate(found).tolist() == ids[1:]
    assert windows.text_bytes == 49
    few = cut(tokenizer, [text], 8, 25)
    np.testing.assert_array_equal(few.tokens, windows.tokens[[0, 3, 6]])
    assert cut(tokenizer, [text], 8, 3).tokens.shape == (1, 4)


def test_every_window_begins_with_the_token_that_begins_texts(tmp_path: Path) -> None:
    beginning = byte_tokenizer()
    bos = beginning.token_to_id(EOS)
    beginning.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, bos)])
    write_tokenizer(tmp_path, beginning)
    tokenizer = Tokenizer.from_folder(tmp_path)
    windows = cut(tokenizer, ["bcdfgjklmp"], 4, 1000)
    letters = tokenizer.encode("bcdfgjklmp", add_special_tokens=False)
    assert windows.tokens.tolist() == [
        [bos, *letters[:4]], [bos, *letters[4:8]], [bos, *letters[8:], 0, 0],
    ]  # fmt: skip
    assert windows.lengths.tolist() == [4, 4, 2]
    assert windows.text_bytes == 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": ["x", ""]}, "a text must have at least 2 tokens, so that one can be predicted from another, got 1"),
        ({"texts": []}, "a text must have at least 2 tokens"),
        ({"window": 0}, "window must be from 1 to 256, which the model supports, got 0"),
        ({"window": 257}, "window must be from 1 to 256, which the model supports, got 257"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(folder: Path, given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"texts": TEXTS, "kinds": ("none",), "window": 16} | given
    with pytest.raises(ConfigError, match=message):
        measure_perplexity(folder, options.pop("texts"), options.pop("kinds"), **options)


def phi_with_longrope(folder: Path, short: float, long: float) -> Path:
    """A checkpoint of one layer whose factors change behind 8 tokens."""
    layer, factors = "model.layers.0.", {"short_factor": [short] * 8, "long_factor": [long] * 8}
    write_checkpoint(folder, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_scaling": factors | {"type": "longrope"}, "original_max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config | rope | {"architectures": ["Phi3ForCausalLM"]}))
    tensors = load_file(folder / "model.safetensors")
    for fused, parts in (
        ("self_attn.qkv_proj", [f"self_attn.{each}_proj" for each in "qkv"]),
        ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
    ):
        tensors[f"{layer}{fused}.weight"] = np.concatenate([tensors.pop(f"{layer}{each}.weight") for each in parts])
    write_tensors(folder, tensors)
    return folder


def nats_with_longrope(folder: Path, short: float, window: int) -> float:
    (score,) = measure_perplexity(phi_with_longrope(folder, short, 4.0), TEXTS, ("none",), window=window)
    return score.nats


def test_windows_beyond_the_original_context_take_the_long_factors(tmp_path: Path) -> None:
    found = [nats_with_longrope(tmp_path / str(short), short, WINDOW) for short in (1.0, 4.0)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_windows_within_the_original_context_take_the_short_factors(tmp_path: Path) -> None:
    found = [nats_with_longrope(tmp_path / str(short), short, 8) for short in (1.0, 4.0)]
    assert found[0] != found[1]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, vocab_size=64)
    with pytest.raises(CheckpointError, match=r"the tokenizer gives token \d+ but the model has only 64"):
        measure_perplexity(folder, ["the thing"], ("none",), window=16)
