"""Layers of the decoder: linear, RMSNorm and rotary embedding. Activations are feature-major, f[d, T]."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from adaserve_jax.cpu_kernels.product import multiplies, multiplies_groups, multiply, multiply_groups
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.quantize import int4_group, int4_product, int8_product, product
from adaserve_jax.models.rope import plain_frequencies


class TokenAdapters(NamedTuple):
    """The adapters of T tokens, sorted so that each adapter's weights are read once. N: adapters that may be loaded.

    adapted: bool[T], false for tokens of the model alone. order: i32[T], the tokens, adapter after adapter, those
    without one last. place: i32[T], where each token is in that order. sizes: i32[N], tokens of each adapter.
    """

    adapted: jax.Array
    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, slots: jax.Array, count: int) -> TokenAdapters:
        """Sort tokens by their adapters' slots, i32[T]: 0 for none, else from 1 to `count`."""
        adapted = slots > 0
        group = jnp.where(adapted, slots - 1, count)
        order = jnp.argsort(group, stable=True)
        sizes = (group[:, None] == jnp.arange(count)).sum(axis=0, dtype=jnp.int32)
        return cls(adapted, order, jnp.argsort(order), sizes)


class Linear(nnx.Module):
    """weight @ x + bias, accumulated and returned in f32. weight: f[out, in]; bias: f[out], if there is one.

    A weight in int8 is i8[out, in], and `scale` is f32[out]: row o stands for weight[o] * scale[o]. One in int4 is
    i8[out, in / 2], two inputs in a byte, `scale` is f16[out, G] and `zero` i8[out, G] for G groups of inputs.

    With adapters, a token of adapter n gets lora_b[n] @ (lora_a[n] @ x) too: lora_a is f[N, rank, in], lora_b
    f[N, out, rank].
    """

    scale: nnx.Param | None = None
    zero: nnx.Param | None = None
    product_dtype: Any = None
    lora_a: nnx.Param | None = None
    lora_b: nnx.Param | None = None

    def __init__(
        self, outputs: int, inputs: int, axes: tuple[str, str], rngs: nnx.Rngs, dtype: Any, *, bias: bool = False
    ):
        noise = jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32)
        self.weight = nnx.Param((noise * inputs**-0.5).astype(dtype), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs, dtype), logical_axes=axes[:1]) if bias else None

    @property
    def dtype(self) -> Any:
        """Type that products are computed in: the weight's, or with a quantised weight `product_dtype`."""
        return self.weight[...].dtype if self.scale is None else self.product_dtype

    def __call__(self, x: jax.Array, adapters: TokenAdapters | None = None) -> jax.Array:
        return self.biased(self.product(x, adapters))

    def product(self, x: jax.Array, adapters: TokenAdapters | None = None) -> jax.Array:
        """Return weight @ x with what the tokens' adapters add, without the bias, f32[out, T]."""
        weight, x = self.weight[...], x.astype(self.dtype)
        if self.scale is None:
            found = weight_product(weight, x)
        elif self.zero is None:
            found = int8_product(weight, self.scale[...], x)
        else:
            found = int4_product(weight, self.scale[...], self.zero[...], x)
        return found if adapters is None else found + self._adapted(x, adapters)

    def _adapted(self, x: jax.Array, adapters: TokenAdapters) -> jax.Array:
        """Return what the adapters add, f32[out, T]. A column's bits depend on its own adapter alone."""
        assert self.lora_a is not None and self.lora_b is not None
        hidden = grouped_product(self.lora_a[...], x[:, adapters.order], adapters.sizes).astype(x.dtype)
        found = grouped_product(self.lora_b[...], hidden, adapters.sizes)[:, adapters.place]
        return jnp.where(adapters.adapted, found, 0)

    def biased(self, product: jax.Array) -> jax.Array:
        return product if self.bias is None else product + self.bias[...].astype(jnp.float32)[:, None]

    def rows(self, index: jax.Array) -> jax.Array:
        """Return rows of a weight that is not in int4, f32[T, in]. index: i32[T]."""
        rows = self.weight[...][index].astype(jnp.float32)
        return rows if self.scale is None else rows * self.scale[...][index][:, None]

    def to_int8(self, dtype: Any) -> None:
        """Make the weight one in int8. dtype: the type of the products."""
        axes = self.weight.get_metadata()["logical_axes"]
        self.scale = nnx.Param(jnp.ones(self.weight.shape[0], jnp.float32), logical_axes=axes[:1])
        self.product_dtype = dtype

    def to_int4(self, dtype: Any) -> None:
        """Make the weight one in int4. dtype: the type of the products."""
        (outputs, inputs), axes = self.weight.shape, self.weight.get_metadata()["logical_axes"]
        groups = inputs // int4_group(inputs)
        self.weight = nnx.Param(jnp.zeros((outputs, inputs // 2), jnp.int8), logical_axes=axes)
        self.scale = nnx.Param(jnp.ones((outputs, groups), jnp.float16), logical_axes=axes)
        self.zero = nnx.Param(jnp.zeros((outputs, groups), jnp.int8), logical_axes=axes)
        self.product_dtype = dtype

    def add_adapters(self, count: int, rank: int) -> None:
        """Make room for adapters whose matrices have `rank` rows and columns together."""
        (outputs, inputs), axes = self.weight.shape, self.weight.get_metadata()["logical_axes"]
        self.lora_a = nnx.Param(jnp.zeros((count, rank, inputs)), logical_axes=("adapter", "rank", axes[1]))
        self.lora_b = nnx.Param(jnp.zeros((count, outputs, rank)), logical_axes=("adapter", axes[0], "rank"))


def weight_product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight @ x, f32[out, T]: by the C++ kernel on a CPU where it is the faster one, else by XLA."""
    if multiplies(weight, x):
        return lax.platform_dependent(weight, x, cpu=multiply, default=product)
    return product(weight, x)


def grouped_product(weight: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return weight[g] @ x[:, t] for each column t of group g, f32[out, P].

    weight: [G, out, in]; x: f[in, P], group after group; sizes: i32[G]. On a CPU by the C++ kernel, since XLA
    multiplies every column by every group's weight there.
    """
    if multiplies_groups(weight):
        return lax.platform_dependent(weight, x, sizes, cpu=multiply_groups, default=_ragged_product)
    return _ragged_product(weight, x, sizes)


_CONTRACT_INPUTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def _ragged_product(weight: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.ragged_dot_general(
        x.T, weight.astype(x.dtype), sizes, _CONTRACT_INPUTS, precision=precision, preferred_element_type=jnp.float32
    ).T


class RMSNorm(nnx.Module):
    """x / sqrt(mean over features of x^2 + eps) * weight, or * (1 + weight) by the configuration. x: f32[..., d, T]."""

    def __init__(self, features: int, config: ModelConfig, dtype: Any, axis: str = "embed"):
        first = jnp.zeros if config.offset_norms else jnp.ones
        self.weight = nnx.Param(first(features, dtype), logical_axes=(axis,))
        self.eps = config.rms_norm_eps
        self.offset = config.offset_norms

    def __call__(self, x: jax.Array, mean_square: jax.Array | None = None) -> jax.Array:
        """Return x normalised. mean_square: f32[..., 1, T], where others have a part of the features; None: of x."""
        if mean_square is None:
            mean_square = jnp.mean(x * x, axis=-2, keepdims=True)
        scale = jax.lax.rsqrt(mean_square + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return x * scale * (1 + weight if self.offset else weight)[:, None]


def gated(gate_up: jax.Array, config: ModelConfig) -> jax.Array:
    """Return act(gate) * up of f[2 * inner, T], gate above up; clamped, as gpt-oss does it, act(gate) * (up + 1)."""
    gate, up = jnp.split(gate_up, 2)
    if config.experts is not None and config.experts.clamp is not None:
        limit, alpha = config.experts.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
    return (jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Return cap * tanh(scores / cap); None: the scores."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def rotary_angles(positions: jax.Array, config: ModelConfig, *, windowed: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of position * frequency, times the scaling's magnitude: f32[D/2, T] each, D being the features
    that are rotated.

    Angles are rounded to f32 as in transformers, since models are trained with those. windowed: those of layers with a
    window, in a model that has others there.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if windowed and config.window_rope_theta is not None:
        theta, scaling = config.window_rope_theta, None
    frequencies = (scaling.frequencies if scaling else plain_frequencies)(theta, config.rotary_dim or config.head_dim)
    angle = jnp.asarray(frequencies)[:, None] * positions.astype(jnp.float32)[None, :]
    if scaling is None or scaling.magnitude == 1:
        return jnp.cos(angle), jnp.sin(angle)
    return jnp.cos(angle) * scaling.magnitude, jnp.sin(angle) * scaling.magnitude


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array], *, interleaved: bool = False) -> jax.Array:
    """Turn each pair of x, f32[heads, D, T], by its angle: (i, i + D/2), Hugging Face's half-split layout, or
    interleaved (2 i, 2 i + 1). Features beyond those that have an angle stay."""
    cos, sin = rotary
    turned = 2 * len(cos)
    rest = [x[:, turned:]] if turned < x.shape[1] else []
    if interleaved:
        pairs = x[:, :turned].reshape(len(x), len(cos), 2, -1)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=2)
        return jnp.concatenate([rotated.reshape(len(x), turned, -1), *rest], axis=1)
    first, second = jnp.split(x[:, :turned], 2, axis=1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=1)


def query_scale(positions: jax.Array, growth: tuple[float, int]) -> jax.Array:
    """Return what queries are multiplied by, f32[T]: 1 + beta ln(1 + floor(position / original)), as in Llama 4."""
    beta, original = growth
    return 1 + beta * jnp.log(1 + jnp.floor(positions.astype(jnp.float32) / original))


def keep_layout(x: Any) -> Any:
    """Return x behind a barrier that keeps XLA from folding a neighbouring transpose into a product.

    Folded, the product of a [8192, 768] head with 2-64 columns takes 15-70 ms on 2 CPU cores; kept apart, 2-8 ms.
    """
    return jax.lax.optimization_barrier(x)
