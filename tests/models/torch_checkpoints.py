"""Tiny random checkpoints of real families, written by transformers itself (torch), and what it makes of them.

Weights are drawn so that attention is peaked and logits spread over a few units; with the library's own initialisation
every difference would be hidden.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.checkpoints import byte_tokenizer, write_tokenizer

VOCABULARY = 320
WINDOW = 48
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": [0, 1], "head_dim": 16,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
_GEMMA = {
    "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0,
}  # fmt: skip
_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 700,
    "short_factor": [1 + pair / 9 for pair in range(8)], "long_factor": [2 + pair**1.5 for pair in range(8)],
}  # fmt: skip
_QWEN_MOE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM_MOE = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "num_key_value_heads": 4}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama_yarn_mscale": (
        "Llama", {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False, "beta_fast": 16}}
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN | {"attention_factor": 1.3}}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3_window": (
        "Qwen3", {
            "use_sliding_window": True, "sliding_window": WINDOW, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": (
        "Mixtral", {
            "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": WINDOW,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", _QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe", _QWEN_MOE | {
            "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": True,
            "use_sliding_window": True, "sliding_window": WINDOW,
        },
    ),
    "llama3_instruct": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "eos_token_id": [0, 1, 7]}),
    "gemma2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma2_biases": ("Gemma2", _GEMMA | {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 32}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": WINDOW, "hidden_size": 64}),
    "phi4_mini": (
        "Phi3", {
            "pad_token_id": 0, "hidden_size": 128, "head_dim": 32, "tie_word_embeddings": True, "sliding_window": 2000,
            "rope_parameters": _LONGROPE | {
                "partial_rotary_factor": 0.75, "short_factor": [1 + pair / 9 for pair in range(12)],
                "long_factor": [1e3] * 12,
            },
        },
    ),
    "phi3_long": (
        "Phi3", {
            "pad_token_id": 0, "hidden_size": 64,
            "rope_parameters": _LONGROPE | {"original_max_position_embeddings": 1, "attention_factor": 1.2},
        },
    ),
    "gpt_oss": (
        "GptOss", {
            "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64,
            "sliding_window": WINDOW, "swiglu_limit": 0.5, "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "granite": (
        "Granite", {
            "embedding_multiplier": 3.0, "attention_multiplier": 0.15, "residual_multiplier": 0.4,
            "logits_scaling": 0.7, "attention_bias": True, "mlp_bias": True,
        },
    ),
    "gemma3": ("Gemma3", _GEMMA | {"sliding_window_pattern": 2, "rope_parameters": _TWO_BASES}),
    "olmo2": ("Olmo2", {"attention_bias": True, "pad_token_id": 0}),
    "olmoe": ("Olmoe", {
        "num_experts": 12, "num_experts_per_tok": 3, "hidden_size": 64, "intermediate_size": 24, "pad_token_id": 0,
        "attention_bias": True,
    }),
    "olmo3": (
        "Olmo3", {
            "num_hidden_layers": 3, "sliding_window": WINDOW, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {
                "rope_type": "default", "rope_theta": 500.0,
            }},
        },
    ),
    "exaone4": (
        "Exaone4", {"num_hidden_layers": 3, "sliding_window": WINDOW, "sliding_window_pattern": 3, "pad_token_id": 0}
    ),
    "exaone4_full": (
        "Exaone4", {
            "sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": _LLAMA3,
            "pad_token_id": 0,
        },
    ),
    "smollm3": (
        "SmolLM3", {
            "num_hidden_layers": 4, "no_rope_layer_interval": 3, "attention_bias": True, "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "smollm3_listed": (
        "SmolLM3", {
            "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "pad_token_id": 0, "tie_word_embeddings": False,
        },
    ),
    "seed_oss": ("SeedOss", {"pad_token_id": 0}),
    "seed_oss_biases": (
        "SeedOss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "pad_token_id": 0}
    ),
    "glm": ("Glm", {"pad_token_id": 0}),
    "glm4": ("Glm4", {"attention_bias": False, "pad_token_id": 0, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "minimax_m2": (
        "MiniMaxM2", {
            "num_local_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe", _QWEN_MOE | {
            "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "num_key_value_heads": 4,
        },
    ),
    "glm4_moe": ("Glm4Moe", _GLM_MOE | {"num_hidden_layers": 3, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4_moe_air": ("Glm4Moe", _GLM_MOE | {"attention_bias": True, "n_shared_experts": 2, "norm_topk_prob": False}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "pad_token_id": 0}),
    "ministral3": (
        "Ministral3", {"pad_token_id": 0, "rope_parameters": _YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        }},
    ),
    "hunyuan_dense": (
        "HunYuanDenseV1", {"attention_bias": True, "pad_token_id": 0, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 50.0,
        }},
    ),
    "hunyuan_dense_plain": ("HunYuanDenseV1", {"pad_token_id": 0, "tie_word_embeddings": True}),
}  # fmt: skip
"""Class and configuration by name. head_dim is not hidden_size / num_attention_heads."""


_ENCODER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_ENCODER: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (  # transformers caps the logits of the text model alone only; published models cap none
        "Gemma3",
        _GEMMA | {"sliding_window_pattern": 2, "rope_parameters": _TWO_BASES, "final_logit_softcapping": None},
        _ENCODER,
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}, _ENCODER | {"head_dim": 8}),
    "ministral3": ("Mistral3", FAMILIES["ministral3"][1] | {"model_type": "ministral3"}, _ENCODER | {"head_dim": 8}),
    "qwen2_vl": ("Qwen2VL", {"head_dim": None, "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}}, {
        "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1,
    }),
    "qwen2_5_vl": ("Qwen2_5_VL", {"hidden_size": 64, "head_dim": None, "rope_parameters": _MROPE},
                   _QWEN_ENCODER | {"out_hidden_size": 64}),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
                 _QWEN_ENCODER | {"deepstack_visual_indexes": [0]}),
}  # fmt: skip
"""Models of images and text: class, and configuration of the text model and of the encoder, by name."""


def write_family(folder: Path, name: str, *, seed: int = 0, shards: bool = False) -> Path:
    """Let transformers write the checkpoint, with a tokenizer beside it; return the folder."""
    import transformers

    family, overrides = FAMILIES[name]
    of_family = getattr(transformers, f"{family}ForCausalLM")
    return _write(folder, of_family, of_family.config_class(**(_SIZES | overrides)), family, seed, shards=shards)


def write_with_images(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Let transformers write a checkpoint of images and text, with a tokenizer beside it; return the folder."""
    import transformers

    family, text, vision = WITH_IMAGES[name]
    whole = getattr(transformers, f"{family}ForConditionalGeneration")
    text = {key: value for key, value in (_SIZES | text).items() if value is not None or key != "head_dim"}
    config = whole.config_class(text_config=text, vision_config=vision)
    return _write(folder, whole, config, family, seed)


