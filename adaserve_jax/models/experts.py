"""Mixture of experts: a router chooses the MLPs that each token goes through, and one grouped product computes them.

A token goes to the `per_token` experts that the router finds likeliest. Its result is the sum of theirs, weighted by
the router's probabilities, and in some families that of an MLP which all tokens share. Tokens are sorted by expert, so
that each expert's weight is read once, and not at all if no token chose it: the more tokens a step has, the more
experts it reads.

Axes: T tokens, d features, E experts of the model, G experts of this device, P = per_token * T pairs of token and
expert.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from adaserve_jax.cpu_kernels.product import multiplies_groups_int4, multiply_groups_int4
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.layers import Linear, gated, grouped_product, weight_product
from adaserve_jax.models.partition import Partition
from adaserve_jax.models.quantize import widen_int4

CORRECTION = ".correction"
"""End of the name of the bias by which experts are chosen."""
_ROUTER = ".router"


def stays_f32(name: str, names: Container[str]) -> bool:
    """Return whether a weight of a model with these weights is in f32 whatever the type of the others.

    A router whose scores are corrected was trained in f32: in bf16, other experts win where two are near each other.
    """
    return name.removesuffix(_ROUTER).removesuffix(CORRECTION) + CORRECTION in names


class Experts(nnx.Module):
    """SwiGLU of the chosen experts: f32[d, T] after the norm to f32[d, T].

    Weights of all experts lie one below another: gate_up [G * 2 inner, d], each expert's gate above its up, and down
    [G * d, inner]. So they load, divide and quantise as matrices do. The router is not quantised, nor rounded where
    `stays_f32` says so: it is small, and rounding it would change which experts are chosen.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: Any, partition: Partition):
        experts, d = config.experts, config.hidden_size
        assert experts is not None
        self.config, self.experts, self.partition = config, experts, partition
        noise = jax.random.normal(rngs.params(), (experts.count, d), jnp.float32)
        routing = jnp.float32 if experts.names.correction else dtype
        self.router = nnx.Param((noise * d**-0.5).astype(routing), logical_axes=("router", "embed"))
        bias, inner = experts.biased, experts.intermediate_size
        if bias:
            self.router_bias = nnx.Param(jnp.zeros(experts.count, dtype), logical_axes=("router",))
        self.gate_up = GroupedLinear(experts.count * 2 * inner, d, ("expert_gate_up", "embed"), rngs, dtype, bias=bias)
        self.down = GroupedLinear(experts.count * d, inner, ("expert_down", "expert_mlp"), rngs, dtype, bias=bias)
        if experts.names.correction:
            self.correction = nnx.Param(jnp.zeros(experts.count, jnp.float32), logical_axes=("router",))
        if experts.shared:
            self.shared_gate_up = Linear(2 * experts.shared, d, ("gate_up", "embed"), rngs, dtype)
            self.shared_down = Linear(d, experts.shared, ("residual", "mlp"), rngs, dtype)
            if experts.names.shared_gate:
                self.shared_weight = nnx.Param(jnp.zeros((1, d), dtype), logical_axes=("router", "embed"))

    def __call__(self, x: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """Run each token through its experts. used: bool[T], false for padding, for which no expert is read."""
        count, tokens = self.experts.per_token, x.shape[1]
        weight, chosen = self._route(x)
        held = self.partition.experts_held(self.experts.count)
        own = chosen.reshape(-1) - self.partition.first_expert(self.experts.count)
        present = (own >= 0) & (own < held)
        if used is not None:
            present &= jnp.tile(used, count)
        group = jnp.where(present, own, held)
        order = jnp.argsort(group, stable=True)
        place = jnp.argsort(order)
        sizes = (group[:, None] == jnp.arange(held)).sum(axis=0, dtype=jnp.int32)
        groups = jnp.minimum(group[order], held - 1)
        hidden = self.gate_up.grouped(x[:, order % tokens], sizes, groups) + self.gate_up.grouped_bias(held, groups)
        mixed = self.partition.gather_neurons(gated(hidden, self.config))
        found = self.down.grouped(mixed, sizes, groups) + self.partition.once(self.down.grouped_bias(held, groups))
        found = found[:, place]
        found = jnp.where(present, found, 0).reshape(-1, count, tokens)
        found = self.partition.gather_experts(found)
        # In the order of the router's choice, so that a token's sum does not depend on who shares its step.
        total = weight[0] * found[:, 0]
        for each in range(1, count):
            total += weight[each] * found[:, each]
        total = self.partition.join_experts(total)
        return total + self._shared(x) if self.experts.shared else total

    def _shared(self, x: jax.Array) -> jax.Array:
        """Return what the MLP that all tokens share gives, f32[d, T]."""
        found = self.partition.to_stream(self.shared_down, gated(self.shared_gate_up(x), self.config))
        if not self.experts.names.shared_gate:
            return found
        weight = self.shared_weight[...]
        return found * jax.nn.sigmoid(weight_product(weight, x.astype(weight.dtype)))

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each token's weights f32[per_token, T] and experts i32[per_token, T], the likeliest first."""
        router = self.router[...]
        scores = weight_product(router, x.astype(router.dtype))
        if self.experts.biased:
            scores += self.router_bias[...].astype(jnp.float32)[:, None]
        if self.experts.names.correction:  # it changes who is chosen, not the weights
            each = jax.nn.sigmoid(scores).T
            _, chosen = lax.top_k(each + self.correction[...], self.experts.per_token)
            weight = jnp.take_along_axis(each, chosen, axis=1)
        else:
            weight, chosen = lax.top_k(jax.nn.softmax(scores, axis=0).T, self.experts.per_token)
        if self.experts.normalised:
            weight /= weight.sum(axis=1, keepdims=True)
        if self.experts.scaling != 1:
            weight *= self.experts.scaling
        return weight.T, chosen.T


class GroupedLinear(Linear):
    """A weight [G * out, in] of G experts, each with rows [out, in]."""

    def grouped(self, x: jax.Array, sizes: jax.Array, groups: jax.Array) -> jax.Array:
        """Multiply each column by its expert's weight, f32[out, P].

        x: f[in, P], sorted by expert; sizes: i32[G], columns of each expert; groups: i32[P], the expert of each column.
        Columns behind those of the last expert have no meaning.
        """
        weight, x = self.weight[...], x.astype(self.dtype)
        if self.zero is not None:
            assert self.scale is not None
            on_cpu = multiply_groups_int4 if multiplies_groups_int4() else _widened_product
            given = weight, self.scale[...], self.zero[...], x, sizes
            return lax.platform_dependent(*given, cpu=on_cpu, default=_widened_product)
        found = grouped_product(weight.reshape(len(sizes), -1, weight.shape[1]), x, sizes)
        if self.scale is None:
            return found
        return found * self.scale[...].reshape(len(sizes), -1)[groups].T

    def grouped_bias(self, count: int, groups: jax.Array) -> jax.Array:
        """Return the bias of each column's expert, f32[out, P], or 0 without one. count: G; groups: i32[P]."""
        if self.bias is None:
            return jnp.zeros((), jnp.float32)
        return self.bias[...].astype(jnp.float32).reshape(count, -1)[groups].T


def _widened_product(weight: jax.Array, scale: jax.Array, zero: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return `grouped_product` of a weight in int4, with the weights of even and of odd inputs apart."""
    even, odd = (half.astype(x.dtype).reshape(len(sizes), -1, len(x) // 2) for half in widen_int4(weight, scale, zero))
    return grouped_product(even, x[::2], sizes) + grouped_product(odd, x[1::2], sizes)
