"""One decoder for all families: RMSNorm, rotary embedding, grouped-query attention, a gated MLP or experts.

Biases, norms, multipliers, caps, experts and a tied head follow the configuration. The residual stream is
feature-major, [d, T], from the embedding to the head, so that each product is `W @ x` with the weight as Hugging Face
stores it, [out, in]: on a CPU this is up to 1.5 times faster than the token-major form at 2-64 tokens. Flax NNX defines
and initialises the modules; `jax.jit` gets a flat dict of arrays, which is merged into modules while tracing. Attention
is the caller's: the decoder knows no KV cache, pages or masks.

Axes: T packed tokens, d features, H/K query/KV heads, D head dim, S sampled positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.experts import Experts
from adaserve_jax.models.layers import (
    Linear,
    RMSNorm,
    TokenAdapters,
    capped,
    gated,
    keep_layout,
    query_scale,
    rotary_angles,
    rotate,
)
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.models.quantize import SCALE, ZERO

Params = dict[str, jax.Array]
"""Weights by dotted name, as `param_specs` lists them."""

PROJECTIONS = {"qkv": 3, "out": 1, "gate_up": 2, "down": 1}
"""The weights of a layer that adapters change, and how many projections of Hugging Face each of them is."""
LORA_A, LORA_B = ".lora_a", ".lora_b"
HEAD_ROW = "head_row"
"""Weight of an EAGLE-3 head that is no number to compute with: the row of each token in its logits, -1 for none."""

Attend = Callable[[int, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""attend(layer, q f[H, D, T], k f[K, D, T], v f[K, D, T], sinks f[H] or None) -> f[H, D, T]. q and k are rotated
already; attend divides the scores by sqrt(D) and bounds them by the configuration's `attention_softcap`. A sink is a
score of its head that has no key: it takes its share of the softmax and adds no value."""

OnLayer = Callable[[int, jax.Array], None]
"""on_layer(layer, x f32[d, T]): called while tracing with the stream behind each layer."""


def init_params(config: ModelConfig, seed: int, dtype: Any = jnp.float32) -> Params:
    """Return random weights: normal with standard deviation 1 / sqrt(inputs), norms 1, biases 0."""

    def create() -> Params:
        _, state = nnx.split(_model(config, nnx.Rngs(seed), dtype))
        return {_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}

    return jax.jit(create)()


def decode(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array, attend: Attend,
    partition: Partition = WHOLE, used: jax.Array | None = None, adapters: TokenAdapters | None = None,
    on_layer: OnLayer | None = None,
) -> jax.Array:  # fmt: skip
    """Run all layers and the final norm on tokens, i32[T]. Returns f[d, T] in the type of the products.

    used: bool[T], false for padding, for which no expert is read; its result has no meaning. None: all are tokens.
    adapters: of the tokens, where params have those of `adapter_specs`; None: the model alone. on_layer: called with
    each layer and the stream behind it.

    Pure; call it inside `jax.jit`. Only `positions`, i32[T], and `attend` give the tokens an order. With a partition,
    params and config are those of one device, the call stands inside `jax.shard_map`, `attend` sees this device's
    heads, and the result is whole.
    """
    return _merge(params, config, partition)(tokens, positions, attend, used, adapters, on_layer)


def logits(params: Params, config: ModelConfig, hidden: jax.Array, partition: Partition = WHOLE) -> jax.Array:
    """Return the scores over the vocabulary, f32[S, V], of columns f[d, S] of `decode`'s result or `decode_head`'s.

    Tokens that a head never proposes have -inf.
    """
    return _merge(params, config, partition).logits(hidden)


def reduce_features(params: Params, config: ModelConfig, features: jax.Array) -> jax.Array:
    """Return a head's first feature of each position, f32[d, T], from the target's, f[F, T].

    An EAGLE-3 head reduces the outputs of three of the target's layers, one below another, F =
    `Eagle3Config.feature_size`. An MTP layer reads the target's output after its last norm as it is.
    """
    return features.astype(jnp.float32) if config.is_mtp else _merge(params, config, WHOLE).fc(features)


