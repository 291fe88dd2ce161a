"""Function-preserving growth: writes a larger checkpoint that computes what a small one computes.

Benchmarks so get real text and real acceptance with a target of any cost. The added parts cannot change the result:
added layers, heads and inner neurons write zeros, added features of the stream stay zero, and norm weights make up for
the mean over more features. Added weights that are read are random, so that nothing can skip or compress them.

A mixture of experts has the MLP in every expert, and a random router. The weights of a token's experts add up to 1, so
it computes the same whichever they are; which ones it reads differs from token to token, as in a trained mixture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import FEATURE_LAYERS, ExpertConfig, ModelConfig
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.families import MIXTRAL_NAMES
from adaserve_jax.models.writing import TYPES, check_new, copy_all_but_weights, with_type, write_shards
from adaserve_jax.types import Progress

_NOISE_BLOCK = 1 << 20


@dataclass(frozen=True)
class GrownShape:
    """A size to grow to. head_dim and vocabulary stay those of the source.

    mlp: inner features of the MLP, or of each expert. experts: in each layer, 0 for an MLP; each token goes through
    `experts_per_token` of them.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    experts: int = 0
    experts_per_token: int = 0


SHAPES: dict[str, GrownShape] = {
    "110M": GrownShape(layers=12, hidden=768, heads=12, kv_heads=4, mlp=3072),
    "1B": GrownShape(layers=16, hidden=2048, heads=32, kv_heads=8, mlp=8192),
    "8B": GrownShape(layers=32, hidden=4096, heads=64, kv_heads=8, mlp=16384),
}
"""Named sizes: parameters without the embedding, rounded, for head_dim 64."""


def grow(
    source: Path, out: Path, shape: GrownShape, *, dtype: str = "f32", seed: int = 0, progress: Progress | None = None
) -> ModelConfig:
    """Write a checkpoint folder of `shape` at `out` that gives the logits of `source`, and return its configuration.

    dtype: f16, bf16 or f32. Memory holds one tensor and one shard of output at a time.
    Raises ConfigError: a dimension is smaller than the source's or does not divide, or `out` is not empty;
    CheckpointError: as loading does.
    """
    from adaserve_jax.models.loading import check_weights  # imports jax

    config = ModelConfig.from_folder(source)
    _check(config, shape, out, dtype)
    check_weights(source, config)
    out.mkdir(parents=True, exist_ok=True)
    grown = replace(
        config,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        # The mean over features shrinks by old / new, and epsilon with it.
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden,
        windows=config.windows[:1] * shape.layers,  # what may grow has one window in all layers
        experts=_experts(shape),
    )
    growth = _Growth(source, config, grown, np.random.default_rng(seed))
    tensors = ((name, tensor.astype(TYPES[dtype])) for name, tensor in growth.tensors())
    tensors_per_layer = 6 + (1 + 3 * shape.experts if shape.experts else 3)
    total = tensors_per_layer * shape.layers + 2 + (not config.tie_embeddings)
    write_shards(out, tensors, total, "growing", progress)
    copy_all_but_weights(source, out)
    changed = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": grown.rms_norm_eps,
    }
    given = read_json(out / "config.json")
    # what may grow has the same kind of layer everywhere
    changed |= {name: given[name][:1] * shape.layers for name in ("layer_types", "no_rope_layers") if given.get(name)}
    if grown.experts is not None:
        # Values that the source may leave out, for which Mixtral assumes others.
        assumed = {"rope_theta": config.rope_theta, "max_position_embeddings": config.max_position}
        given = assumed | given | _mixtral_settings(grown, grown.experts)
    (out / "config.json").write_text(json.dumps(with_type(given | changed, dtype), indent=2) + "\n")
    return grown


