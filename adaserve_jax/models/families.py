"""Families of models: what each architecture of transformers differs by, and the names of its tensors.

The decoder is one. A family is an entry of FAMILIES: values of settings that its config.json may leave out, the
settings that it knows, and what holds for all of its checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_LLAMA_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


_QWEN_MOE_DEFAULTS = _QWEN_DEFAULTS | {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_GEMMA2_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = _GEMMA2_DEFAULTS | {
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


_GPT_OSS_DEFAULTS = _LLAMA_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "eos_token_id": None,
    "attention_bias": True,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
_PHI3_DEFAULTS = _LLAMA_DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
}
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_GRANITE_DEFAULTS = _LLAMA_DEFAULTS | dict.fromkeys(_MULTIPLIERS, 1.0)


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face's names of a layer's experts: of their block, of the three matrices of each, and of the router.

    stacked: all experts of a matrix are one tensor, [E, in, out], with columns of gate and up in turns, and all
    have biases. shared, shared_gate: the expert that all tokens go through, and the vector by which it is weighed; "":
    there is none. correction: the bias by which experts are chosen; "": there is none.
    """

    block: str
    gate: str
    up: str
    down: str
    router: str = "gate"
    stacked: bool = False
    shared: str = ""
    shared_gate: str = ""
    correction: str = ""

    @property
    def matrices(self) -> tuple[str, str, str]:
        """Names of gate, up and down."""
        return self.gate, self.up, self.down


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
_GPT_OSS_NAMES = ExpertNames("mlp", "gate_up_proj", "gate_up_proj", "down_proj", router="router", stacked=True)
_QWEN_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_QWEN2_NAMES = replace(_QWEN_NAMES, shared="shared_expert", shared_gate="shared_expert_gate")
_MINIMAX_NAMES = replace(MIXTRAL_NAMES, correction="e_score_correction_bias")
_GLM_NAMES = replace(_QWEN_NAMES, shared="shared_experts", correction="gate.e_score_correction_bias")


@dataclass(frozen=True)
class MtpNames:
    """Hugging Face's names of a checkpoint's MTP layers. layers: their beginnings, layer by layer. token_norm,
    hidden_norm, projection, norm: of what an MTP layer has beside the tensors of a layer. token_first: the projection
    reads the token's embedding before the target's output.
    """

    layers: tuple[str, ...]
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    token_first: bool = False


_MIMO_MTP = MtpNames(
    ("model.mtp_layers.{mtp}.",), "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
)
_GLM_MTP = MtpNames(("model.layers.{layer}.",), "enorm", "hnorm", "eh_proj", "shared_head.norm", token_first=True)


@dataclass(frozen=True)
class Family:
    """Describes one architecture of transformers, an entry of FAMILIES; CONTRIBUTING.md says how to add one.

    `ModelConfig.from_folder` reads config.json by it and gives the decoder what follows. Without more than `defaults`
    a family is Llama. Fields of the same names are explained in `ModelConfig`: joint_qk_norm, late_qk_norms,
    post_norms, interleaved_rotary, sinks, fused_tensors.

    * What config.json means. defaults: values of keys that it leaves out, as the configuration class of transformers
      has them. knows: names of `SETTINGS` that the family implements; one that is set and not known is refused.
      activation: the key that names the activation, and the only value that the family has.
    * Attention. qkv_bias: queries, keys and values add a bias, whatever settings say. bias_settings: keys that say so
      for queries, keys and values, for the product behind attention, and for the MLP; "": no key, and no bias. qk_norm:
      queries and keys are normalised. query_growth: queries may grow with their position, by rope_parameters.
    * Rotary embedding. window_rope: layers with a window have a base of their own. partial_rotary: a share of each head
      may be rotated (partial_rotary_factor). phi: lists of factors scale it, short and long, as in Phi-3. by_alpha: a
      power of alpha multiplies the base, as in Hunyuan. nope_in_full: where some layers have a window, the others
      have no rotary embedding.
    * Experts. experts: names of their tensors, in a family that has them. normalised_experts: weights of a token's
      experts sum to one, whatever settings say.
    * The rest. gemma: norms multiply by 1 + weight, and embeddings by sqrt(hidden_size). mtp: names of MTP layers that
      checkpoints may have, whose `layers` are patterns of a layer's number among them (mtp) or all layers (layer).
    """

    defaults: dict[str, Any]
    knows: frozenset[str] = field(default_factory=frozenset)
    qkv_bias: bool = False
    bias_settings: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    qk_norm: bool = False
    joint_qk_norm: bool = False
    late_qk_norms: tuple[str, ...] = ()
    post_norms: tuple[str, ...] = ()
    nope_in_full: bool = False
    experts: ExpertNames | None = None
    normalised_experts: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    gemma: bool = False
    window_rope: bool = False
    partial_rotary: bool = False
    interleaved_rotary: bool = False
    phi: bool = False
    by_alpha: bool = False
    query_growth: bool = False
    fused_tensors: tuple[str, ...] = ()
    sinks: bool = False
    mtp: MtpNames | None = None


