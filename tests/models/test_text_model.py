"""Checkpoints of images and text: settings and tensors of their text model, in every layout that is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.export import convert, export
from adaserve_jax.models.grow import GrownShape, grow
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.lora import read_adapter
from adaserve_jax.models.text_model import text_name
from adaserve_jax.models.tokenizer import Tokenizer
from tests.models.adapters import write_adapter
from tests.models.checkpoints import CONFIG, assert_same, load, write_checkpoint, write_tensors

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
OLDER, NEWER, FLAT = ("language_model.", "vision_tower."), ("model.language_model.", "model.visual."), ("", "visual.")
LAYOUTS = {"older": OLDER, "newer": NEWER, "flat": FLAT}


def written(name: str, prefix: str) -> str:
    """The name of a text model's tensor in a layout."""
    return name.replace("model.", prefix, 1) if prefix == NEWER[0] else prefix + name


def wrap(plain: Path, folder: Path, layout: str) -> Path:
    """Write the checkpoint of images and text whose text model is `plain`."""
    prefix, encoder = LAYOUTS[layout]
    folder.mkdir()
    for path in plain.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = {written(name, prefix): tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    tensors |= {f"{encoder}blocks.0.weight": np.ones((3, 3), np.float32)}
    tensors |= {"multi_modal_projector.weight": np.ones((3, 3), np.float32)} if layout == "older" else {}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    whole: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    whole |= {"vision_config": {"hidden_size": 3}}
    if layout == "flat":
        whole |= {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
        config = text | whole | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    else:
        del text["architectures"]
        config = whole | {"text_config": text, "eos_token_id": text.pop("eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A text model's checkpoint and the same inside another."""
    plain = write_checkpoint(tmp_path / "plain", **MISTRAL | (QWEN2 if request.param == "flat" else {}))
    if request.param == "flat":  # Qwen 2 has biases
        tensors = load_file(plain / "model.safetensors")
        names = [name for name in tensors if name.rpartition("self_attn.")[2][:6] in ("q_proj", "k_proj", "v_proj")]
        biases = {name.replace("weight", "bias"): tensors[name][:, 0].copy() for name in names}
        write_tensors(plain, tensors | biases)
    return plain, wrap(plain, tmp_path / "whole", request.param)


def assert_same_model(found: Path, expected: Path) -> None:
    """Both are the same model, bit for bit."""
    config = ModelConfig.from_folder(expected)
    assert ModelConfig.from_folder(found) == config
    assert_same(load(found), load(expected))


def test_the_text_model_is_that_of_a_checkpoint_of_its_own(pair: tuple[Path, Path]) -> None:
    plain, whole = pair
    assert_same_model(whole, plain)


@pytest.mark.parametrize(
    ("architecture", "theta"), [("Qwen2VLForConditionalGeneration", 1e6), ("Qwen3VLForConditionalGeneration", 5e5)]
)
def test_what_is_left_out_is_as_transformers_assumes_it_for_the_whole(
    tmp_path: Path, architecture: str, theta: float
) -> None:
    left_out = dict.fromkeys(("rope_theta", "rope_scaling", "num_key_value_heads", "rms_norm_eps"))
    text = {name: value for name, value in CONFIG.items() if name not in {*left_out, "architectures", "model_type"}}
    heads = {"num_attention_heads": 32, "hidden_size": 256, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text | heads}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.rope_theta == theta
    of_qwen2 = architecture.startswith("Qwen2")
    assert (config.num_kv_heads, config.rms_norm_eps) == ((8, 1e-5) if of_qwen2 else (32, 1e-6))


def test_what_is_written_from_it_is_a_text_model_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, whole = pair
    config = ModelConfig.from_folder(whole)
    export(load_params(whole, config), whole, tmp_path / "exported")
    assert_same_model(tmp_path / "exported", plain)
    convert(whole, tmp_path / "converted")
    assert_same_model(tmp_path / "converted", plain)
    for name in ("exported", "converted"):
        said = json.loads((tmp_path / name / "config.json").read_text())
        assert said["architectures"] == json.loads((plain / "config.json").read_text())["architectures"]
        assert not {"vision_config", "text_config"} & said.keys()


def test_it_grows_as_a_text_model_does(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", **MISTRAL)
    shape = GrownShape(3, 64, 8, 4, 96)
    for name, source in (("text", plain), ("whole", wrap(plain, tmp_path / "wrapped", "older"))):
        grow(source, tmp_path / name, shape)
    assert_same_model(tmp_path / "whole", tmp_path / "text")


def test_an_adapter_of_the_whole_changes_the_text_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = ModelConfig.from_folder(pair[0])
    theirs, ours = (
        read_adapter(write_adapter(tmp_path / f"of_{folder.name}", folder, seed=2), config, 4) for folder in pair
    )
    assert ours.keys() == theirs.keys()
    for name, matrix in theirs.items():
        np.testing.assert_array_equal(ours[name], matrix)


def test_a_chat_template_may_be_the_processors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", chat_template=None)
    assert Tokenizer.from_folder(folder).chat_template == ""
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])).endswith("ab!")


def config_of(folder: Path, **given: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(given))
    return ModelConfig.from_folder(folder)


def test_settings_that_gemma_leaves_out_are_those_that_transformers_assumes(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    found = config_of(tmp_path, architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3",
                      text_config=text, vision_config={}, eos_token_id=[1, 106])  # fmt: skip
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262208, 8, 4, 256)
    assert found.eos_token_ids == (1, 106) and found.tie_embeddings and found.qk_norm
    assert [found.window_of(layer) for layer in (4, 5, 33)] == [1024, None, 1024]
    assert found == config_of(tmp_path, model_type="gemma3", text_config=text, eos_token_id=[1, 106])


def test_top_settings_go_before_those_of_the_text_model(tmp_path: Path) -> None:
    text = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")}
    found = config_of(
        tmp_path, architectures=["Qwen3VLForConditionalGeneration"], tie_word_embeddings=True,
        text_config=text | {"model_type": "qwen3_vl_text", "tie_word_embeddings": False, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default",
        }},
    )  # fmt: skip
    assert found.tie_embeddings and found.rope_scaling is None and found.qk_norm


def test_other_text_models_are_refused(tmp_path: Path) -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    with pytest.raises(
        UnsupportedModelError,
        match=r"text_config.model_type = 'llama' is not supported; use one of mistral, ministral3",
    ):
        config_of(tmp_path, **whole, text_config={"model_type": "llama"})
    with pytest.raises(UnsupportedModelError, match=r"text_config.model_type = .*mistral.* is not supported"):
        config_of(tmp_path, **whole, text_config={"model_type": ["mistral"]})
    with pytest.raises(CheckpointError, match="text_config must be an object, got 3"):
        config_of(tmp_path, **whole, text_config=3)
    with pytest.raises(UnsupportedModelError, match="Gemma3ForSequenceClassification"):
        config_of(tmp_path, architectures=["Gemma3ForSequenceClassification"], model_type="gemma3")


@pytest.mark.parametrize("name", ["vision_tower.a", "model.vision_tower.a", "visual.a", "model.visual.a",
                                  "multi_modal_projector.a", "model.multi_modal_projector.a"])  # fmt: skip
def test_tensors_of_the_encoder_have_no_name(name: str) -> None:
    assert text_name(name) is None
    assert text_name("lm_head.weight") == "lm_head.weight"
