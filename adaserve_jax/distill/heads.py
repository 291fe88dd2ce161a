"""Training of heads: features of the target, and for EAGLE-3 training-time test, where a head reads its own.

While it drafts, a head reads the target's features up to the root and its own further on. So it is trained on both:
step 0 reads the target's at every position, step s what step s - 1 returned at the position before. In step s the query
at position p stands for a node s levels below a root at p - s: it sees the keys of step 0 up to the root, and below it
those of steps 1 to s, one position each. Source: EAGLE-3, section 3.2. Medusa heads are trained at the same positions:
step s is head s, which reads the target's feature before that root. Axes: T packed tokens, N rows, d features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from adaserve_jax.distill.records import PackedBatch
from adaserve_jax.models.config import FEATURE_LAYERS, Eagle3Config, ModelConfig
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.decoder import (
    HEAD_ROW,
    Attend,
    Params,
    attend_dense,
    attention_weights,
    decode,
    decode_head,
    init_params,
    logits,
    medusa_logits,
    param_specs,
    reduce_features,
)
from adaserve_jax.models.export import export_head, new_head_folder
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.placement import EVERYWHERE, Placement
from adaserve_jax.models.rope import SCALING_KEYS, LongRopeScaling
from adaserve_jax.models.text_model import text_settings

HEAD_STEPS = 5
"""Steps of training-time test: the levels of a tree that a head is trained for."""
STEP_DECAY = 0.8
"""Factor of each step's loss on that of the one before: deeper nodes are drafted less often."""
FROZEN = ("embed", HEAD_ROW)
"""Weights of an EAGLE-3 head that are not trained, whether its embedding is its target's or its own."""
FIRST_POSITION = 1
"""Least position that a head learns from: at the first token of a text there is no feature before it."""
MEDUSA_HEADS = 4
"""Heads of a new set of Medusa heads, as the published ones have."""


@dataclass(frozen=True, eq=False)
class HeadTarget:
    """Target of a head that is trained. Features are computed from the text anew, so records are those of drafts.

    params: as `placement` divides them.
    """

    config: ModelConfig
    params: Params
    placement: Placement = field(default_factory=Placement.on_one)

    def features(self, params: Params, head: ModelConfig, batch: PackedBatch) -> jax.Array:
        """Return the features before each token, f[F, T]: those of the position before it, whole on every device. The
        first token of a text has none, and what is there has no meaning. params: as `self.params`, traced."""
        partition = self.placement.partition
        local = partition.local(self.config)
        layers = head.feature_layers(self.config.num_layers)

        def on_each_device(params: Params, batch: PackedBatch) -> jax.Array:
            outputs: dict[int, jax.Array] = {}
            attend = attend_dense(local, batch.segment)
            hidden = decode(
                params, local, batch.tokens, batch.position, attend, partition, on_layer=outputs.__setitem__
            )
            outputs[self.config.num_layers] = hidden
            return _after(jnp.concatenate([outputs[layer] for layer in layers]))

        specs = {name: getattr(weight.sharding, "spec", EVERYWHERE) for name, weight in self.params.items()}
        return self.placement.spmd(on_each_device, (specs, EVERYWHERE), EVERYWHERE)(params, batch)


def head_steps(
    params: Params, config: ModelConfig, batch: PackedBatch, features: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield for each step s the head's scores of the rows, f32[N, V], and which positions are s levels below a root,
    bool[T]. features: of `HeadTarget.features`."""
    if config.medusa is not None:
        for head in range(config.medusa.num_heads):
            before_root = jnp.roll(features, head, axis=1)[:, batch.at]
            yield medusa_logits(params, config, head, before_root), batch.position - head >= FIRST_POSITION
        return
    kept: list[tuple[jax.Array, jax.Array]] = []
    before = reduce_features(params, config, features)
    for step in range(HEAD_STEPS):
        attend = _attend(config, batch, step, kept)
        out = decode_head(params, config, batch.tokens, batch.position, before, attend)
        yield logits(params, config, out[:, batch.at]), batch.position - step >= FIRST_POSITION
        before = _after(out)


def num_steps(config: ModelConfig) -> int:
    """Return the steps that `head_steps` takes."""
    return HEAD_STEPS if config.medusa is None else config.medusa.num_heads


def write_new_medusa(target_folder: Path, out: Path) -> None:
    """Write Medusa heads for a target, to begin training with: each says at first what the target's own logits say."""
    target = ModelConfig.from_folder(target_folder)
    params = load_params(target_folder, target, without=param_specs(target).keys() - {_logits_of(target)})
    settings = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1, "torch_dtype": "float32"}
    config = new_head_folder(out, settings | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size})
    heads = {name: jnp.zeros(shape) for name, (shape, _) in param_specs(config).items()}
    rows = params[_logits_of(target)] / target.logits_scaling
    export_head({name: rows if name.endswith(".out") else each for name, each in heads.items()}, out)


