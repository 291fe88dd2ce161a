"""A converted checkpoint is the same model: weights, configuration, tokenizer; defects and misuse are named."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models import loading as converted
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.models.writing import convert
from adaserve_jax.results.provenance import count_parameters
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in bf16 and its conversion."""
    folder = tmp_path_factory.mktemp("convert")
    source = write_checkpoint(folder / "source", dtype="bf16", shards=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converted, "CHUNK_BYTES", 1 << 10)  # many chunks of rows, and of columns
        convert(source, folder / "out")
    return source, folder / "out"


def test_the_same_model_is_loaded_in_any_type(pair: tuple[Path, Path]) -> None:
    source, out = pair
    config = ModelConfig.from_folder(out)
    assert config == ModelConfig.from_folder(source)
    calls: list[int] = []
    for dtype in (jnp.bfloat16, jnp.float32):
        ours = load_params(out, config, dtype, progress=lambda what, done, total: calls.append(done))
        theirs = load_params(source, config, dtype)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert ours[name].dtype == dtype
            np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value))
    assert len(calls) > 4
    assert calls[-1] == len(theirs)
    text = "the thing é"
    assert Tokenizer.from_folder(out).encode(text) == Tokenizer.from_folder(source).encode(text)


def test_its_parameters_are_counted(pair: tuple[Path, Path]) -> None:
    source, out = pair
    assert (
        count_parameters(out)
        == count_parameters(source)
        == sum(x.size for x in load_params(out, ModelConfig.from_folder(out)).values())
    )


def test_weights_that_do_not_fit_are_named(pair: tuple[Path, Path]) -> None:
    _, out = pair
    path = out / "config.json"
    given = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(given) | {"vocab_size": 321}))
        expected = (
            r"weight embed has shape \[320, 32\], expected \[321, 32\] by config\.json; convert the checkpoint again"
        )
        with pytest.raises(CheckpointError, match=expected):
            load_params(out, ModelConfig.from_folder(out))
        path.write_text(json.dumps(json.loads(given) | {"tie_word_embeddings": True}))
        with pytest.raises(CheckpointError, match="weight head is not part of a model with this config"):
            load_params(out, ModelConfig.from_folder(out))
        path.write_text(json.dumps(json.loads(given) | {"num_hidden_layers": 3}))
        with pytest.raises(
            CheckpointError, match=r"weight layers\.2\.attn_norm is missing, expected with shape \[32\]"
        ):
            load_params(out, ModelConfig.from_folder(out))
    finally:
        path.write_text(given)


def test_misuse_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, out = pair
    with pytest.raises(ConfigError, match="is converted already; give the Hugging Face checkpoint that"):
        convert(out, tmp_path / "again")
    with pytest.raises(ConfigError, match="must be an empty or a new folder"):
        convert(source, out)
    with pytest.raises(ConfigError, match="dtype must be one of auto, f16, bf16, f32, got 'int8'"):
        convert(source, tmp_path / "int8", dtype="int8")