def decode_head(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array, features: jax.Array, attend: Attend
) -> jax.Array:
    """Run an EAGLE-3 head or an MTP layer on tokens, i32[T], and the feature of the position before each, f[d, T].

    That feature is the target's (`reduce_features`), or the head's own where the head is a position further on. Returns
    its own features, f32[d, T]: `logits` takes them, and so does the next position.

    positions: i32[T], of the features. The published heads count so, and position 0 has no feature before it: its token
    is not fed.
    """
    return _merge(params, config, WHOLE).head_layer(tokens, positions, features, attend)


def medusa_logits(params: Params, config: ModelConfig, head: int, hidden: jax.Array) -> jax.Array:
    """Return the scores of one Medusa head, f32[S, V], from the target's output after its last norm, f[d, S].

    `logits` returns those of head 0.
    """
    return _merge(params, config, WHOLE).heads[head](hidden)


def param_specs(config: ModelConfig, quantize: str = "none") -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return shape and logical axis names of each weight; `Partition.split_axis` maps these to mesh axes.

    quantize: "int8" and "int4" add scales, and zeros; `Linear` has their shapes. int4 is for matrices of layers, while
    embedding and head are in int8.
    """
    _, state = _abstract(config, WHOLE, quantize, None if quantize == "none" else jnp.dtype(jnp.float32))
    return _specs(state)


def kind_of(params: Params) -> str:
    """Return the `quantize` that weights were loaded with."""
    return "int4" if "layers.0.out" + ZERO in params else "int8" if "embed" + SCALE in params else "none"


def adapter_specs(config: ModelConfig, count: int, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return shape and logical axis names of the matrices that hold `count` adapters of at most `rank`.

    A weight that is several projections stacks their A, and its B has a block for each: f[count, P rank, in] and
    f[count, out, P rank] for P projections. Names are those of weights with LORA_A or LORA_B behind them.
    """
    _, state = _abstract(config, WHOLE, "none", None, (count, rank))
    return {name: spec for name, spec in _specs(state).items() if name.endswith((LORA_A, LORA_B))}


def _specs(state: Any) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    return {
        _name(path): (variable.shape, variable.get_metadata()["logical_axes"])
        for path, variable in nnx.to_flat_state(state)
    }