_GEMMA = {
    "attention_bias",
    "sliding_window",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
}
GELU = ("hidden_activation", "gelu_pytorch_tanh")
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_OLMO_NORMS = ("", "post_attention_layernorm", "post_feedforward_layernorm")
_OLMO2 = Family(
    _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    frozenset({"attention_bias"}),
    qk_norm=True, joint_qk_norm=True, post_norms=_OLMO_NORMS,
)  # fmt: skip
_GLM4_NORMS = ("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
_OF_QKV = ("attention_bias", "", "")
_GLM = Family(
    _LLAMA_DEFAULTS
    | {
        "rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "eos_token_id": [151329, 151336, 151338], "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    frozenset({"attention_bias"}),
    bias_settings=_OF_QKV, partial_rotary=True, interleaved_rotary=True, fused_tensors=("gate_up",),
)  # fmt: skip
FAMILIES = {
    "LlamaForCausalLM": Family(_LLAMA_DEFAULTS, frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Family(
        _LLAMA_DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        frozenset({"sliding_window"}),
    ),
    "Qwen2ForCausalLM": Family(
        _QWEN_DEFAULTS, frozenset({"sliding_window", "use_sliding_window"}), qkv_bias=True, bias_settings=_OF_QKV
    ),
    "MiMoForCausalLM": Family(  # Qwen 2 with MTP layers; transformers lacks it
        _QWEN_DEFAULTS,
        frozenset({"attention_bias", "sliding_window", "use_sliding_window", "auto_map"}),
        qkv_bias=True,
        bias_settings=_OF_QKV,
        mtp=_MIMO_MTP,
    ),
    "Qwen3ForCausalLM": Family(
        _QWEN_DEFAULTS | {"head_dim": 128},
        frozenset({"attention_bias", "sliding_window", "use_sliding_window"}),
        qk_norm=True,
    ),
    "MixtralForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        frozenset({"sliding_window", "num_local_experts"}),
        experts=MIXTRAL_NAMES,
        normalised_experts=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        _QWEN_MOE_DEFAULTS,
        frozenset({
            "attention_bias", "sliding_window", "use_sliding_window", "num_experts", "num_local_experts", "use_qk_norm",
        }),
        qk_norm=True,
        experts=_QWEN_NAMES,
    ),
    "Gemma2ForCausalLM": Family(
        _GEMMA2_DEFAULTS, frozenset(_GEMMA | {"attn_logit_softcapping"}), post_norms=_GEMMA_NORMS, activation=GELU,
        gemma=True,
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA3_DEFAULTS, frozenset(_GEMMA), qk_norm=True, post_norms=_GEMMA_NORMS, activation=GELU, gemma=True,
        window_rope=True,
    ),
    "GptOssForCausalLM": Family(
        _GPT_OSS_DEFAULTS,
        frozenset({"attention_bias", "sliding_window", "sliding_window_pattern", "num_local_experts"}),
        experts=_GPT_OSS_NAMES,
        normalised_experts=True,
        sinks=True,
    ),
    "Phi3ForCausalLM": Family(
        _PHI3_DEFAULTS, frozenset({"sliding_window", "auto_map"}), partial_rotary=True, phi=True,
        fused_tensors=("qkv", "gate_up"),
    ),
    "GraniteForCausalLM": Family(_GRANITE_DEFAULTS, frozenset({"attention_bias", "mlp_bias", *_MULTIPLIERS})),
    "Olmo2ForCausalLM": _OLMO2,
    "OlmoeForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": 50279, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
        frozenset({"attention_bias", "num_experts", "num_local_experts"}),
        qk_norm=True, joint_qk_norm=True, experts=_QWEN_NAMES,
    ),
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        defaults=_OLMO2.defaults | {"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        knows=_OLMO2.knows | {"sliding_window", "sliding_window_pattern"},
        window_rope=True,
    ),
    "Exaone4ForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        frozenset({"sliding_window", "sliding_window_pattern"}),
        qk_norm=True, post_norms=_OLMO_NORMS, nope_in_full=True,
    ),
    "SmolLM3ForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
            "eos_token_id": 128001, "no_rope_layer_interval": 4,
        },
        frozenset({"attention_bias", "mlp_bias", "no_rope_layers"}),
    ),
    "SeedOssForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False,
        },
        frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
        bias_settings=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "Qwen2MoeForCausalLM": Family(
        _QWEN_MOE_DEFAULTS
        | {
            "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "qkv_bias": True, "sliding_window_pattern": 2,
        },
        frozenset({
            "sliding_window", "use_sliding_window", "sliding_window_pattern", "num_experts", "num_local_experts",
        }),
        bias_settings=("qkv_bias", "", ""),
        experts=_QWEN2_NAMES,
    ),
    "Glm4MoeForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072, "eos_token_id": None,
            "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.0,
        },
        frozenset({"attention_bias", "use_qk_norm", "n_routed_experts", "num_local_experts"}),
        bias_settings=_OF_QKV,
        experts=_GLM_NAMES,
        partial_rotary=True,
        mtp=_GLM_MTP,
    ),
    "MiniMaxM2ForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
            "eos_token_id": 200020, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
        frozenset({"num_local_experts", "use_qk_norm", "auto_map"}),  # transformers has the family too
        qk_norm=True, joint_qk_norm=True, experts=_MINIMAX_NAMES, normalised_experts=True, partial_rotary=True,
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, post_norms=_GLM4_NORMS),
    "Ernie4_5ForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
            "rope_theta": 5e5, "tie_word_embeddings": True, "use_bias": False,
        },
        frozenset({"use_bias"}),
        bias_settings=("use_bias", "use_bias", "use_bias"),
        interleaved_rotary=True,
    ),
    "Ministral3ForCausalLM": Family(
        _LLAMA_DEFAULTS
        | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "rope_theta": 1e6, "sliding_window": None, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
        frozenset({"sliding_window"}),
        query_growth=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        frozenset({"attention_bias", "use_qk_norm"}),
        bias_settings=("attention_bias", "attention_bias", ""),
        qk_norm=True, late_qk_norms=("query_layernorm", "key_layernorm"), by_alpha=True,
    ),
}  # fmt: skip
ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM", "mimo": "MiMoForCausalLM", "olmoe": "OlmoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "exaone4": "Exaone4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "seed_oss": "SeedOssForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM",
    "glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "ministral3": "Ministral3ForCausalLM", "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
}  # fmt: skip
NEEDED = {
    "Qwen3NextForCausalLM": "linear attention with a recurrent state",
    "DeepseekV2ForCausalLM": "latent attention",
    "DeepseekV3ForCausalLM": "latent attention, and routing by groups",
    "Llama4ForCausalLM": "attention in chunks, and experts weighed before they compute",
    "PhimoeForCausalLM": "routing by sparse mixer, and LayerNorm",
    "GemmaForCausalLM": "Gemma's norms and embedding without norms after attention and MLP",
    "StableLmForCausalLM": "LayerNorm",
    "Starcoder2ForCausalLM": "LayerNorm, and an MLP without a gate",
    "Gemma3nForConditionalGeneration": "alternating updates of several streams, and embeddings of each layer",
}
"""Says what the decoder lacks for architectures that are asked for."""
# Settings that change the model. If set, they are refused unless the family knows them.
SETTINGS = (
    "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "sliding_window", "use_sliding_window",
    "use_mrope", "use_qk_norm", "n_routed_experts", "attn_logit_softcapping", "final_logit_softcapping",
    "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "clip_qkv", "alibi", "no_rope_layers", "num_experts", "num_local_experts", "query_pre_attn_scalar",
    "sliding_window_pattern", "use_bidirectional_attention", "use_cla", "use_parallel_residual", "qk_layernorm",
)  # fmt: skip