def _logits_of(target: ModelConfig) -> str:
    """Return the weight that a target's logits are a product with."""
    return "embed" if target.tie_embeddings else "head"


def write_new_eagle3(target_folder: Path, out: Path, seed: int = 0) -> None:
    """Write an EAGLE-3 head for a target, to begin training with. It has the target's shape, norm and logits.

    The layer adds nothing at first and `fc` passes the last feature on. So a new head says at each position about what
    the target said one position before, and just that for targets of fewer than 8 layers, whose last layer is read.
    """
    target = ModelConfig.from_folder(target_folder)
    scores = _logits_of(target)
    params = load_params(target_folder, target, without=param_specs(target).keys() - {scores, "norm"})
    path = target_folder / "config.json"
    config = new_head_folder(out, eagle3_settings(target, text_settings(read_json(path), path)))
    head = init_params(config, seed)
    d = config.hidden_size
    head |= {name: jnp.zeros_like(head[name]) for name in ("layers.0.out", "layers.0.down")}
    head["fc"] = jnp.eye(d, FEATURE_LAYERS * d, (FEATURE_LAYERS - 1) * d, dtype=jnp.float32)
    head["head"] = params[scores] / target.logits_scaling
    head["norm"] = params["norm"] + 1 if target.offset_norms else params["norm"]
    export_head(head, out)


def eagle3_settings(target: ModelConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a new head. given: the target's."""
    layers = target.num_layers
    published = Eagle3Config(target.hidden_size, target.vocab_size)
    read = list(published.layers_of(layers)) if layers >= 8 else [0, layers // 2, layers - 1]
    kept = ("bos_token_id", "eos_token_id")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        **_rope_settings(target, given),
        "rms_norm_eps": target.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": read, "use_aux_hidden_state": True},
    } | {name: given[name] for name in kept if name in given}


def _rope_settings(target: ModelConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a new head: the target's base, and its scaling where a Llama layer takes it."""
    rope = {"rope_theta": target.rope_theta}
    if target.rope_scaling is None or isinstance(target.rope_scaling, LongRopeScaling):
        return rope | {"max_position_embeddings": target.max_position}
    scaling = given.get("rope_scaling") or given["rope_parameters"]
    scaling = scaling.get("full_attention", scaling)  # new files of Gemma 3 have one for each kind of layer
    scaling = {name: value for name, value in scaling.items() if name in SCALING_KEYS}
    trained = given.get("max_position_embeddings", target.max_position)
    return rope | {"max_position_embeddings": trained, "rope_scaling": scaling}


def _after(x: jax.Array) -> jax.Array:
    """Move each column of f[d, T] to the next token."""
    return jnp.roll(x, 1, axis=1)


def _attend(config: ModelConfig, batch: PackedBatch, step: int, kept: list[tuple[jax.Array, jax.Array]]) -> Attend:
    """Return attention of one step; it appends the step's keys and values to `kept`."""
    age = batch.position[:, None] - batch.position
    known = (batch.segment[:, None] == batch.segment) & (age >= step) & (batch.position >= 1)
    if step == 0:  # the first token of a text sees itself, so that its row is finite
        known |= jnp.eye(len(batch.position), dtype=bool)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        kept.append((k, v))
        (keys, values), chain = kept[0], kept[1:]
        highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        grouped = q.reshape(len(k), -1, *q.shape[1:])  # [K, G, D, T]
        scores = [jnp.einsum("kgdt,kds->kgts", grouped, keys, precision=highest, preferred_element_type=jnp.float32)]
        moved = [tuple(jnp.roll(part, step - at, axis=2) for part in each) for at, each in enumerate(chain, 1)]
        scores += [jnp.sum(grouped * key[:, None], axis=2, dtype=jnp.float32)[..., None] for key, _ in moved]
        seen = jnp.concatenate([known, jnp.ones((len(known), len(moved)), bool)], axis=1)
        joined = jnp.concatenate(scores, axis=-1) * q.shape[1] ** -0.5
        weights = attention_weights(joined, seen, config.attention_softcap, None).astype(v.dtype)
        mixed = jnp.einsum("kgts,kds->kgdt", weights[..., : len(known)], values, precision=highest)
        for at, (_, value) in enumerate(moved):
            mixed += weights[..., len(known) + at][:, :, None] * value[:, None]
        return mixed.reshape(q.shape)

    return attend
