"""One dense decoder for Llama, Mistral and Qwen: RMSNorm, rotary, grouped-query attention, SwiGLU, tied or untied head;
biases and norms of queries and keys where the configuration has them.

The residual stream is feature-major, [d, T], from the embedding to the head, so that each product is `W @ x` with the
weight as Hugging Face stores it, [out, in]: on a CPU this is up to 1.5 times faster than the token-major form at
2-64 tokens. Flax NNX defines and initialises the modules; what is passed to `jax.jit` is a flat dict of arrays, merged
back into modules while tracing only. The caller owns attention: this file knows no KV cache, pages or masks.

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
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.models.quantize import SCALE, int8_product
from adaserve_jax.models.rope import plain_frequencies

Params = dict[str, jax.Array]
"""Weights by dotted name, as `param_specs` lists them."""

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""attend(layer, q f[H, D, T], k f[K, D, T], v f[K, D, T]) -> f[H, D, T]; q and k are rotated, nothing is scaled:
dividing the scores by sqrt(D) is attend's work."""


def init_params(config: ModelConfig, seed: int, dtype: Any = jnp.float32) -> Params:
    """Random weights: normal with standard deviation 1 / sqrt(inputs), norms 1, biases 0."""

    def create() -> Params:
        _, state = nnx.split(Decoder(config, nnx.Rngs(seed), dtype))
        return {_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}

    return jax.jit(create)()


def decode(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array, attend: Attend,
    partition: Partition = WHOLE,
) -> jax.Array:  # fmt: skip
    """Run all layers and the final norm. tokens, positions: i32[T]. Returns f[d, T] in the type that products are in.

    Pure; call it inside `jax.jit`. The order of tokens has no meaning here: only `positions` (rotary) and `attend` do.
    partition: of the weights over devices; then params and config are those of one device, the call stands inside
    `jax.shard_map`, `attend` sees this device's heads, and the result is whole.
    """
    return _merge(params, config, partition)(tokens, positions, attend)


def logits(params: Params, config: ModelConfig, hidden: jax.Array, partition: Partition = WHOLE) -> jax.Array:
    """Scores over the vocabulary for chosen columns of `decode`'s result. hidden: f[d, S]. Returns f32[S, V]."""
    return _merge(params, config, partition).logits(hidden)


def param_specs(config: ModelConfig, quantize: str = "none") -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """(shape, logical axis names) of each weight by name; the names are what a mesh rule maps to mesh axes.

    quantize: "int8" adds the scales. A weight that has one is i8[out, in] and its scale, of the same first axis, f32.
    """
    _, state = _abstract(config, WHOLE, jnp.dtype(jnp.float32) if quantize == "int8" else None)
    return {
        _name(path): (variable.shape, variable.get_metadata()["logical_axes"])
        for path, variable in nnx.to_flat_state(state)
    }


class Linear(nnx.Module):
    """weight @ x + bias; accumulates and returns f32. weight: f[out, in]; bias: f[out], where there is one.

    With a scale (`_add_scales`) the weight is i8[out, in], and row o of it stands for weight[o] * scale[o].
    """

    scale: nnx.Param | None = None
    int8_dtype: Any = None

    def __init__(
        self, outputs: int, inputs: int, axes: tuple[str, str], rngs: nnx.Rngs, dtype: Any, *, bias: bool = False
    ):
        noise = jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32)
        self.weight = nnx.Param((noise * inputs**-0.5).astype(dtype), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), logical_axes=axes[:1]) if bias else None

    @property
    def dtype(self) -> Any:
        """The type of the products: the weight's, or what goes with an int8 weight."""
        return self.weight[...].dtype if self.scale is None else self.int8_dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.biased(self.product(x))

    def product(self, x: jax.Array) -> jax.Array:
        """weight @ x without the bias: f32[out, T]."""
        weight, x = self.weight[...], x.astype(self.dtype)
        if self.scale is not None:
            return int8_product(weight, self.scale[...], x)
        precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        return jnp.matmul(weight, x, precision=precision, preferred_element_type=jnp.float32)

    def biased(self, product: jax.Array) -> jax.Array:
        return product if self.bias is None else product + self.bias[...].astype(jnp.float32)[:, None]

    def rows(self, index: jax.Array) -> jax.Array:
        """Rows of the weight: f32[T, in]. index: i32[T]."""
        rows = self.weight[...][index].astype(jnp.float32)
        return rows if self.scale is None else rows * self.scale[...][index][:, None]


class RMSNorm(nnx.Module):
    """x / sqrt(mean over features of x^2 + eps) * weight. x: f32[..., d, T]; returns the same shape."""

    def __init__(self, features: int, eps: float, dtype: Any, axis: str = "embed"):
        self.weight = nnx.Param(jnp.ones(features, dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-2, keepdims=True) + self.eps)
        return x * scale * self.weight[...].astype(jnp.float32)[:, None]


