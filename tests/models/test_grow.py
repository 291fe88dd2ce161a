"""A grown checkpoint computes what its source computes, whatever grows."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import attend_dense, decode
from adaserve_jax.models.grow import GrownShape, grow, grow_head
from adaserve_jax.models.loading import load_params
from tests.models.checkpoints import write_checkpoint, write_eagle3, write_medusa
from tests.oracles.eagle3 import Head
from tests.oracles.llama import oracle_logits
from tests.oracles.medusa import medusa_scores

TOKENS = [3, 250, 17, 17, 300, 9, 41, 8]


@pytest.mark.parametrize(
    "shape",
    [
        GrownShape(layers=2, hidden=48, heads=4, kv_heads=2, mlp=48),
        GrownShape(layers=4, hidden=32, heads=4, kv_heads=2, mlp=80),
        GrownShape(layers=3, hidden=64, heads=12, kv_heads=3, mlp=96),
    ],
    ids=["hidden", "layers-mlp", "everything"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_preserved(tmp_path: Path, shape: GrownShape, tied: bool) -> None:
    source = write_checkpoint(tmp_path / "source", tie_word_embeddings=tied)
    config = grow(source, tmp_path / "grown", shape)
    assert ModelConfig.from_folder(tmp_path / "grown") == config
    assert (config.num_layers, config.hidden_size, config.num_heads) == (shape.layers, shape.hidden, shape.heads)
    difference = np.abs(oracle_logits(source, TOKENS) - oracle_logits(tmp_path / "grown", TOKENS))
    assert difference.max() < 1e-5


@pytest.mark.parametrize(
    ("given", "key"), [(("dtype",), "dtype"), (("torch_dtype",), "torch_dtype"), (("dtype", "torch_dtype"), "dtype")]
)
def test_what_has_grown_names_its_type_and_no_other(tmp_path: Path, given: tuple[str, ...], key: str) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=1)
    head = write_eagle3(tmp_path / "head", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 0, 0]})
    for folder in (source, head):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(given, "float16")))
    grow(source, tmp_path / "grown", GrownShape(layers=1, hidden=48, heads=4, kv_heads=2, mlp=48), dtype="bf16")
    grow_head(head, source, tmp_path / "grown_head", 48)
    for name, expected in (("grown", "bfloat16"), ("grown_head", "float32")):
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert {each: said[each] for each in ("dtype", "torch_dtype") if each in said} == {key: expected}


def test_a_head_of_the_source_reads_the_same_in_what_has_grown(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=4)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    head = write_eagle3(tmp_path / "head", eagle_config=layers, own_embedding=False)
    grow(source, tmp_path / "grown", GrownShape(layers=6, hidden=64, heads=12, kv_heads=3, mlp=96))
    config = grow_head(head, source, tmp_path / "grown-head", 64)
    config.check_target(ModelConfig.from_folder(tmp_path / "grown"))
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    found = []
    for target, folder, shared in (("source", head, embedding), ("grown", tmp_path / "grown-head", None)):
        streams: list[np.ndarray] = []
        oracle_logits(tmp_path / target, TOKENS, streams=streams)
        oracle = Head(folder, shared)
        features = np.concatenate([streams[layer] for layer in (0, 2, 3)], axis=1)[:-1]
        found.append(oracle.logits(oracle.read_target(TOKENS[1:], features)))
    possible = np.isfinite(found[0])
    np.testing.assert_allclose(found[1][possible], found[0][possible], atol=1e-4)
    with pytest.raises(CheckpointError, match="expected an EAGLE-3 head or Medusa heads, got a model of its own"):
        grow_head(source, source, tmp_path / "other", 64)


@pytest.mark.slow
def test_medusa_heads_of_the_source_read_the_same_in_what_has_grown(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=4)
    heads = write_medusa(tmp_path / "heads", blocks=2)
    grow(source, tmp_path / "grown", GrownShape(layers=6, hidden=64, heads=12, kv_heads=3, mlp=96))
    grow_head(heads, source, tmp_path / "grown-heads", 64).check_target(ModelConfig.from_folder(tmp_path / "grown"))
    found = []
    for target, folder in (("source", heads), ("grown", tmp_path / "grown-heads")):
        params = load_params(tmp_path / target, ModelConfig.from_folder(tmp_path / target))
        config = ModelConfig.from_folder(tmp_path / target)
        tokens = jnp.asarray(TOKENS)
        attend = attend_dense(config, jnp.zeros_like(tokens))
        hidden = np.asarray(decode(params, config, tokens, jnp.arange(len(TOKENS)), attend))
        found.append([medusa_scores(folder, column) for column in hidden.T])
    assert np.ptp(found[0], axis=-1).min() > 0.01
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_experts_compute_what_the_mlp_did(tmp_path: Path, family: str) -> None:
    """Also where Mixtral assumes other values for keys that the source leaves out."""
    left_out = dict.fromkeys(("rope_theta", "max_position_embeddings"))
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4}
    source = write_checkpoint(tmp_path / "source", **left_out, **(mistral if family == "mistral" else {}))
    shape = GrownShape(layers=3, hidden=48, heads=4, kv_heads=2, mlp=64, experts=5, experts_per_token=2)
    calls = []
    config = grow(source, tmp_path / "grown", shape, progress=lambda *step: calls.append(step))
    assert ModelConfig.from_folder(tmp_path / "grown") == config
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.intermediate_size) == (5, 2, 64)
    total = 3 * (6 + 1 + 3 * 5) + 3
    assert calls[-1] == ("growing", total, total)
    difference = np.abs(oracle_logits(source, TOKENS) - oracle_logits(tmp_path / "grown", TOKENS))
    assert difference.max() < 1e-5
    with pytest.raises(ConfigError, match="a mixture of experts cannot grow"):
        grow(tmp_path / "grown", tmp_path / "other", shape)


def test_experts_of_one_layer_are_chosen_otherwise_by_other_tokens(tmp_path: Path) -> None:
    """A damaged expert changes some tokens and not others: each goes through its own."""
    source = write_checkpoint(tmp_path / "source")
    shape = GrownShape(layers=2, hidden=32, heads=4, kv_heads=2, mlp=48, experts=4, experts_per_token=1)
    grow(source, tmp_path / "grown", shape)
    whole = oracle_logits(tmp_path / "grown", TOKENS)
    (path,) = (tmp_path / "grown").glob("*.safetensors")
    tensors = load_file(path)
    changed = []
    for expert in range(4):
        down = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        save_file(tensors | {down: tensors[down] * 0}, path)
        changed.append(np.abs(oracle_logits(tmp_path / "grown", TOKENS) - whole).max(axis=1) > 1e-6)
    assert (np.sum(changed, axis=0) == 1).all()
    assert max(map(np.sum, changed)) < len(TOKENS)


def test_a_window_holds_for_added_layers_and_other_families_are_refused(tmp_path: Path) -> None:
    shape = GrownShape(layers=4, hidden=48, heads=4, kv_heads=2, mlp=48)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4}
    source = write_checkpoint(tmp_path / "mistral", **mistral)
    config = grow(source, tmp_path / "grown", shape)
    assert config.windows == (4, 4, 4, 4)
    assert ModelConfig.from_folder(tmp_path / "grown") == config
    qwen = write_checkpoint(tmp_path / "qwen", architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    with pytest.raises(ConfigError, match="with biases, further norms or fused tensors cannot grow"):
        grow(qwen, tmp_path / "other", shape)


def test_lists_by_layer_grow_and_named_templates_are_copied(tmp_path: Path) -> None:
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 1],
               "layer_types": ["full_attention"] * 2}  # fmt: skip
    source = write_checkpoint(tmp_path / "smollm3", **smollm3)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS")
    grown = grow(source, tmp_path / "grown", GrownShape(layers=4, hidden=48, heads=4, kv_heads=2, mlp=48))
    assert ModelConfig.from_folder(tmp_path / "grown") == grown
    assert (tmp_path / "grown" / "additional_chat_templates" / "tool_use.jinja").read_text() == "TOOLS"


def test_what_would_grow_into_something_else_is_refused(tmp_path: Path) -> None:
    shape = GrownShape(layers=4, hidden=48, heads=4, kv_heads=2, mlp=48)
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 2.0}
    source = write_checkpoint(tmp_path / "granite", **granite)
    with pytest.raises(ConfigError, match="a checkpoint with multipliers cannot grow"):
        grow(source, tmp_path / "other", shape)
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]}
    seed_oss = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_out_bias": True}
    source = write_checkpoint(tmp_path / "seed_oss", **seed_oss)
    with pytest.raises(ConfigError, match="with biases, further norms or fused tensors cannot grow"):
        grow(source, tmp_path / "other", shape)
    source = write_checkpoint(tmp_path / "smollm3", **smollm3)
    with pytest.raises(ConfigError, match="a checkpoint with another rotary embedding cannot grow"):
        grow(source, tmp_path / "other", shape)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = write_checkpoint(tmp_path / "fp8", quantization_config=fp8)
    with pytest.raises(ConfigError, match="a quantised checkpoint cannot grow; grow the one that it was made from"):
        grow(source, tmp_path / "other", shape)
    source = write_checkpoint(tmp_path / "cut")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        grow(source, tmp_path / "other", shape)
    source = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, to which"):
        grow(source, tmp_path / "other", shape)
    assert not (tmp_path / "other").exists()


def test_several_shards_and_narrow_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve_jax.models.writing.SHARD_BYTES", 20_000)
    source = write_checkpoint(tmp_path / "source", shards=2, dtype="bf16")
    seen = []
    shape = GrownShape(layers=3, hidden=64, heads=8, kv_heads=2, mlp=96)
    grow(source, tmp_path / "grown", shape, dtype="bf16", progress=lambda *step: seen.append(step))
    assert len(list((tmp_path / "grown").glob("model-*.safetensors"))) > 2
    assert seen[-1] == ("growing", 9 * 3 + 3, 9 * 3 + 3)
    assert (tmp_path / "grown" / "tokenizer.json").exists()
    difference = np.abs(oracle_logits(source, TOKENS) - oracle_logits(tmp_path / "grown", TOKENS))
    assert difference.max() < 0.1  # norms are rounded again after rescaling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 16}, "hidden must be at least the source's 32, got 16"),
        ({"layers": 1}, "layers must be at least the source's 2, got 1"),
        ({"heads": 10, "kv_heads": 4}, "heads must be a multiple of kv_heads and at least 2 times as many"),
        ({"heads": 4, "kv_heads": 4}, "heads must be a multiple of kv_heads and at least 2 times as many"),
        ({"experts": 4, "experts_per_token": 5}, r"experts_per_token must be from 1 to experts \(4\), got 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    values = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "mlp": 64} | change
    with pytest.raises(ConfigError, match=message):
        grow(write_checkpoint(tmp_path / "source"), tmp_path / "grown", GrownShape(**values))
    assert not (tmp_path / "grown").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    with pytest.raises(ConfigError, match="must be an empty or a new folder"):
        grow(source, source, GrownShape(layers=2, hidden=64, heads=8, kv_heads=2, mlp=64))