class Layer(nnx.Module):
    """Attention and a gated MLP or experts, each behind a norm, or between two, and added to the stream.

    Query, key and value are one product, gate and up another: fewer and larger products are faster below 16 tokens, and
    fewer arrays are cheaper to dispatch.
    """

    experts: Experts | None = None
    sinks: nnx.Param | None = None

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs, dtype: Any, partition: Partition):
        d, inner = config.hidden_size, config.intermediate_size
        self.partition = partition
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        has_pre_norms = not config.post_norms or config.post_norms[0] != ""
        self.attn_norm = RMSNorm(d, config, dtype) if has_pre_norms else None
        self.feature_norm = None if config.eagle3 is None else RMSNorm(d, config, dtype)
        inputs = d if config.eagle3 is None else 2 * d
        self.qkv = Linear(
            config.q_size + 2 * config.kv_size, inputs, ("qkv", "embed"), rngs, dtype, bias=config.qkv_bias
        )  # fmt: skip
        normed = {"all_queries": config.q_size, "all_keys": config.kv_size}
        self.q_norm, self.k_norm = (
            None if not config.qk_norm
            else RMSNorm(features, config, dtype, axis) if config.joint_qk_norm
            else RMSNorm(self.head_dim, config, dtype, "head_dim")
            for axis, features in normed.items()
        )  # fmt: skip
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(self.heads, dtype), logical_axes=("sinks",))
        self.out = Linear(d, config.q_size, ("residual", "heads"), rngs, dtype, bias=config.out_bias)
        self.mlp_norm = RMSNorm(d, config, dtype) if has_pre_norms else None
        self.attn_post_norm = RMSNorm(d, config, dtype) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(d, config, dtype) if config.post_norms else None
        if config.experts_of(layer) is not None:
            self.experts = Experts(config, rngs, dtype, partition)
            return
        self.gate_up = Linear(2 * inner, d, ("gate_up", "embed"), rngs, dtype, bias=config.mlp_bias)
        self.down = Linear(d, inner, ("residual", "mlp"), rngs, dtype, bias=config.mlp_bias)

    def __call__(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array] | None, layer: int, attend: Attend,
        used: jax.Array | None, adapters: TokenAdapters | None, embedded: jax.Array | None = None,
        scale: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return the stream behind the layer, f32[d, T]. rotary: None for a layer without. embedded: of the tokens of
        an EAGLE-3 head, whose stream is features. scale: of the queries, f32[T]; None: 1."""
        dtype = self.qkv.dtype
        if self.feature_norm is None or embedded is None:
            normed = _behind(self.attn_norm, x)
        else:
            normed = jnp.concatenate([_behind(self.attn_norm, embedded), self.feature_norm(x)])
        qkv = self.qkv(normed, adapters).reshape(self.heads + 2 * self.kv_heads, self.head_dim, -1)
        rotated = qkv[: self.heads + self.kv_heads]
        if not self.config.late_qk_norms:
            rotated = self._normed(rotated)
        if rotary is not None:
            rotated = rotate(rotated, rotary, interleaved=self.config.interleaved_rotary)
        if self.config.late_qk_norms:
            rotated = self._normed(rotated)
        queries, keys = rotated[: self.heads], rotated[self.heads :]
        if self.config.query_scalar is not None:  # attention divides by sqrt(D)
            queries = queries * (self.head_dim / self.config.query_scalar) ** 0.5
        if scale is not None:
            queries = queries * scale
        values = qkv[self.heads + self.kv_heads :].astype(dtype)
        queries, keys, values = keep_layout((queries.astype(dtype), keys.astype(dtype), values))
        sinks = None if self.sinks is None else self.sinks[...]
        mixed = keep_layout(attend(layer, queries, keys, values, sinks))
        found = self.partition.to_stream(self.out, mixed.reshape(self.heads * self.head_dim, -1), adapters)
        x = self._added(x, _behind(self.attn_post_norm, found))
        if self.experts is not None:
            found = self.experts(_behind(self.mlp_norm, x), used)
        else:
            inner = gated(self.gate_up(_behind(self.mlp_norm, x), adapters), self.config)
            found = self.partition.to_stream(self.down, inner, adapters)
        return self._added(x, _behind(self.mlp_post_norm, found))

    def _added(self, x: jax.Array, found: jax.Array) -> jax.Array:
        """Add what attention, MLP or experts give to the stream."""
        multiplier = self.config.residual_multiplier
        return x + (found if multiplier == 1 else found * multiplier)

    def _normed(self, queries_keys: jax.Array) -> jax.Array:
        """Normalise queries and keys, f32[H + K, D, T], if the model does: each head, or all of them together."""
        if self.q_norm is None or self.k_norm is None:
            return queries_keys
        parts = queries_keys[: self.heads], queries_keys[self.heads :]
        if not self.config.joint_qk_norm:
            return jnp.concatenate([self.q_norm(parts[0]), self.k_norm(parts[1])])
        queries, keys = (part.reshape(len(part) * self.head_dim, -1) for part in parts)
        queries = self.q_norm(queries, self.partition.joint_mean_square(queries, of_keys=False))
        keys = self.k_norm(keys, self.partition.joint_mean_square(keys, of_keys=True))
        return jnp.concatenate([queries, keys]).reshape(queries_keys.shape)


def _behind(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    """Return x behind a norm, or as it is where the model has none there."""
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """The whole model: tokens and positions, i32[T], to f[d, T] after the final norm.

    An EAGLE-3 head is one layer of it, with `fc` before and a head over its own vocabulary behind: `head_row`, i32[V],
    is each token's row there. An MTP layer is one too: `fc` reads feature and token, each behind a norm.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, partition: Partition = WHOLE):
        self.config = config
        self.partition = partition
        self.embed = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), rngs, dtype)
        self.layers = nnx.List([Layer(config, layer, rngs, dtype, partition) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        rows = config.vocab_size
        if config.eagle3 is not None:
            rows = config.eagle3.draft_vocab_size
            self.fc = Linear(config.hidden_size, config.eagle3.feature_size, ("residual", "features"), rngs, dtype)
            if rows < config.vocab_size:
                tokens = jnp.arange(config.vocab_size, dtype=jnp.int32)
                self.head_row = nnx.Param(jnp.where(tokens < rows, tokens, -1), logical_axes=("vocab",))
        if config.is_mtp:
            self.hidden_norm, self.token_norm = (RMSNorm(config.hidden_size, config, dtype) for _ in range(2))
            self.fc = Linear(config.hidden_size, 2 * config.hidden_size, ("residual", "features"), rngs, dtype)
        if not config.tie_embeddings:
            self.head = Linear(rows, config.hidden_size, ("vocab", "embed"), rngs, dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, used: jax.Array | None = None,
        adapters: TokenAdapters | None = None, on_layer: OnLayer | None = None,
    ) -> jax.Array:  # fmt: skip
        rotary = rotary_angles(positions, self.config)
        of_windows = rotary
        if self.config.window_rope_theta is not None:
            of_windows = rotary_angles(positions, self.config, windowed=True)
        x = self.partition.look_up(self.embed, tokens).T
        if self.config.scaled_embedding:  # by a factor in the type of the weights, as the model is trained
            x = x * jnp.asarray(self.config.hidden_size**0.5, self.embed.dtype).astype(x.dtype)
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        growth = self.config.query_growth
        scale = None if growth is None else query_scale(positions, growth)
        for index, layer in enumerate(self.layers):
            angles = None if index in self.config.nope_layers else rotary
            if self.config.window_of(index) is not None:
                angles = of_windows
            x = layer(x, angles, index, attend, used, adapters, scale=scale)
            if on_layer is not None:
                on_layer(index, x)
        return self.norm(x).astype(self.embed.dtype)

    def head_layer(
        self, tokens: jax.Array, positions: jax.Array, features: jax.Array, attend: Attend
    ) -> jax.Array:  # fmt: skip
        rotary = rotary_angles(positions, self.config)
        embedded = self.embed.rows(tokens).T
        x = features.astype(jnp.float32)
        if not self.config.is_mtp:
            return self.layers[0](x, rotary, 0, attend, None, None, embedded)
        parts = [self.hidden_norm(x), self.token_norm(embedded)]
        x = self.fc(
            jnp.concatenate(parts[::-1] if self.config.mtp is not None and self.config.mtp.token_first else parts)
        )
        return self.norm(self.layers[0](x, rotary, 0, attend, None, None))

    def logits(self, hidden: jax.Array) -> jax.Array:
        if self.config.eagle3 is not None:
            scores = keep_layout(self.head(self.norm(hidden).astype(self.embed.dtype))).T
            if self.config.eagle3.draft_vocab_size == self.config.vocab_size:
                return scores
            row = self.head_row[...]  # -1: the head never proposes this token
            return jnp.where(row >= 0, scores[:, row], -jnp.inf)
        head = self.embed if self.config.tie_embeddings else self.head
        scores = self.partition.join_vocabulary(keep_layout(head(hidden))).T
        if self.config.logits_scaling != 1:
            scores = scores / self.config.logits_scaling
        return capped(scores, self.config.logit_softcap)


class MedusaHead(nnx.Module):
    """Residual blocks and a product with the vocabulary: f[d, S] to f32[S, V]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any):
        assert config.medusa is not None
        d = config.hidden_size
        blocks = range(config.medusa.num_blocks)
        self.blocks = nnx.List([Linear(d, d, ("residual", "embed"), rngs, dtype, bias=True) for _ in blocks])
        self.out = Linear(config.vocab_size, d, ("vocab", "embed"), rngs, dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        x = hidden.astype(jnp.float32)
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return keep_layout(self.out(x)).T


class MedusaHeads(nnx.Module):
    """All heads; each reads the same feature. layers: none, since heads have no KV."""

    layers = ()

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any):
        assert config.medusa is not None
        self.heads = nnx.List([MedusaHead(config, rngs, dtype) for _ in range(config.medusa.num_heads)])

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.heads[0](hidden)


def _model(config: ModelConfig, rngs: nnx.Rngs, dtype: Any, partition: Partition = WHOLE) -> Any:
    """Return the modules that a configuration asks for: a decoder, or Medusa heads."""
    return MedusaHeads(config, rngs, dtype) if config.medusa else Decoder(config, rngs, dtype, partition)


def _name(path: tuple[Any, ...]) -> str:
    """Join names: ("layers", 0, "qkv", "weight") -> "layers.0.qkv", (..., "qkv", "bias") -> "layers.0.qkv.bias"."""
    return ".".join(str(part) for part in (path[:-1] if path[-1] == "weight" else path))


@lru_cache(maxsize=32)
def _abstract(
    config: ModelConfig, partition: Partition, quantize: str, dtype: Any, adapters: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """Return a model's structure and abstract weights; allocates nothing.

    quantize: as for `param_specs`. dtype: of the products of quantised weights. adapters: how many may be loaded, and
    of which rank.
    """

    def create() -> Any:
        decoder = _model(config, nnx.Rngs(0), jnp.float32, partition)
        if adapters is not None:
            count, rank = adapters
            for layer in decoder.layers:
                for name, projections in PROJECTIONS.items():
                    if (linear := getattr(layer, name, None)) is not None:  # a layer of experts lacks two
                        linear.add_adapters(count, projections * rank)
        if quantize != "none":
            for path, module in list(nnx.iter_modules(decoder)):
                if isinstance(module, Linear):
                    (module.to_int4 if quantize == "int4" and "layers" in path else module.to_int8)(dtype)
        return decoder

    return nnx.split(nnx.eval_shape(create))


def _merge(params: Params, config: ModelConfig, partition: Partition) -> Any:
    """Return the modules (`_model`) with these weights."""
    quantize = kind_of(params)
    dtype = None if quantize == "none" else params["norm"].dtype
    first = params.get("layers.0.out" + LORA_A)
    graphdef, state = _abstract(config, partition, quantize, dtype, None if first is None else first.shape[:2])
    weights = {path: variable.replace(params[_name(path)]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


def attend_dense(config: ModelConfig, segment: jax.Array | None = None) -> Attend:
    """Return causal attention over packed tokens without a KV cache, within each layer's window: for scoring, training.

    Holds all scores at once, f32[H, T, T]. segment: i32[T], the text that each token belongs to, if there are several.
    """

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        heads, dim, count = q.shape
        age = jnp.arange(count)[:, None] - jnp.arange(count)
        seen = age >= 0
        if segment is not None:
            seen &= segment[:, None] == segment
        window = config.window_of(layer)
        if window is not None:
            seen &= age < window
        highest = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        grouped = q.reshape(len(k), heads // len(k), dim, count)
        scores = jnp.einsum("kgdt,kds->kgts", grouped, k, precision=highest, preferred_element_type=jnp.float32)
        by_head = None if sinks is None else sinks.reshape(len(k), -1, 1)
        weights = attention_weights(scores * dim**-0.5, seen, config.attention_softcap, by_head).astype(v.dtype)
        return jnp.einsum("kgts,kds->kgdt", weights, v, precision=highest).reshape(q.shape)

    return attend


def attention_weights(scores: jax.Array, seen: jax.Array, softcap: float | None, sinks: jax.Array | None) -> jax.Array:
    """Return the softmax over the keys that are seen, f32[..., S].

    scores: f32[..., S]; seen: bool, broadcasts to it; softcap: as `ModelConfig.attention_softcap`; sinks: f[...],
    broadcasts to the rows.
    """
    scores = jnp.where(seen, capped(scores, softcap), -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = jnp.broadcast_to(sinks.astype(scores.dtype), scores.shape[:-1])[..., None]
    return jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