class Layer(nnx.Module):
    """Attention and SwiGLU, each behind a norm and added to the stream. Query, key and value are one product, gate
    and up another: fewer and larger products are faster below 16 tokens, and fewer arrays are cheaper to dispatch."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, partition: Partition):
        d, inner = config.hidden_size, config.intermediate_size
        self.partition = partition
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attn_norm = RMSNorm(d, config.rms_norm_eps, dtype)
        self.qkv = Linear(
            config.q_size + 2 * config.kv_size, d, ("qkv", "embed"), rngs, dtype, bias=config.qkv_bias
        )  # fmt: skip
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype, "head_dim") if config.qk_norm else None
        self.out = Linear(d, config.q_size, ("residual", "heads"), rngs, dtype, bias=config.out_bias)
        self.mlp_norm = RMSNorm(d, config.rms_norm_eps, dtype)
        self.gate_up = Linear(2 * inner, d, ("gate_up", "embed"), rngs, dtype, bias=config.mlp_bias)
        self.down = Linear(d, inner, ("residual", "mlp"), rngs, dtype, bias=config.mlp_bias)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], layer: int, attend: Attend) -> jax.Array:
        dtype = self.qkv.dtype
        qkv = self.qkv(self.attn_norm(x)).reshape(self.heads + 2 * self.kv_heads, self.head_dim, -1)
        rotated = _rotate(self._normed(qkv[: self.heads + self.kv_heads]), rotary).astype(dtype)
        values = qkv[self.heads + self.kv_heads :].astype(dtype)
        queries, keys, values = _as_laid_out((rotated[: self.heads], rotated[self.heads :], values))
        mixed = _as_laid_out(attend(layer, queries, keys, values))
        x = x + self.partition.to_stream(self.out, mixed.reshape(self.heads * self.head_dim, -1))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2)
        return x + self.partition.to_stream(self.down, jax.nn.silu(gate) * up)

    def _normed(self, queries_keys: jax.Array) -> jax.Array:
        """f32[H + K, D, T], each head normalised where the model does that."""
        if self.q_norm is None or self.k_norm is None:
            return queries_keys
        queries, keys = queries_keys[: self.heads], queries_keys[self.heads :]
        return jnp.concatenate([self.q_norm(queries), self.k_norm(keys)])


class Decoder(nnx.Module):
    """The whole model. Called with tokens and positions i32[T]; returns f[d, T] after the final norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, partition: Partition = WHOLE):
        self.config = config
        self.partition = partition
        self.embed = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), rngs, dtype)
        self.layers = nnx.List([Layer(config, rngs, dtype, partition) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), rngs, dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        rotary = _rotary(positions, self.config)
        x = self.partition.look_up(self.embed, tokens).T
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, index, attend)
        return self.norm(x).astype(self.embed.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        head = self.embed if self.config.tie_embeddings else self.head
        return self.partition.join_vocabulary(_as_laid_out(head(hidden))).T


def _as_laid_out(x: Any) -> Any:
    """x, behind a wall that keeps XLA from folding a neighbour's transpose into a product.

    Folded, the product of a [8192, 768] head with 2-64 columns takes 15-70 ms on 2 CPU cores; kept apart, 2-8 ms.
    """
    return jax.lax.optimization_barrier(x)


def _rotary(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency, times the scaling's magnitude: f32[D/2, T] each. Angles are rounded to f32,
    as in transformers: models are trained with them."""
    scaling = config.rope_scaling
    frequencies = (scaling.frequencies if scaling else plain_frequencies)(config.rope_theta, config.head_dim)
    angle = jnp.asarray(frequencies)[:, None] * positions.astype(jnp.float32)[None, :]
    if scaling is None or scaling.magnitude == 1:
        return jnp.cos(angle), jnp.sin(angle)
    return jnp.cos(angle) * scaling.magnitude, jnp.sin(angle) * scaling.magnitude


def _rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (i, i + D/2) of x f32[heads, D, T] by its angle: Hugging Face's half-split layout."""
    cos, sin = rotary
    first, second = jnp.split(x, 2, axis=1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def _name(path: tuple[Any, ...]) -> str:
    """Dotted name: ("layers", 0, "qkv", "weight") -> "layers.0.qkv", (..., "qkv", "bias") -> "layers.0.qkv.bias"."""
    return ".".join(str(part) for part in (path[:-1] if path[-1] == "weight" else path))


@lru_cache(maxsize=32)
def _abstract(config: ModelConfig, partition: Partition, int8_dtype: Any) -> tuple[Any, Any]:
    """Structure and abstract weights of a model; nothing is allocated. int8_dtype: as for `_add_scales`, or None."""

    def create() -> Decoder:
        decoder = Decoder(config, nnx.Rngs(0), jnp.float32, partition)
        if int8_dtype is not None:
            _add_scales(decoder, int8_dtype)
        return decoder

    return nnx.split(nnx.eval_shape(create))


def _add_scales(decoder: Decoder, dtype: Any) -> None:
    """Give each linear weight its scale. dtype: the type of the products."""
    for _, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear):
            axes = module.weight.get_metadata()["logical_axes"]
            module.scale = nnx.Param(jnp.ones(module.weight.shape[0], jnp.float32), logical_axes=axes[:1])
            module.int8_dtype = dtype


def _merge(params: Params, config: ModelConfig, partition: Partition) -> Decoder:
    int8_dtype = params["norm"].dtype if "embed" + SCALE in params else None
    graphdef, state = _abstract(config, partition, int8_dtype)
    weights = {path: variable.replace(params[_name(path)]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


# Attention over packed tokens without a cache, every score held at once: for scoring and training, not for
# serving.


def attend_dense(config: ModelConfig, segment: jax.Array | None = None) -> Attend:
    """Each token sees itself and those before it, within its layer's window and its own text.

    segment: i32[T], which of several texts a token is of, each text's tokens side by side; None: all are one text.
    Holds f32[H, T, T] of scores.
    """

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
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
        weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("kgts,kds->kgdt", weights, v, precision=highest).reshape(q.shape)

    return attend
