"""Configuration files of a checkpoint: the model's shape (config.json) and its sampling defaults.

Families of models differ by configuration only. Settings that the decoder does not implement are refused here by name,
before a weight is read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from adaserve_jax.config import MTP
from adaserve_jax.errors import CheckpointError, UnsupportedModelError
from adaserve_jax.models.checkpoint_formats.api import read_format
from adaserve_jax.models.checkpoint_formats.encoding import WeightFormat
from adaserve_jax.models.config_values import ConfigValues, read_json
from adaserve_jax.models.families import (
    ARCHITECTURE_OF_TYPE,
    FAMILIES,
    GELU,
    NEEDED,
    SETTINGS,
    ExpertNames,
    Family,
    MtpNames,
)
from adaserve_jax.models.rope import (
    DEFAULT_THETA,
    LongRopeScaling,
    RopeScaling,
    read_query_growth,
    read_rope,
    read_rotary_share,
    read_window_rope,
)
from adaserve_jax.models.text_model import WITH_IMAGES, text_settings
from adaserve_jax.sampling import NUMBERS
from adaserve_jax.types import SamplingParams

DEMO_FOLDER = Path(__file__).parent / "demo"
Activation = Literal["silu", "gelu_tanh"]
_COUNTS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Settings that say how many experts there are; the first that is set holds, since transformers 5 renames the last."""
_EAGLE3 = "Eagle3"
"""End of the architecture of an EAGLE-3 head, behind that of its layer; vLLM's other name begins with it."""
_EAGLE3_LAYERS = "eagle_aux_hidden_state_layer_ids"
_EAGLE3_FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures of the layer of EAGLE-3 heads."""
FEATURE_LAYERS = 3
"""Layers of its target that an EAGLE-3 head reads."""


@dataclass(frozen=True)
class Eagle3Config:
    """Settings by which one layer is an EAGLE-3 head: it reads the target's features beside its own embedding.

    target_hidden_size: features of one of the target's layers; three layers are read. draft_vocab_size: rows of the
    head's own logits. layers: the target's layers whose outputs are read, from 0, as the checkpoint names them; None:
    those of `layers_of`. shares_embedding: the checkpoint has no embedding, and uses the target's; config.json does not
    say, so that whoever reads the files sets it.
    """

    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, int, int] | None = None
    shares_embedding: bool = False

    @property
    def feature_size(self) -> int:
        """Features of a position, all layers together."""
        return FEATURE_LAYERS * self.target_hidden_size

    def layers_of(self, target_layers: int) -> tuple[int, int, int]:
        """Return the layers to read of a target with so many; without names, those of the published heads.

        Raises UnsupportedModelError: the target has too few layers.
        """
        layers = self.layers or (1, target_layers // 2 - 1, target_layers - 4)
        if not all(0 <= layer < target_layers for layer in layers):
            raise UnsupportedModelError(
                f"an EAGLE-3 head reads layers {', '.join(map(str, layers))} of its target, which has {target_layers}; "
                "use a head of this target, or set eagle_aux_hidden_state_layer_ids in its config.json"
            )
        return layers


@dataclass(frozen=True)
class MedusaConfig:
    """Settings of Medusa heads, which read the target's output after its last norm and know no other token.

    num_heads: head i says what stands i + 2 positions behind that output. num_blocks: residual blocks of a head before
    its product with the vocabulary.
    """

    num_heads: int
    num_blocks: int


@dataclass(frozen=True)
class ExpertConfig:
    """Experts that take the place of a layer's MLP: `count` of them, of which each token goes through `per_token`.

    intermediate_size: inner features of one expert. normalised: the weights of a token's experts add up to 1; else they
    are the router's probabilities over all experts. dense_layers: layers that have an MLP instead. biased: router and
    products add a bias. clamp: of a gate's input from above and of the other half on both sides, with the factor of the
    gate's sigmoid; None: SwiGLU. shared: inner features of an MLP that all tokens go through beside their experts; 0:
    there is none. scaling: factor of the weights of a token's experts.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    names: ExpertNames
    dense_layers: tuple[int, ...] = ()
    biased: bool = False
    clamp: tuple[float, float] | None = None
    shared: int = 0
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Describes a decoder: what `models.decoder` computes and what `models.loading` reads from the checkpoint.

    `from_folder` makes it from config.json and the `Family` of its architecture. A default is the decoder of Llama, so
    that a family sets only what differs.

    * Sizes. num_heads queries share num_kv_heads keys; head_dim is independent of hidden_size. max_position: longest
      context of the model, in tokens. eos_token_ids: any of them ends a text.
    * Attention. qkv_bias, out_bias, mlp_bias: products that add a bias. qk_norm: queries and keys are normalised before
      the rotary embedding, those of each head alone, or with joint_qk_norm those of all heads together. late_qk_norms:
      they are normalised after the rotary embedding instead: names in the checkpoint of the norms of queries and of
      keys. windows: sliding window of each layer in tokens, the current one included; None: no window; empty: no
      windows. query_scalar: scores are divided by its root; None: by that of head_dim. query_growth: how queries grow
      with their position (`layers.query_scale`); None: they do not. attention_softcap, logit_softcap: scores, and
      logits, s become cap * tanh(s / cap); None: they stay. sinks: each head has a score without a key.
    * Rotary embedding. window_rope_theta: its base in layers with a window, there without scaling; None: as elsewhere.
      rotary_dim: features of each head, the first ones, that are rotated; None: all. interleaved_rotary: pairs that
      are rotated lie side by side. nope_layers: layers without it.
    * MLP, norms and stream. experts: None in a dense model. activation: of the gate. offset_norms: norms multiply by
      1 + weight. post_norms: attention and MLP have a norm behind them too: names in the checkpoint of the norm before
      the MLP, and of the norms behind attention and MLP; empty: they have none. The first is "" where attention and MLP
      have no norm before them. scaled_embedding: embeddings are multiplied by sqrt(hidden_size). embedding_multiplier,
      residual_multiplier: embeddings, and what attention and MLP add to the stream, are multiplied by them.
      logits_scaling: logits are divided by it.
    * Checkpoint. fused_tensors: weights that it holds as one tensor: "qkv" of queries, keys and values, "gate_up" of
      gate and up. weight_format: of a quantised checkpoint; it does not tell models apart.
    * Heads, which draft for a target. eagle3: of an EAGLE-3 head; None: a model of its own. medusa: of Medusa heads,
      likewise; they have no layers. mtp: of MTP layers in the checkpoint, which are no part of the model; None: it has
      none. is_mtp: this is the first of them (`mtp_head`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    late_qk_norms: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    experts: ExpertConfig | None = None
    activation: Activation = "silu"
    offset_norms: bool = False
    post_norms: tuple[str, ...] = ()
    scaled_embedding: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    query_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    window_rope_theta: float | None = None
    rotary_dim: int | None = None
    interleaved_rotary: bool = False
    nope_layers: tuple[int, ...] = ()
    query_growth: tuple[float, int] | None = None
    fused_tensors: tuple[str, ...] = ()
    sinks: bool = False
    eagle3: Eagle3Config | None = None
    medusa: MedusaConfig | None = None
    mtp: MtpNames | None = None
    is_mtp: bool = False
    weight_format: WeightFormat | None = field(default=None, compare=False)

    @property
    def is_head(self) -> bool:
        """Return True for a head, which reads its target's features and has no tokenizer."""
        return self.is_mtp or self.eagle3 is not None or self.medusa is not None

    @property
    def head_name(self) -> str:
        """Return what kind of head this is, for messages."""
        if self.is_mtp:
            return "an MTP layer"
        return "an EAGLE-3 head" if self.medusa is None else "a set of Medusa heads"

    def mtp_head(self) -> ModelConfig:
        """Return the first MTP layer of this model's checkpoint as a head.

        Raises UnsupportedModelError: the checkpoint has none.
        """
        if self.mtp is None:
            raise UnsupportedModelError(
                f"draft {MTP!r} is the MTP layer of the target's own checkpoint, whose config.json names none "
                "(num_nextn_predict_layers); give a draft's folder, or none"
            )
        experts = None if self.experts is None else replace(self.experts, dense_layers=())
        return replace(self, num_layers=1, windows=(), experts=experts, is_mtp=True)

    @property
    def target_hidden_size(self) -> int:
        """Features of one layer of the target that this head reads."""
        return self.hidden_size if self.eagle3 is None else self.eagle3.target_hidden_size

    def feature_layers(self, target_layers: int) -> tuple[int, ...]:
        """Return the layers of a target with so many whose outputs this head reads; `target_layers`: the output of the
        last norm. None of a model of its own.

        Raises UnsupportedModelError: the target has too few layers.
        """
        if self.eagle3 is not None:
            return self.eagle3.layers_of(target_layers)
        return (target_layers,) if self.is_head else ()

    def check_target(self, target: ModelConfig) -> None:
        """Check that this head fits a target.

        Raises CheckpointError: their sizes differ; UnsupportedModelError: the target has too few layers.
        """
        assert self.is_head
        hidden = "hidden_size" if self.eagle3 is None else "target_hidden_size"
        for name, own, its in (
            (hidden, self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if own != its:
                raise CheckpointError(
                    f"the draft is {self.head_name} whose {name} is {own}, and its target's is {its}; use a head that "
                    "was made for this target"
                )
        self.feature_layers(target.num_layers)

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def usual_context(self) -> int:
        """Longest context, in tokens, that takes the rotary factors which this configuration has."""
        scaling = self.rope_scaling
        return scaling.original if isinstance(scaling, LongRopeScaling) and not scaling.is_long else self.max_position

    def for_context(self, max_context: int) -> ModelConfig:
        """Return the configuration to serve contexts of up to so many tokens; 0: `usual_context`.

        It differs by the factors of longrope only. One set is for all texts: with both, the keys of a text that grows
        beyond the original context would have to be computed again.
        """
        if max_context <= self.usual_context or not isinstance(self.rope_scaling, LongRopeScaling):
            return self
        return replace(self, rope_scaling=replace(self.rope_scaling, is_long=True))

    def window_of(self, layer: int) -> int | None:
        """Return a layer's sliding window in tokens, the current one included; None: no window."""
        return self.windows[layer] if self.windows else None

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """Return a layer's experts; None: it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @classmethod
    def of_draft(cls, name: str, folder: Path) -> ModelConfig:
        """Read the configuration of a draft of this name, a model or a head, in the folder of `resolve_folder`.

        Raises CheckpointError, UnsupportedModelError: as `from_folder` and `mtp_head` do.
        """
        config = cls.from_folder(folder, may_be_head=True)
        return config.mtp_head() if name == MTP else config

    @classmethod
    def from_folder(cls, folder: str | Path, *, may_be_head: bool = False) -> ModelConfig:
        """Read config.json, and the EOS ids of generation_config.json if there is one.

        may_be_head: read an EAGLE-3 head or Medusa heads too, which are no model of their own.
        Raises CheckpointError: a file or key is missing or malformed. UnsupportedModelError: the decoder does not
        implement a setting.
        """
        path = Path(folder) / "config.json"
        given = text_settings(read_json(path), path)
        if "medusa_num_heads" in given:
            return _medusa(ConfigValues(given, path), may_be_head=may_be_head)
        is_eagle3 = _is_eagle3(given)
        if is_eagle3 and not may_be_head:
            raise UnsupportedModelError(f"{path}: this is an EAGLE-3 head, which is no model without its target")
        family = _family(given, path, is_eagle3=is_eagle3)
        values = ConfigValues(family.defaults | given, path)
        _refuse_unsupported(values, family)
        heads = values.integer("num_attention_heads")
        hidden = values.integer("hidden_size")
        layers = values.integer("num_hidden_layers")
        head_dim = values.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            raise CheckpointError(f"{path}: head_dim must be even for rotary embedding, got {head_dim}")
        theta, scaling = read_rope(
            values, by_layer=family.window_rope, of_phi=family.phi, partial=family.partial_rotary,
            growing=family.query_growth, alpha_dim=head_dim if family.by_alpha else None,
        )  # fmt: skip
        windows = _windows(values, family, layers)
        trained = values.integer("max_position_embeddings")
        # The length that a family with two bases states is that after scaling.
        longest = trained if scaling is None or family.window_rope else scaling.max_position(trained)
        scalar = values.optional("query_pre_attn_scalar")
        if "attention_multiplier" in family.knows:  # scores times m are scores divided by the root of m^-2
            scalar = values.positive("attention_multiplier") ** -2
        of_qkv, of_out, of_mlp = (values.boolean(name) for name in family.bias_settings)
        num_kv_heads = values.integer("num_key_value_heads", default=heads)
        if heads % num_kv_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {num_kv_heads}"
            )
        rotary_dim = int(head_dim * read_rotary_share(values))
        if family.partial_rotary:
            rotary_dim = values.integer("rotary_dim", default=rotary_dim)
        if rotary_dim % 2:
            raise CheckpointError(f"{path}: partial_rotary_factor must give an even dimension, got {rotary_dim}")
        if rotary_dim > head_dim:
            raise values.wrong("rotary_dim", rotary_dim, f"at most head_dim ({head_dim})")
        if isinstance(scaling, LongRopeScaling) and {len(scaling.short), len(scaling.long)} != {rotary_dim // 2}:
            raise CheckpointError(
                f"{path}: short_factor and long_factor must have {rotary_dim // 2} numbers, one per rotated pair, got "
                f"{len(scaling.short)} and {len(scaling.long)}"
            )
        return cls(
            vocab_size=values.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=values.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rms_norm_eps=values.positive("rms_norm_eps"),
            tie_embeddings=not is_eagle3 and values.boolean("tie_word_embeddings"),
            max_position=longest,
            eos_token_ids=_eos_ids(Path(folder), ConfigValues(given, path), family.defaults["eos_token_id"]),
            rope_scaling=scaling,
            qkv_bias=family.qkv_bias or of_qkv,
            out_bias=of_out,
            mlp_bias=of_mlp,
            qk_norm=family.qk_norm or values.boolean("use_qk_norm"),
            joint_qk_norm=family.joint_qk_norm,
            late_qk_norms=family.late_qk_norms,
            windows=windows,
            experts=None if family.experts is None else _experts(values, family, family.experts, layers),
            activation="gelu_tanh" if family.activation == GELU else "silu",
            offset_norms=family.gemma,
            post_norms=family.post_norms,
            scaled_embedding=family.gemma,
            embedding_multiplier=values.optional("embedding_multiplier") or 1.0,
            residual_multiplier=values.optional("residual_multiplier") or 1.0,
            logits_scaling=values.optional("logits_scaling") or 1.0,
            query_scalar=None if scalar == head_dim else scalar,
            attention_softcap=values.optional("attn_logit_softcapping"),
            logit_softcap=values.optional("final_logit_softcapping"),
            window_rope_theta=read_window_rope(values, DEFAULT_THETA if family.gemma else theta)
            if family.window_rope and windows
            else None,
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            interleaved_rotary=family.interleaved_rotary,
            nope_layers=_nope_layers(values, family, windows, layers),
            query_growth=read_query_growth(values) if family.query_growth else None,
            fused_tensors=family.fused_tensors,
            sinks=family.sinks,
            eagle3=_eagle3(values) if is_eagle3 else None,
            mtp=_mtp(values, family, layers),
            weight_format=read_format(values),
        )


def _architecture(given: dict[str, Any]) -> str | None:
    asked = given.get("architectures") or given.get("model_type")
    return str(asked[0]) if isinstance(asked, list) and len(asked) == 1 else ARCHITECTURE_OF_TYPE.get(str(asked))


def _is_eagle3(given: dict[str, Any]) -> bool:
    """Return True for the configuration of an EAGLE-3 head: SpecForge names the architecture, EAGLE the vocabulary."""
    name = str(_architecture(given))
    return name.endswith(_EAGLE3) or name.startswith(_EAGLE3) or "draft_vocab_size" in given


def _eagle3(values: ConfigValues) -> Eagle3Config:
    if values.integer("num_hidden_layers") != 1:
        raise values.unsupported("num_hidden_layers", "an EAGLE-3 head has one layer")
    vocab_size = values.integer("vocab_size")
    own = values.integer("draft_vocab_size", default=vocab_size)
    if own > vocab_size:
        raise values.wrong("draft_vocab_size", own, f"at most vocab_size ({vocab_size})")
    given = values.get("eagle_config") or {}
    reading = values.inside("eagle_config", given if isinstance(given, dict) else {})
    if reading.get("use_aux_hidden_state") is False:
        raise reading.unsupported("use_aux_hidden_state", "a head that reads one layer is no EAGLE-3 head")
    layers = None
    for place in (reading, values):  # published heads have these settings in either
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm"):
            if place.get(name):
                raise place.unsupported(name)
        found = place.get(_EAGLE3_LAYERS)
        if found is not None and not (
            isinstance(found, list) and len(found) == 3 and all(type(layer) is int and layer >= 0 for layer in found)
        ):
            raise place.wrong(_EAGLE3_LAYERS, found, "three layers of the target, from 0")
        if found is not None and layers not in (None, found):
            raise place.wrong(_EAGLE3_LAYERS, found, f"that of eagle_config ({layers}), or left out")
        layers = found or layers
    hidden = values.integer("target_hidden_size", default=values.integer("hidden_size"))
    return Eagle3Config(hidden, own, None if layers is None else (layers[0], layers[1], layers[2]))


def _mtp(values: ConfigValues, family: Family, layers: int) -> MtpNames | None:
    """Return the names of the checkpoint's MTP layers; None if it has none."""
    if family.mtp is None or not values.get("num_nextn_predict_layers"):
        return None
    numbers = range(values.integer("num_nextn_predict_layers"))
    (pattern,) = family.mtp.layers
    return replace(family.mtp, layers=tuple(pattern.format(mtp=each, layer=layers + each) for each in numbers))


def _medusa(values: ConfigValues, *, may_be_head: bool) -> ModelConfig:
    """Return the configuration of Medusa heads: sizes of the target, no layer, and so neither attention nor KV."""
    if not may_be_head:
        raise UnsupportedModelError(
            f"{values.path}: these are Medusa heads, which are no model without their target; give the target's "
            "own folder"
        )
    size = values.integer("hidden_size")
    heads = MedusaConfig(values.integer("medusa_num_heads"), values.integer("medusa_num_layers", default=1))
    return ModelConfig(
        vocab_size=values.integer("vocab_size"), hidden_size=size, intermediate_size=size, num_layers=0, num_heads=1,
        num_kv_heads=1, head_dim=2, rope_theta=1.0, rms_norm_eps=1.0, tie_embeddings=False, max_position=1 << 30,
        eos_token_ids=(), medusa=heads,
    )  # fmt: skip


def _family(given: dict[str, Any], path: Path, *, is_eagle3: bool = False) -> Family:
    asked = given.get("architectures") or given.get("model_type")
    name = _architecture(given)
    if is_eagle3:
        name = str(name).removeprefix(_EAGLE3).removesuffix(_EAGLE3)
        if name not in _EAGLE3_FAMILIES:
            raise UnsupportedModelError(
                f"{path}: an EAGLE-3 head of architectures {asked!r} is not supported; use one whose layer is that of "
                f"{' or '.join(_EAGLE3_FAMILIES)}"
            )
    if name in FAMILIES:
        return FAMILIES[name]
    if isinstance(asked, str) and asked in FAMILIES:
        raise UnsupportedModelError(f"{path}: architectures must be a list of one name, got {asked!r}")
    needs = f", which needs {NEEDED[name]}" if name in NEEDED else ""
    raise UnsupportedModelError(
        f"{path}: architectures {asked!r} is not supported{needs}; use one of {', '.join((*FAMILIES, *WITH_IMAGES))}"
    )


def _refuse_unsupported(values: ConfigValues, family: Family) -> None:
    for name in SETTINGS:
        if values.get(name) and name not in family.knows:
            raise values.unsupported(name)
    setting, activation = family.activation
    if values.get(setting) != activation:
        raise values.unsupported(setting, f"only {activation!r} is")
    code = values.get("auto_map") or {}
    if not isinstance(code, dict):
        raise values.wrong("auto_map", code, "an object")
    if "auto_map" not in family.knows and "AutoModelForCausalLM" in code:
        raise values.unsupported("auto_map", "code of a checkpoint is never run")


def _experts(values: ConfigValues, family: Family, names: ExpertNames, layers: int) -> ExpertConfig | None:
    """Return the experts of a family that may have them; None if no layer does."""
    for name in ("n_group", "topk_group"):
        if values.get(name, 1) != 1:
            raise values.unsupported(name, "only 1 is")
    scales = "routed_scaling_factor" in family.defaults
    if not scales and values.get("routed_scaling_factor") not in (None, 1):
        raise values.unsupported("routed_scaling_factor", "only 1 is in this family")
    counts = [name for name in _COUNTS_OF_EXPERTS if name in values.values]
    count = next((name for name in counts if values.get(name) is not None), counts[0])
    dense = _dense_layers(values, layers)
    if values.get(count) == 0 or len(dense) == layers:
        return None
    experts, per_token = values.integer(count), values.integer("num_experts_per_tok")
    if per_token > experts:
        raise values.wrong("num_experts_per_tok", per_token, f"at most {count} ({experts})")
    size = values.integer(
        "intermediate_size" if values.get("moe_intermediate_size") is None else "moe_intermediate_size"
    )
    shared = values.whole("shared_expert_intermediate_size", 0) + values.whole("n_shared_experts", 0) * size
    return ExpertConfig(
        experts,
        per_token,
        size,
        normalised=family.normalised_experts or values.boolean("norm_topk_prob"),
        names=names,
        dense_layers=dense,
        biased=names.stacked,
        clamp=(values.positive("swiglu_limit"), values.positive("swiglu_alpha")) if names.stacked else None,
        shared=shared if names.shared else 0,
        scaling=values.positive("routed_scaling_factor", 1.0) if scales else 1.0,
    )


def _dense_layers(values: ConfigValues, layers: int) -> tuple[int, ...]:
    """Return the layers of a model with experts that have an MLP instead: the first `first_k_dense_replace`, those of
    `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    first, step = values.whole("first_k_dense_replace", 0), values.integer("decoder_sparse_step", 1)
    named = values.get("mlp_only_layers") or ()
    if not isinstance(named, list | tuple) or any(not isinstance(layer, int) for layer in named):
        raise values.wrong("mlp_only_layers", named, "a list of layers")
    return tuple(layer for layer in range(layers) if layer < first or layer in named or (layer + 1) % step)


def _windows(values: ConfigValues, family: Family, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, empty if no layer has one.

    Windowed layers are those of layer_types if the family reads it, else all (Mistral, other families with experts),
    those from max_window_layers on (Qwen), or all but each sliding_window_pattern-th (Gemma; in Qwen2-MoE only before
    max_window_layers).
    """
    windowed = "sliding_window" in family.knows and values.get("sliding_window") is not None
    optional = "use_sliding_window" in family.knows
    windowed = windowed and (not optional or values.boolean("use_sliding_window"))
    full, sliding = "full_attention", "sliding_attention"
    given = values.get("layer_types")
    if isinstance(given, list) and given and len(given) != layers:
        raise values.wrong("layer_types", given, f"one kind for each of {layers} layers (num_hidden_layers)")
    if optional and windowed and family.experts is None:
        first = values.get("max_window_layers")
        if not isinstance(first, int):
            raise values.wrong("max_window_layers", first, "an integer")
        types = given or [full if layer < first else sliding for layer in range(layers)]
    elif "sliding_window_pattern" in family.knows and windowed:
        last = values.whole("max_window_layers") if optional else layers
        types = given or [
            sliding if layer < last and (layer + 1) % values.integer("sliding_window_pattern") else full
            for layer in range(layers)
        ]
    else:
        types = [sliding if windowed else full] * layers
        if given and given != types:
            raise values.unsupported("layer_types", f"only {types[0]!r} in every layer is, with these other settings")
    if not isinstance(types, list) or len(types) != layers or any(kind not in (full, sliding) for kind in types):
        raise values.unsupported("layer_types", f"one of {full!r} and {sliding!r} for each of {layers} layers is")
    if sliding not in types:
        return ()
    window = values.integer("sliding_window")
    return tuple(window if kind == sliding else None for kind in types)


def _nope_layers(values: ConfigValues, family: Family, windows: tuple[int | None, ...], layers: int) -> tuple[int, ...]:
    """Return the layers without rotary embedding: those without a window in some families, in others those with a 0 in
    no_rope_layers, or every so-many-th."""
    if family.nope_in_full:
        if values.get("sliding_window") is None:
            return ()
        return tuple(layer for layer in range(layers) if not windows or windows[layer] is None)
    if "no_rope_layers" not in family.knows:
        return ()
    given = values.get("no_rope_layers")
    if given is None:
        interval = values.integer("no_rope_layer_interval")
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(given, list) or len(given) != layers or any(each not in (0, 1) for each in given):
        raise values.wrong("no_rope_layers", given, f"a list of {layers} numbers, 0 or 1")
    return tuple(layer for layer, rotated in enumerate(given) if not rotated)


def _eos_ids(folder: Path, values: ConfigValues, default: object) -> tuple[int, ...]:
    """Return every id that ends a text: those of generation_config.json, then those of config.json.

    default: the family's, where neither file has the key. Raises CheckpointError: a value is no token id, nor a list
    of such.
    """
    path = folder / "generation_config.json"
    files = [ConfigValues(read_json(path), path)] if path.exists() else []
    stated = [file for file in (*files, values) if "eos_token_id" in file.values]
    ids: list[int] = []
    for file in stated or [ConfigValues({"eos_token_id": default}, values.path)]:
        given = file.get("eos_token_id")
        tokens = [] if given is None else given if isinstance(given, list) else [given]
        if any(type(token) is not int or token < 0 for token in tokens):
            raise file.wrong("eos_token_id", given, "a token id, a list of token ids, or null")
        ids += tokens
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters of generation_config.json, for requests that give none; None: the file does not say.

    temperature 0 is greedy, which `do_sample: false` and `top_p: 0` mean; top_k 0 is off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> GenerationDefaults:
        """Read generation_config.json; without one nothing is set. Raises CheckpointError: a value is malformed."""
        path = Path(folder) / "generation_config.json"
        if not path.exists():
            return cls()
        given = ConfigValues(read_json(path), path)
        penalty = _number(given, "repetition_penalty")
        top_p = _number(given, "top_p", (0, 1))
        if given.get("do_sample") is False or top_p == 0:
            return cls(temperature=0.0, repetition_penalty=penalty)
        top_k = given.get("top_k")
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool)):
            raise given.wrong("top_k", top_k, "an integer")
        return cls(
            temperature=_number(given, "temperature"),
            top_p=top_p,
            top_k=None if top_k is None else top_k if 0 < top_k < 2**31 else 0,
            min_p=_number(given, "min_p"),
            repetition_penalty=penalty,
        )

    def given(self) -> dict[str, Any]:
        """Return the values that the file sets, by the names of `SamplingParams`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def sampling_params(self) -> SamplingParams:
        """Return the `SamplingParams` of a request that brings none."""
        return SamplingParams(**self.given())


def _number(given: ConfigValues, name: str, bounds: tuple[float, float] | None = None) -> float | None:
    least, most = bounds or NUMBERS[name]
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise given.wrong(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def resolve_folder(
    name_or_path: str | Path, role: Literal["target", "draft"], target: str | Path | None = None
) -> Path:
    """Return the checkpoint folder of a name: the embedded pair's for "demo", the EAGLE-3 head's for "demo-head", for
    "mtp" the target's, else the path itself.

    target: name of a draft's target, where the draft may lie in its checkpoint. Raises CheckpointError: there is no
    such folder.
    """
    if role == "draft" and str(name_or_path) == MTP and target is not None:
        return resolve_folder(target, "target")
    embedded = {"demo": role, "demo-head": "head"} if role == "draft" else {"demo": role}
    name = embedded.get(str(name_or_path))
    folder = Path(os.path.expanduser(name_or_path)) if name is None else DEMO_FOLDER / name
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        fetch = f"; for a name of the Hub: hf download {name_or_path} --local-dir FOLDER, then give FOLDER"
        may_be_of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)) and not folder.parent.is_dir()
        raise CheckpointError(
            f"{role} checkpoint {str(name_or_path)!r}: expected a folder at {folder}, found {found}; "
            f"give the path of a Hugging Face checkpoint folder, or {' or '.join(map(repr, embedded))}"
            f"{fetch if may_be_of_hub else ''}"
        )
    return folder
