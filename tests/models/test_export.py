"""Written checkpoints, exported or converted, hold the same model; defects and misuse are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models import loading as converted
from adaserve_jax.models.config import DEMO_FOLDER, ModelConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.export import convert, export
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters
from tests.models.checkpoints import write_checkpoint
from tests.models.torch_checkpoints import FAMILIES, torch_logits, torch_model, write_family
from tests.oracles.llama import oracle_logits

TOKENS = [3, 250, 17, 17, 300, 9, 41, 8]


def _load(folder: Path) -> Params:
    return load_params(folder, ModelConfig.from_folder(folder))


def _assert_same(ours: Params, theirs: Params) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(theirs[name]), err_msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_changed_weights_are_what_a_model_computes_with(tmp_path: Path, tied: bool) -> None:
    """The weights of one checkpoint, exported beside the configuration of another of that shape, give its logits."""
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=tied, seed=1)
    other = write_checkpoint(tmp_path / "other", tie_word_embeddings=tied, seed=2)
    calls: list[tuple[str, int, int]] = []
    export(_load(other), source, tmp_path / "out", progress=lambda *call: calls.append(call))
    np.testing.assert_array_equal(oracle_logits(tmp_path / "out", TOKENS), oracle_logits(other, TOKENS))
    assert ModelConfig.from_folder(tmp_path / "out") == ModelConfig.from_folder(source)
    assert Tokenizer.from_folder(tmp_path / "out").encode("the thing é") == [
        *Tokenizer.from_folder(source).encode("the thing é")
    ]
    total = 9 * 2 + 2 + (not tied)
    assert calls == [("writing", done, total) for done in range(1, total + 1)]


def test_the_type_is_that_of_the_source_or_as_asked(tmp_path: Path) -> None:
    """Widening and narrowing again is exact; the demo draft is stored in f16."""
    source = DEMO_FOLDER / "draft"
    params = _load(source)
    export(params, source, tmp_path / "same")
    assert json.loads((tmp_path / "same" / "config.json").read_text())["torch_dtype"] == "float16"
    export(params, source, tmp_path / "wide", dtype="f32")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    for out in ("same", "wide"):
        _assert_same(_load(tmp_path / out), params)
    sizes = {out: sum(p.stat().st_size for p in (tmp_path / out).glob("*.safetensors")) for out in ("same", "wide")}
    assert 1.9 < sizes["wide"] / sizes["same"] < 2


def test_shards_and_a_converted_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve_jax.models.writing.SHARD_BYTES", 20_000)
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "converted")
    export(_load(source), tmp_path / "converted", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "out" / "weights").exists()
    _assert_same(_load(tmp_path / "out"), _load(source))


@pytest.mark.torch
@pytest.mark.parametrize("name", [
    "mixtral", "gemma3", "phi4_mini", "gpt_oss",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llama_biases", "mistral", "qwen2", "qwen3_moe_mixed", "qwen3_window", "granite", "hunyuan_dense")
    ),
])  # fmt: skip
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, name: str) -> None:
    assert name in FAMILIES
    source = write_family(tmp_path / "source", name)
    export(_load(source), source, tmp_path / "out")
    _assert_same(_load(tmp_path / "out"), _load(source))
    ours, theirs = (torch_logits(torch_model(folder), TOKENS) for folder in (tmp_path / "out", source))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.torch
def test_what_chooses_experts_stays_in_f32(tmp_path: Path) -> None:
    """Loaded, converted or exported in bf16: experts near each other must not change places."""
    source = write_family(tmp_path / "source", "glm4_moe")
    config, exact = ModelConfig.from_folder(source), _load(source)
    convert(source, tmp_path / "converted", dtype="bf16")
    export(exact, source, tmp_path / "exported", dtype="bf16")
    assert torch_logits(torch_model(tmp_path / "exported"), TOKENS).shape == (len(TOKENS), config.vocab_size)
    kept = [name for name in exact if name.endswith((".router", ".correction"))]
    assert len(kept) == 2 * (config.num_layers - len(config.experts.dense_layers))
    for folder in (source, tmp_path / "converted", tmp_path / "exported"):
        narrow = load_params(folder, config, jnp.bfloat16)
        _assert_same({name: narrow[name] for name in kept}, {name: exact[name] for name in kept})
        assert narrow["layers.1.experts.down"].dtype == jnp.bfloat16


def test_misuse_is_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    params = _load(source)
    with pytest.raises(ConfigError, match="must be an empty or a new folder"):
        export(params, source, source)
    with pytest.raises(ConfigError, match="dtype must be one of auto, f16, bf16, f32, got 'f8'"):
        export(params, source, tmp_path / "out", dtype="f8")
    expected = r"weight norm has shape \[31\], expected \[32\] by config.json; these weights are of another model"
    with pytest.raises(CheckpointError, match=expected):
        export(params | {"norm": jnp.ones(31)}, source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="weight more is not part of a model with this"):
        export(params | {"more": jnp.ones(1)}, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="weight norm has a value that is not finite in f16; write it as f32"):
        export(params | {"norm": jnp.full(32, 1e5)}, source, tmp_path / "out", dtype="f16")
    with pytest.raises(CheckpointError, match="found neither"):
        _load(tmp_path / "out")


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


def test_a_part_that_is_missing_or_broken_is_not_read_as_zeros(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "copied"
    shutil.copytree(pair[1], out)
    config = ModelConfig.from_folder(out)
    chunk = max((path for path in (out / "weights").glob("*/c/**/*") if path.is_file()), key=lambda p: p.stat().st_size)
    for content in (b"broken", None):
        chunk.unlink() if content is None else chunk.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a weight is missing or broken .*convert the checkpoint again"):
            load_params(out, config)


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
    headless = write_checkpoint(tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, headless / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight is missing, expected with shape"):
        convert(headless, tmp_path / "headless_out")