def grow_head(head: Path, source: Path, out: Path, hidden: int) -> ModelConfig:
    """Write the EAGLE-3 head or the Medusa heads of `source` for a target grown from it, and return the configuration.

    A grown target's stream has the source's features first and zeros behind, and the same layers in the same places, so
    the head reads the same numbers: it proposes what the head of `source` would. An EAGLE-3 head keeps its size and has
    an embedding of its own; Medusa heads grow as wide as the target. hidden: the grown target's.
    Raises ConfigError: `out` is not empty; CheckpointError: it is no head of `source`.
    """
    from adaserve_jax.models.export import export_head, new_head_folder  # imports jax
    from adaserve_jax.models.loading import load_params

    config = check_head(head, source)
    given = with_type(read_json(head / "config.json"), "f32")
    if config.eagle3 is None:
        grown = new_head_folder(out, given | {"hidden_size": hidden})
        wider = hidden - config.hidden_size
        padded = {}
        for name, weight in load_params(head, config).items():
            added = (0 if name.endswith(".out") else wider, wider)  # rows and columns; the vocabulary stays
            padded[name] = np.pad(weight, [(0, count) for count in added[: weight.ndim]])
        export_head(padded, out)
        return grown
    read = list(config.eagle3.layers_of(ModelConfig.from_folder(source).num_layers))
    reading = (given.get("eagle_config") or {}) | {"eagle_aux_hidden_state_layer_ids": read}
    grown = new_head_folder(out, given | {"target_hidden_size": hidden, "eagle_config": reading})
    params = load_params(head, config, target=source)
    old = config.eagle3.target_hidden_size
    fc = np.zeros((config.hidden_size, FEATURE_LAYERS, hidden), np.float32)
    fc[:, :, :old] = np.asarray(params["fc"]).reshape(-1, FEATURE_LAYERS, old)
    export_head(params | {"fc": fc.reshape(len(fc), -1)}, out, own_embedding=True)
    return grown


def check_head(head: Path, source: Path) -> ModelConfig:
    """Return the configuration of an EAGLE-3 head or Medusa heads of `source`. Raises CheckpointError: it is none."""
    config = ModelConfig.from_folder(head, may_be_head=True)
    if config.eagle3 is None and config.medusa is None:
        raise CheckpointError(f"{head}: expected an EAGLE-3 head or Medusa heads, got a model of its own")
    config.check_target(ModelConfig.from_folder(source))
    return config


def _experts(shape: GrownShape) -> ExpertConfig | None:
    if not shape.experts:
        return None
    return ExpertConfig(shape.experts, shape.experts_per_token, shape.mlp, normalised=True, names=MIXTRAL_NAMES)


def _mixtral_settings(config: ModelConfig, experts: ExpertConfig) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": config.window_of(0),
    }


def _check(config: ModelConfig, shape: GrownShape, out: Path, dtype: str) -> None:
    if dtype not in TYPES:
        raise ConfigError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")
    has_biases = config.qkv_bias or config.out_bias or config.mlp_bias
    if has_biases or config.qk_norm or config.post_norms or config.fused_tensors:
        raise ConfigError(
            "a checkpoint with biases, further norms or fused tensors cannot grow; use a plain Llama or Mistral"
        )
    scaled = (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) != (1, 1, 1)
    if scaled or config.query_scalar is not None:
        raise ConfigError("a checkpoint with multipliers cannot grow; use a plain Llama or Mistral")
    if config.interleaved_rotary or config.nope_layers or config.query_growth is not None:
        raise ConfigError("a checkpoint with another rotary embedding cannot grow; use a plain Llama or Mistral")
    if config.weight_format is not None:
        raise ConfigError("a quantised checkpoint cannot grow; grow the one that it was made from")
    if config.experts is not None:
        raise ConfigError("a mixture of experts cannot grow; grow the dense checkpoint that it came from")
    if shape.experts and not 1 <= shape.experts_per_token <= shape.experts:
        raise ConfigError(
            f"experts_per_token must be from 1 to experts ({shape.experts}), got {shape.experts_per_token}"
        )
    own = GrownShape(
        config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size
    )
    for name, least in asdict(own).items():
        if (wanted := getattr(shape, name)) < least:
            raise ConfigError(f"{name} must be at least the source's {least}, got {wanted}: a checkpoint only grows")
    group = config.num_heads // config.num_kv_heads
    if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads < group:
        raise ConfigError(
            f"heads must be a multiple of kv_heads and at least {group} times as many, as in the source, "
            f"got {shape.heads} and {shape.kv_heads}"
        )
    check_new(out)