def write_glm_mtp(folder: Path, *, seed: int = 0) -> Path:
    """Write a GLM-4.5 checkpoint with an MTP layer, which is a layer of the model with three norms and a projection."""
    write_family(folder, "glm4_moe", seed=seed)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    last, d = config["num_hidden_layers"] - 1, config["hidden_size"]
    path.write_text(json.dumps(config | {"num_hidden_layers": last, "num_nextn_predict_layers": 1}))
    rng = np.random.default_rng(seed)
    tensors = load_file(folder / "model.safetensors")
    own = {name: rng.uniform(0.5, 1.5, d) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = rng.standard_normal((d, 2 * d)) * 1.5 / np.sqrt(2 * d)
    tensors |= {f"model.layers.{last}.{name}.weight": tensor.astype(np.float32) for name, tensor in own.items()}
    for copied in ("model.embed_tokens.weight", "lm_head.weight"):  # published ones are the model's, once more
        tensors[f"model.layers.{last}.{'shared_head.head' if 'head' in copied else 'embed_tokens'}.weight"] = tensors[
            copied
        ]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def torch_mtp_logits(folder: Path, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Logits f[V] of the MTP layer of `write_glm_mtp` after the last token, by transformers' own module."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.modeling_layers import MtpLayer
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    given = json.loads((folder / "config.json").read_text())
    layers = given["num_hidden_layers"] + 1
    whole = folder / "as_a_layer"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(given | {"num_hidden_layers": layers}))
    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{layers - 1}."
    own = {name.removeprefix(prefix): torch.as_tensor(tensors[name]) for name in tensors if name.startswith(prefix)}
    extra = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    kept = {name: each for name, each in tensors.items()
            if not name.startswith(tuple(f"{prefix}{each}." for each in extra))}  # fmt: skip
    save_file(kept, whole / "model.safetensors", {"format": "pt"})
    model = Glm4MoeForCausalLM.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager").eval()
    config = Glm4MoeConfig.from_pretrained(whole, attn_implementation="eager")
    layer = MtpLayer(config, glm.Glm4MoeDecoderLayer, glm.Glm4MoeRMSNorm, 1)
    layer.mtp_block = model.model.layers[-1]
    names = {"enorm": "enorm", "hnorm": "hnorm", "post_norm": "shared_head.norm", "eh_proj": "eh_proj"}
    for name, tensor in names.items():
        getattr(layer, name).weight.data = own[f"{tensor}.weight"]
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.as_tensor(tokens)[None])
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotary = model.model.rotary_emb(embedded, position_ids=places)
        out = layer(embedded, torch.as_tensor(features)[None], rotary, mask, places, None)
        return model.lm_head(out)[0, -1].numpy()


def _write(folder: Path, model_class: Any, config: Any, family: str, seed: int, *, shards: bool = False) -> Path:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight"):
                    centre = 0.0 if "Gemma" in family else 1.0  # Gemma's norms multiply by 1 + weight
                    parameter.uniform_(centre - 0.5, centre + 0.5)
                elif parameter_name.endswith("bias"):
                    parameter.normal_(0, 0.5)
                else:
                    parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")
    write_tokenizer(folder, byte_tokenizer())
    return folder


def torch_model(folder: Path, *, with_images: bool = False) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    return whole.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def torch_logits(model: Any, tokens: list[int] | np.ndarray) -> np.ndarray:
    """f32[T, V]: row i is what a text of i + 1 tokens gives."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens))[None], use_cache=False).logits[0].numpy()


def torch_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens that transformers' generate gives, whatever ends a text."""
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.as_tensor([tokens]), attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
            do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(tokens) :].tolist()
