"""Configuration files of a checkpoint: every family, setting and error."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.config import GenerationDefaults, ModelConfig, resolve_folder
from adaserve_jax.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from adaserve_jax.types import SamplingParams
from tests.models.checkpoints import CONFIG, MIXTRAL


def _write(folder: Path, **overrides: Any) -> Path:
    config = {key: value for key, value in (CONFIG | overrides).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_field_is_read(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(_write(tmp_path)) == ModelConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        max_position=256,
        eos_token_ids=(0,),
    )


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    old = ModelConfig.from_folder(_write(tmp_path, rope_theta=5e5, rope_scaling=None, torch_dtype="float16"))
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    new = ModelConfig.from_folder(_write(tmp_path, rope_theta="absent", rope_parameters=rope, dtype="float16"))
    assert old == new
    assert new.rope_theta == 5e5


def test_absent_keys_take_transformers_defaults(tmp_path: Path) -> None:
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    absent = dict.fromkeys((*names, "rope_theta", "hidden_act", "eos_token_id"), "absent")
    config = ModelConfig.from_folder(_write(tmp_path, **absent))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.max_position) == (4, 8, 1e-6, 2048)
    assert (config.tie_embeddings, config.rope_theta) == (False, 10000.0)
    assert config.eos_token_ids == (2,)


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert ModelConfig.from_folder(_write(tmp_path, eos_token_id=[3, 9])).eos_token_ids == (7, 3, 9)
    assert ModelConfig.from_folder(_write(tmp_path, eos_token_id=None)).eos_token_ids == (7, 3)
    assert ModelConfig.from_folder(_write(tmp_path, eos_token_id="absent")).eos_token_ids == (7, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ModelConfig.from_folder(_write(tmp_path, eos_token_id="absent")).eos_token_ids == ()


@pytest.mark.parametrize("given", [True, -1, 2.0, "</s>", [3, None], [3, True], {"id": 3}])
def test_eos_ids_that_are_none_are_refused_by_their_file(tmp_path: Path, given: Any) -> None:
    expected = r"config\.json: eos_token_id must be a token id, a list of token ids, or null, got "
    with pytest.raises(CheckpointError, match=rf"/{expected}"):
        ModelConfig.from_folder(_write(tmp_path, eos_token_id=given))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(CheckpointError, match=rf"/generation_{expected}"):
        ModelConfig.from_folder(_write(tmp_path))


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_mistral_differs_by_its_window(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    assert ModelConfig.from_folder(_write(tmp_path, **MISTRAL, sliding_window=None)) == llama
    assert ModelConfig.from_folder(_write(tmp_path, **MISTRAL)) == replace(llama, windows=(4096, 4096))
    window = ModelConfig.from_folder(_write(tmp_path, **MISTRAL, sliding_window=7))
    assert (window.window_of(0), window.window_of(1), llama.window_of(1)) == (7, 7, None)


def test_qwen2_has_biases_and_windows_only_when_asked(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    plain = ModelConfig.from_folder(_write(tmp_path, **QWEN2, sliding_window=4, max_window_layers=1))
    assert plain == replace(llama, qkv_bias=True)
    used = {"use_sliding_window": True, "sliding_window": 4}
    window = ModelConfig.from_folder(_write(tmp_path, **QWEN2, **used, max_window_layers=1))
    assert window == replace(plain, windows=(None, 4))
    types = ["sliding_attention", "full_attention"]
    assert ModelConfig.from_folder(_write(tmp_path, **QWEN2, **used, layer_types=types)).windows == (4, None)
    assert ModelConfig.from_folder(_write(tmp_path, **QWEN2, **used)).windows == ()


def test_qwen3_normalises_queries_and_keys(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    assert ModelConfig.from_folder(_write(tmp_path, **QWEN3)) == replace(llama, qk_norm=True)
    biased = ModelConfig.from_folder(_write(tmp_path, **QWEN3, attention_bias=True, head_dim="absent"))
    assert biased == replace(llama, qk_norm=True, qkv_bias=True, out_bias=True, head_dim=128)


def test_mixtral_has_experts_in_every_layer(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    mixtral = ModelConfig.from_folder(_write(tmp_path, **MIXTRAL))
    assert mixtral.experts is not None
    assert replace(mixtral, experts=None) == llama
    assert (mixtral.experts.count, mixtral.experts.per_token, mixtral.experts.intermediate_size) == (6, 2, 48)
    assert mixtral.experts.normalised and mixtral.experts_of(1) == mixtral.experts
    # as in transformers
    unused = ModelConfig.from_folder(_write(tmp_path, **MIXTRAL, norm_topk_prob=False, routed_scaling_factor=1.0))
    assert unused == mixtral
    by_type = _write(tmp_path, **MIXTRAL | {"architectures": "absent", "num_local_experts": "absent"})
    assert ModelConfig.from_folder(by_type).experts == replace(mixtral.experts, count=8)
    assert ModelConfig.from_folder(_write(tmp_path, **MIXTRAL, sliding_window=4)).windows == (4, 4)
    assert ModelConfig.from_folder(_write(tmp_path, **MIXTRAL, rope_theta="absent")).rope_theta == 1e6


def test_qwen3_moe_has_experts_in_some_layers(tmp_path: Path) -> None:
    qwen3 = ModelConfig.from_folder(_write(tmp_path, **QWEN3, num_hidden_layers=6))
    settings = QWEN3_MOE | {"num_hidden_layers": 6, "num_experts": 10, "moe_intermediate_size": 20}
    every = ModelConfig.from_folder(_write(tmp_path, **settings))
    assert replace(every, experts=None) == qwen3
    assert every.experts is not None and not every.experts.normalised and every.experts.dense_layers == ()
    assert (every.experts.count, every.experts.per_token, every.experts.intermediate_size) == (10, 8, 20)
    some = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    mixed = ModelConfig.from_folder(_write(tmp_path, **settings, **some))
    assert mixed.experts == replace(every.experts, normalised=True, dense_layers=(0, 2, 3, 4))
    assert [mixed.experts_of(layer) is None for layer in range(6)] == [True, False, True, True, True, False]
    assert ModelConfig.from_folder(_write(tmp_path, **settings | {"num_experts": 0})) == qwen3
    newer = settings | {"num_experts": "absent", "num_local_experts": 10}  # as transformers 5 writes it
    assert ModelConfig.from_folder(_write(tmp_path, **newer)) == every
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}
    assert ModelConfig.from_folder(_write(tmp_path, **settings, **windows)).windows == (4,) * 6


def test_qwen2_moe_has_a_window_in_every_other_layer_before_some(tmp_path: Path) -> None:
    settings = QWEN2_MOE | {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 4}
    few = settings | {"max_window_layers": 3}
    assert ModelConfig.from_folder(_write(tmp_path, **settings)).windows == (4, None) * 3
    assert ModelConfig.from_folder(_write(tmp_path, **few)).windows == (4, None, 4, None, None, None)
    types = ["full_attention", "sliding_attention"] * 3
    assert ModelConfig.from_folder(_write(tmp_path, **few, layer_types=types)).windows == (None, 4) * 3
    assert ModelConfig.from_folder(_write(tmp_path, **few | {"use_sliding_window": False})).windows == ()


def test_gemma_2_has_caps_and_a_window_in_every_other_layer(tmp_path: Path) -> None:
    absent = dict.fromkeys(("tie_word_embeddings", "eos_token_id"), "absent")
    gemma = ModelConfig.from_folder(_write(tmp_path, **GEMMA2, **absent, num_hidden_layers=3))
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.query_scalar) == (50.0, 30.0, 256.0)
    assert (gemma.windows, gemma.tie_embeddings, gemma.eos_token_ids) == ((4096, None, 4096), True, (1,))
    assert gemma.offset_norms and gemma.post_norms and gemma.scaled_embedding and not gemma.qk_norm
    assert gemma.activation == "gelu_tanh"
    changed = {"attn_logit_softcapping": None, "final_logit_softcapping": 7, "query_pre_attn_scalar": 16}
    other = ModelConfig.from_folder(_write(tmp_path, **GEMMA2, **changed))
    assert (other.attention_softcap, other.logit_softcap, other.query_scalar) == (None, 7.0, None)


def test_gemma_3_has_two_rotary_bases_in_both_spellings(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": "absent", "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    gemma = ModelConfig.from_folder(_write(tmp_path, **GEMMA3, **old, num_hidden_layers=7))
    assert (gemma.rope_theta, gemma.window_rope_theta, gemma.rope_scaling) == (1e6, 500.0, LinearScaling(8.0))
    assert gemma.max_position == 256  # with the scaling in it
    assert gemma.windows == (4096,) * 5 + (None, 4096) and gemma.qk_norm
    parts = {"full_attention": scaling | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 500.0}}
    new = {"rope_parameters": parts, "rope_theta": "absent", "num_hidden_layers": 7}
    assert ModelConfig.from_folder(_write(tmp_path, **GEMMA3, **new)) == gemma


def test_phi_rotates_a_share_of_each_head_by_lists(tmp_path: Path) -> None:
    lists = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
    ignored = {"original_max_position_embeddings": 32}  # beside the one of the whole file, as in transformers
    rope = {"rope_scaling": lists | ignored | {"type": "su"}, "partial_rotary_factor": 0.375}
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}
    phi = ModelConfig.from_folder(_write(tmp_path, **PHI3, **rope, **remote, original_max_position_embeddings=64))
    assert (phi.rotary_dim, phi.fused_tensors, phi.max_position, phi.usual_context) == (6, ("qkv", "gate_up"), 256, 64)
    magnitude = math.sqrt(1 + math.log(4) / math.log(64))
    scaling = LongRopeScaling((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), 64, magnitude)
    assert phi.rope_scaling == scaling
    assert phi.for_context(0) == phi.for_context(64) == phi
    assert phi.for_context(65) == replace(phi, rope_scaling=replace(scaling, is_long=True))
    assert phi.for_context(65).usual_context == 256
    plain = ModelConfig.from_folder(_write(tmp_path, **PHI3))
    assert (plain.rotary_dim, plain.rope_scaling, plain.windows, plain.usual_context) == (None, None, (), 256)


def test_gpt_oss_has_sinks_and_clamped_experts(tmp_path: Path) -> None:
    settings = GPT_OSS | dict.fromkeys(("rope_theta", "max_position_embeddings"), "absent")
    found = ModelConfig.from_folder(_write(tmp_path, **settings, num_hidden_layers=3, num_local_experts=8))
    assert found.sinks and found.qkv_bias and found.out_bias and found.windows == (128, None, 128)
    assert found.experts is not None and found.experts.normalised and found.experts.biased
    assert (found.experts.count, found.experts.per_token, found.experts.clamp) == (8, 4, (7.0, 1.702))
    assert (found.rope_theta, found.max_position) == (150000.0, 131072)
    assert found.rope_scaling == YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False)


def test_granite_has_multipliers(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    given = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16.0}
    expected = replace(
        llama, query_scalar=64.0**2, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16
    )
    assert ModelConfig.from_folder(_write(tmp_path, **GRANITE, **given, attention_multiplier=1 / 64)) == expected
    assert ModelConfig.from_folder(_write(tmp_path, **GRANITE, attention_multiplier=0.25)) == llama
    assert ModelConfig.from_folder(_write(tmp_path, **GRANITE)) == replace(llama, query_scalar=1.0)
    assert ModelConfig.from_folder(_write(tmp_path, residual_multiplier=None)) == llama
    by_type = GRANITE | {"architectures": "absent", "attention_multiplier": 0.25}
    assert ModelConfig.from_folder(_write(tmp_path, **by_type)) == llama


def test_llama_biases_are_read(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(_write(tmp_path))
    biased = ModelConfig.from_folder(_write(tmp_path, attention_bias=True, mlp_bias=True))
    assert biased == replace(llama, qkv_bias=True, out_bias=True, mlp_bias=True)


def test_scalings_are_read_in_both_spellings(tmp_path: Path) -> None:
    def scaled(**rope: Any) -> ModelConfig:
        return ModelConfig.from_folder(_write(tmp_path, **rope))

    linear = scaled(rope_scaling={"type": "linear", "factor": 2})
    assert (linear.rope_scaling, linear.max_position) == (LinearScaling(2.0), 512)
    assert scaled(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 1e4}) == linear
    llama3 = scaled(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64}, rope_theta=5e5)
    assert (llama3.rope_scaling, llama3.max_position) == (Llama3Scaling(8.0, 1.0, 4.0, 64), 256)
    assert scaled(rope_scaling=LLAMA3).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 256)
    yarn = scaled(rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 1.5})
    assert (yarn.rope_scaling, yarn.max_position) == (YarnScaling(4.0, 256, 1.5), 1024)
    above = scaled(rope_scaling={"type": "yarn", "factor": None}, original_max_position_embeddings=64)
    assert above.rope_scaling == YarnScaling(4.0, 64, 0.1 * math.log(4) + 1)
    dynamic = scaled(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert dynamic == ModelConfig.from_folder(_write(tmp_path))


PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "use_sliding_window": False}, {"nope_layers": (1,)}),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 1}, {"nope_layers": (0, 1)}),
    ("SeedOssForCausalLM", {}, {"qkv_bias": True, "out_bias": False, "mlp_bias": False}),
    (
        "GlmForCausalLM", {"attention_bias": False},
        {"rotary_dim": 8, "interleaved_rotary": True, "fused_tensors": ("gate_up",), "qkv_bias": False},
    ),
    (
        "Glm4ForCausalLM", {"partial_rotary_factor": 0.25, "eos_token_id": "absent"},
        {"rotary_dim": 4, "qkv_bias": True, "out_bias": False, "eos_token_ids": (151329, 151336, 151338)},
    ),
    (
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 2,
         "routed_scaling_factor": 2.5, "use_qk_norm": True, "num_nextn_predict_layers": 0},
        {"qk_norm": True, "rotary_dim": 8, "mtp": None},
    ),
    ("Ernie4_5ForCausalLM", {"use_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    (
        "Ministral3ForCausalLM",
        {"max_position_embeddings": 256, "rope_parameters": {
            "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1, "max_position_embeddings": 256,
        }},
        {"query_growth": (0.1, 16), "rope_scaling": YarnScaling(16.0, 16, 1.0), "windows": ()},
    ),
    (
        "Ministral3ForCausalLM",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16,
                                             "llama_4_scaling_beta": 0.1}},
        {"query_growth": (0.1, 16)},
    ),
    (
        "Ministral3ForCausalLM",  # Devstral 2
        {"rope_parameters": {
            "type": "yarn", "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 4096,
            "beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0,
        }},
        {"query_growth": None, "rope_scaling": YarnScaling(64.0, 4096, 0.1 * math.log(64) + 1, beta_fast=4.0)},
    ),
    (
        "Ministral3ForCausalLM", {},
        {"query_growth": (0.1, 16384), "rope_scaling": YarnScaling(16.0, 16384, 1.0)},
    ),
    (
        "Qwen3ForCausalLM",  # DeepSeek-R1-0528-Qwen3-8B
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                          "attn_factor": 0.8782488562869419}},
        {"rope_scaling": YarnScaling(4.0, 32768, 0.1 * math.log(4) + 1)},
    ),
    ("Olmo2ForCausalLM", {}, {"joint_qk_norm": True, "rope_theta": 10000.0, "tie_embeddings": False}),
    (
        "Olmo3ForCausalLM", {"rope_theta": 5e5, "layer_types": ["sliding_attention", "full_attention"],
                             "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2}},
        {"windows": (4096, None), "window_rope_theta": 5e5, "rope_scaling": YarnScaling(4.0, 256, 1.2)},
    ),
    (
        "Exaone4ForCausalLM",
        {"sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention", "full_attention"]},
        {"windows": (4096, None), "nope_layers": (1,), "qk_norm": True, "joint_qk_norm": False},
    ),
    ("Exaone4ForCausalLM", {"sliding_window": None, "sliding_window_pattern": 0}, {"windows": (), "nope_layers": ()}),
    ("Exaone4ForCausalLM", {"layer_types": ["full_attention"] * 2}, {"windows": (), "nope_layers": (0, 1)}),
    (
        "MiniMaxM2ForCausalLM",
        {"rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": True,
         "auto_map": {"AutoModelForCausalLM": "m.M"}},
        {"rotary_dim": 8, "joint_qk_norm": True},
    ),
    (
        "Qwen3MoeForCausalLM",
        {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "moe_intermediate_size": 8},
        {"qk_norm": True, "qkv_bias": False},
    ),
    (
        "HunYuanDenseV1ForCausalLM",
        {"rope_theta": 1e4, "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2, "attention_head_dim": 16,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "type": "dynamic"}},
        {"qk_norm": True, "late_qk_norms": ("query_layernorm", "key_layernorm"), "qkv_bias": False,
         "rope_scaling": None, "rope_theta": 1e4 * 1000 ** (16 / 14), "max_position": 256},
    ),
    (
        "HunYuanDenseV1ForCausalLM", {"attention_bias": True, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": False, "rope_scaling": None},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "given", "expected"), PUBLISHED)
def test_settings_are_read_as_they_are_published(
    tmp_path: Path, architecture: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = {"rope_theta": "absent", "head_dim": 16, "architectures": [architecture], "model_type": "absent"}
    found = ModelConfig.from_folder(_write(tmp_path, **plain | given))
    assert {name: getattr(found, name) for name in expected} == expected


def test_experts_and_mtp_layers_of_glm_are_read(tmp_path: Path) -> None:
    found = ModelConfig.from_folder(_write(
        tmp_path, architectures=["Glm4MoeForCausalLM"], moe_intermediate_size=8, n_shared_experts=2,
        routed_scaling_factor=2.5, num_nextn_predict_layers=1,
    ))  # fmt: skip
    assert found.experts is not None and found.mtp is not None
    assert (found.experts.count, found.experts.per_token, found.experts.dense_layers) == (128, 8, (0,))
    assert (found.experts.shared, found.experts.scaling, found.experts.normalised) == (16, 2.5, True)
    assert found.mtp.layers == ("model.layers.2.",)
    head = found.mtp_head()
    assert head.is_mtp and head.experts_of(0) is not None and head.num_layers == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of one name, got 'LlamaForCausalLM'"),
    ({"architectures": ["GPT2LMHeadModel"]}, r"architectures \['GPT2LMHeadModel'\] is not supported; use one of Llama"),
    ({"architectures": "absent", "model_type": "gemma"}, "architectures 'gemma' is not supported"),
    (MISTRAL | {"attention_bias": True}, "attention_bias = True is not supported"),
    (QWEN3 | {"mlp_bias": True}, "mlp_bias = True is not supported"),
    ({"sliding_window": 512}, "sliding_window = 512 is not supported"),
    (QWEN2 | {"use_mrope": True}, "use_mrope = True is not supported"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config\.quant_method = None is not supported"),
    (
        {"auto_map": {"AutoModelForCausalLM": "m.M"}},
        "auto_map = .* is not supported; code of a checkpoint is never run",
    ),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu' is"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types = .* is not supported; only 'full_attention' in every"),
    (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types = .*; only 'sliding_attention' in every layer"),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "layer_types = .*; only 'full_attention' in every layer"),
    (
        QWEN3 | {"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types = .*; one of 'full_attention' and 'sliding_attention' for each of 2 layers is",
    ),
    (
        {"rope_scaling": {"type": "longrope"}},
        "rope_scaling of type 'longrope' is not supported; use one of default, li",
    ),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters of type 'proportional' is not supported"),
    (
        {"rope_scaling": {"type": "default", "mrope_section": [1]}},
        r"rope_scaling.mrope_section = \[1\] is not supported",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters = .*full_attention"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22 is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
    (GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported; only 'gelu_pytorch_tanh'"),
    (
        GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
        "rope_parameters.sliding_attention.rope_type = 'linear' is not supported; only 'default' is",
    ),
    (
        GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"type": "linear", "factor": 8}}},
        "rope_parameters.sliding_attention.type = 'linear' is not supported; only 'default' is",
    ),
    (
        GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {"mrope_section": [1]}}},
        r"rope_parameters.sliding_attention.mrope_section = \[1\] is not supported",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0}}, "rope_scaling.alpha = 9.0 is not supported"),
    ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla = True is not supported"),
    (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2, "mscale_x": 1}}, "rope_scaling.mscale_x = 1 is not"),
    (
        {"architectures": ["Glm4MoeForCausalLM"], "n_group": 2},
        "n_group = 2 is not supported; only 1 is",
    ),
    (
        MIXTRAL | {"routed_scaling_factor": 2.5},
        "routed_scaling_factor = 2.5 is not supported; only 1 is in this family",
    ),
    (
        QWEN3 | {"use_sliding_window": True, "layer_types": 5},
        "layer_types = 5 is not supported; one of 'full_attention' and 'sliding_attention' for each of 2 layers is",
    ),
    (QWEN3 | {"use_sliding_window": True, "layer_types": [["full_attention"]] * 2}, "layer_types = .*; one of"),
    ({"architectures": [["LlamaForCausalLM"]]}, r"architectures \[\['LlamaForCausalLM'\]\] is not supported"),
    ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM.* is not supported, which needs latent"),
]


@pytest.mark.parametrize(
    ("overrides", "text"), REFUSED, ids=[next(iter(o)) + str(i) for i, (o, _) in enumerate(REFUSED)]
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        ModelConfig.from_folder(_write(tmp_path, **overrides))


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"layer_types": ["full_attention"]},
        r"layer_types must be one kind for each of 2 layers \(num_hidden_layers\), got",
    ),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    (QWEN2 | {"use_sliding_window": "false"}, "use_sliding_window must be true or false, got 'false'"),
    (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0 and at most 1, got 1.5"),
    (PHI3 | {"partial_rotary_factor": 0.2}, "partial_rotary_factor must give an even dimension, got 3"),
    (PHI3 | {"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of numbers above 0, got None"),
    (
        PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1] * 8}},
        "short_factor and long_factor must have 8 numbers, one per rotated pair, got 1 and 8",
    ),
    (
        PHI3 | {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1},
        "original_max_position_embeddings must be an integer >= 2, got 1",
    ),
    (PHI3 | {"rotary_dim": 18}, r"rotary_dim must be at most head_dim \(16\), got 18"),
    (
        {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
        "rope_theta must be above 1 with yarn, whose ramp divides by its logarithm, got 1",
    ),
    ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor must be a number above 0, got inf"),
    ({"hidden_size": "absent"}, "hidden_size must be an integer >= 1, got None"),
    ({"vocab_size": 10**30}, "vocab_size must be an integer of at most 2147483647, got 1000"),
    ({"rope_theta": 10**400}, "rope_theta must be a number above 0, got 1000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
    ({"auto_map": 5}, "auto_map must be an object, got 5"),
    ({"vocab_size": "many"}, "vocab_size must be an integer >= 1, got 'many'"),
    ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
    ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, got -1"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number above 0, got None"),
    (
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
        r"high_freq_factor must be above low_freq_factor \(1\), got 1",
    ),
    (MISTRAL | {"sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
    ({"rope_theta": None}, "rope_theta must be a number above 0, got None"),
    (MIXTRAL | {"num_local_experts": None}, "num_local_experts must be an integer >= 1, got None"),
    (MIXTRAL | {"num_experts_per_tok": 7}, r"num_experts_per_tok must be at most num_local_experts \(6\), got 7"),
    (GRANITE | {"attention_multiplier": 0}, "attention_multiplier must be a number above 0, got 0"),
    (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
    (SMOLLM3 | {"no_rope_layers": [1]}, r"no_rope_layers must be a list of 2 numbers, 0 or 1, got \[1\]"),
]


@pytest.mark.parametrize(("overrides", "text"), WRONG, ids=[next(iter(o)) + str(i) for i, (o, _) in enumerate(WRONG)])
def test_wrong_values_are_named(tmp_path: Path, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        ModelConfig.from_folder(_write(tmp_path, **overrides))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing; expected a Hugging Face checkpoint folder"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object, got list"):
        ModelConfig.from_folder(tmp_path)


def test_host_side_modules_import_no_jax() -> None:
    modules = ", ".join(f"adaserve_jax.models.{name}" for name in ("config", "tokenizer", "detokenizer", "grow"))
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20}', GenerationDefaults(0.6, 0.9, 20)),
        ('{"eos_token_id": 3}', GenerationDefaults()),
        ('{"top_k": -1, "min_p": 0.1}', GenerationDefaults(top_k=0, min_p=0.1)),
        ('{"do_sample": false, "temperature": 0.6}', GenerationDefaults(temperature=0.0)),
        ('{"temperature": 0.6, "top_p": 0}', GenerationDefaults(temperature=0.0)),
        ('{"top_k": 4294967296}', GenerationDefaults(top_k=0)),
        ('{"do_sample": false, "repetition_penalty": 1.1}', GenerationDefaults(0.0, repetition_penalty=1.1)),
    ],
)
def test_values_are_read(tmp_path: Path, text: str, expected: GenerationDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert GenerationDefaults.from_folder(tmp_path) == expected


def test_without_a_file_requests_keep_their_own_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path).sampling_params() == SamplingParams()
    assert GenerationDefaults(0.6, top_k=20).sampling_params() == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temperature": "warm"}', "temperature"), ('{"top_p": 1.5}', "top_p"), ('{"top_k": 2.5}', "top_k"),
        ('{"repetition_penalty": 0}', "repetition_penalty"),
    ],
)  # fmt: skip
def test_malformed_values_are_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {named} must be"):
        GenerationDefaults.from_folder(tmp_path)


def test_names_resolve_to_folders(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path), "target") == tmp_path
    assert resolve_folder("demo", "target").parts[-3:] == ("models", "demo", "target")
    with pytest.raises(
        CheckpointError, match=r"hf download meta-llama/Llama-3.2-1B --local-dir FOLDER, then give FOLDER"
    ):
        resolve_folder("meta-llama/Llama-3.2-1B", "target")
    with pytest.raises(CheckpointError, match=r"draft checkpoint '.*nowhere': expected a folder at .*, found nothing"):
        resolve_folder(tmp_path / "nowhere", "draft")
    with pytest.raises(CheckpointError, match="expected a folder at ~no-such-user/model, found nothing"):
        resolve_folder("~no-such-user/model", "target")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="found a file; give the path of a Hugging Face checkpoint folder"):
        resolve_folder(tmp_path / "file", "target")