class _Growth:
    """Yields the grown tensors one by one, in Hugging Face's names and layout."""

    def __init__(self, source: Path, old: ModelConfig, new: ModelConfig, rng: np.random.Generator):
        self._old, self._new = old, new
        from adaserve_jax.models.tensors import TensorFiles  # imports jax

        self._files = TensorFiles(source)
        self._rng = rng
        self._noise = (rng.standard_normal(_NOISE_BLOCK) * new.hidden_size**-0.5).astype(np.float32)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        old, new = self._old, self._new
        yield "model.embed_tokens.weight", self._padded("model.embed_tokens.weight", (new.vocab_size, new.hidden_size))
        for layer in range(new.num_layers):
            yield from self._layer(layer, added=layer >= old.num_layers)
        yield "model.norm.weight", self._norm("model.norm.weight")
        if not old.tie_embeddings:
            yield "lm_head.weight", self._widened("lm_head.weight", new.vocab_size)

    def _layer(self, layer: int, *, added: bool) -> Iterator[tuple[str, np.ndarray]]:
        new, prefix = self._new, f"model.layers.{layer}."
        queries = self._query_rows()
        yield from self._reading(prefix, "self_attn.q_proj.weight", new.q_size, added, queries)
        yield from self._reading(prefix, "self_attn.k_proj.weight", new.kv_size, added)
        yield from self._reading(prefix, "self_attn.v_proj.weight", new.kv_size, added)
        yield from self._writing(prefix, "self_attn.o_proj.weight", new.q_size, added, queries)
        gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        if new.experts is None:
            names = [(gate, up, down)]
        else:
            router = self._rng.standard_normal((new.experts.count, new.hidden_size)) * self._old.hidden_size**-0.5
            block = new.experts.names.block
            yield f"{prefix}{block}.gate.weight", router.astype(np.float32)
            names = [
                tuple(f"{block}.experts.{expert}.{each}.weight" for each in new.experts.names.matrices)
                for expert in range(new.experts.count)
            ]
        for to_gate, to_up, to_down in names:
            yield from self._reading(prefix, gate, new.intermediate_size, added, to=to_gate)
            yield from self._reading(prefix, up, new.intermediate_size, added, to=to_up)
            yield from self._writing(prefix, down, new.intermediate_size, added, to=to_down)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield prefix + name, np.ones(new.hidden_size, np.float32) if added else self._norm(prefix + name)

    def _reading(
        self, prefix: str, name: str, rows: int, added: bool, places: np.ndarray | None = None, to: str = ""
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield a matrix that reads the stream, under the source's name or under `to`."""
        shape = (rows, self._new.hidden_size)
        yield prefix + (to or name), self._random(shape) if added else self._widened(prefix + name, rows, places)

    def _writing(
        self, prefix: str, name: str, columns: int, added: bool, places: np.ndarray | None = None, to: str = ""
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield a matrix that writes to the stream, under the source's name or under `to`."""
        shape = (self._new.hidden_size, columns)
        grown = np.zeros(shape, np.float32) if added else self._padded(prefix + name, shape, places)
        yield prefix + (to or name), grown

    def _query_rows(self) -> np.ndarray:
        """Return the new places of the old query rows, i64[old q_size]: each old head stays with its key-value head."""
        old, new = self._old, self._new
        old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
        head = np.arange(old.num_heads)
        place = head // old_group * new_group + head % old_group
        return (place[:, None] * old.head_dim + np.arange(old.head_dim)).ravel()

    def _read(self, name: str) -> np.ndarray:
        shape = self._files.shape_of(name)
        out = np.empty(shape, np.float32)
        self._files.read_rows((name,), (0, shape[0]), slice(None), out)
        return out

    def _random(self, shape: tuple[int, int]) -> np.ndarray:
        return np.resize(self._noise, shape)

    def _padded(self, name: str, shape: tuple[int, int], columns: np.ndarray | None = None) -> np.ndarray:
        """Put the old matrix into a larger one of zeros: new rows write nothing."""
        old = self._read(name)
        grown = np.zeros(shape, np.float32)
        grown[: old.shape[0], np.arange(old.shape[1]) if columns is None else columns] = old
        return grown

    def _widened(self, name: str, rows: int, places: np.ndarray | None = None) -> np.ndarray:
        """Put the old matrix among random rows and columns: new columns read zeros, new rows are not read."""
        old = self._read(name)
        grown = self._random((rows, self._new.hidden_size)).copy()
        grown[np.arange(old.shape[0]) if places is None else places, : old.shape[1]] = old
        return grown

    def _norm(self, name: str) -> np.ndarray:
        old = self._read(name)
        grown = np.ones(self._new.hidden_size, np.float32)
        grown[: len(old)] = old * np.sqrt(len(old) / self._new.hidden_size)
        return grown
