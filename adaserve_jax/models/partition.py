"""Tensor parallelism: the part of every weight that a device holds, and what devices exchange.

One mesh axis, divided as in Megatron: queries, keys, values, gate and up by rows, so that a device has whole heads and
neurons; the two products that write to the stream by their inputs, each followed by one sum over the devices; the
vocabulary by rows. Fewer key-value heads than devices are repeated. Every device computes the whole stream and result.

`exact` never splits a sum: the two products are divided by rows too, and gathered. The bits are then those of one
device, for a second exchange per product (docs/architecture/device.md).

Experts are divided by neuron, as an MLP is, or by expert, whichever exchanges less. Their sums are as large either way,
and by neuron every device has the same work; by expert is for sizes that do not divide, and in `exact` for wide
experts.

Methods that exchange are called inside `jax.shard_map` over AXIS; the others are arithmetic on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ExpertConfig, ModelConfig
from adaserve_jax.models.layers import Linear, TokenAdapters

AXIS = "tp"
"""Name of the mesh axis."""

Rows = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of rows."""


@dataclass(frozen=True)
class Partition:
    """A division over `ways` devices.

    splits_vocab: divide the vocabulary, which only some sizes allow. by_expert: each device holds whole experts, not
    neurons of all. query_copies: how often a device computes its queries of a key-value head that other devices hold
    too. In `exact`, as often as it takes for products to have the sizes, and so the bits, of one device.
    """

    ways: int = 1
    exact: bool = False
    splits_vocab: bool = False
    query_copies: int = 1
    by_expert: bool = False

    @classmethod
    def of(cls, config: ModelConfig, ways: int, *, exact: bool) -> Partition:
        """Divide a model over `ways` devices. Raises ConfigError: a dimension does not divide."""
        if ways == 1:
            return cls()
        divided = {"num_attention_heads": config.num_heads}
        if config.experts is None or config.experts.dense_layers:
            divided["intermediate_size"] = config.intermediate_size
        if config.experts is not None and config.experts.shared:
            divided["inner features of the expert that all tokens share"] = config.experts.shared
        if exact:
            divided["hidden_size"] = config.hidden_size
        for name, size in divided.items():
            if size % ways:
                raise ConfigError(f"tp must divide the target's {name} ({size}), got {ways}")
        kv_heads = config.num_kv_heads
        if kv_heads % ways and ways % kv_heads:
            raise ConfigError(
                f"tp must divide the target's num_key_value_heads ({kv_heads}) or be a multiple of it, got {ways}"
            )
        copies = max(1, ways // kv_heads) if exact else 1
        by_expert = config.experts is not None and _divides_by_expert(config.experts, config.hidden_size, ways, exact)
        return cls(ways, exact, config.vocab_size % ways == 0, copies, by_expert)

    def whole(self, config: ModelConfig) -> ModelConfig:
        """Return the model as all devices together hold it: at least one key-value head each."""
        return replace(config, num_kv_heads=max(config.num_kv_heads, self.ways))

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the model as one device computes it; the vocabulary stays whole in its results."""
        whole = self.whole(config)
        return replace(
            config,
            num_heads=whole.num_heads // self.ways,
            num_kv_heads=whole.num_kv_heads // self.ways,
            intermediate_size=whole.intermediate_size // self.ways,
        )

    def split_axis(self, logical_axes: tuple[str, ...]) -> int | None:
        """Return the axis of a weight that is divided; None: every device holds all of it."""
        if self.ways == 1:
            return None
        divided = {"qkv", "all_queries", "all_keys", "sinks", "gate_up", "expert_gate_up"} | (
            {"residual"} if self.exact else {"heads", "mlp"}
        )
        divided |= {"expert_down"} if self.exact or self.by_expert else {"expert_mlp"}
        divided |= {"vocab"} if self.splits_vocab else set()
        return next((axis for axis, name in enumerate(logical_axes) if name in divided), None)

    def rows_of(self, logical_axis: str, size: int, config: ModelConfig, shard: int) -> Rows:
        """Return the rows that device `shard` holds of a (fused) weight of `size` rows, in the device's order."""
        if logical_axis == "qkv":
            q_rows = config.q_size // self.ways
            kv_rows = max(config.kv_size // self.ways, config.head_dim)
            first = shard * config.num_kv_heads // self.ways * config.head_dim
            starts = (shard * q_rows, config.q_size + first, config.q_size + config.kv_size + first)
            return tuple((start, start + rows) for start, rows in zip(starts, (q_rows, kv_rows, kv_rows), strict=True))
        if logical_axis == "all_keys":
            rows = max(config.kv_size // self.ways, config.head_dim)
            first = shard * config.num_kv_heads // self.ways * config.head_dim
            return ((first, first + rows),)
        if logical_axis == "gate_up":
            inner = size // 2  # of an MLP, or of the one that all tokens share beside their experts
            rows = inner // self.ways
            return tuple((start + shard * rows, start + (shard + 1) * rows) for start in (0, inner))
        if logical_axis.startswith("expert_") and not self.by_expert:
            assert config.experts is not None
            parts = config.experts.count * (2 if logical_axis == "expert_gate_up" else 1)
            part, rows = size // parts, size // parts // self.ways
            starts = (first + shard * rows for first in range(0, size, part))
            return tuple((start, start + rows) for start in starts)
        rows = size // self.ways
        return ((shard * rows, (shard + 1) * rows),)

    def to_stream(self, linear: Linear, x: jax.Array, adapters: TokenAdapters | None = None) -> jax.Array:
        """Apply a product whose inputs are divided, x: f[features / ways, T]. Returns f32[d, T], whole everywhere."""
        if self.ways == 1:
            return linear(x, adapters)
        if self.exact:
            return _gather(linear(_gather(x, axis=0), adapters), axis=0)
        return linear.biased(jax.lax.psum(linear.product(x, adapters), AXIS))

    def joint_mean_square(self, x: jax.Array, *, of_keys: bool) -> jax.Array:
        """Return the mean of the squares of all heads' features, f32[1, T], from this device's, f32[heads * D, T].

        of_keys: of key heads, which several devices may hold.
        """
        if self.exact and self.ways > 1:
            x = _gather(x, axis=0).reshape(self.ways, *x.shape)[:: self.query_copies if of_keys else 1]
            x = x.reshape(-1, x.shape[-1])
        mean = jnp.mean(x * x, axis=0, keepdims=True)
        return mean if self.exact or self.ways == 1 else jax.lax.pmean(mean, AXIS)

    def experts_held(self, count: int) -> int:
        """Return how many of a layer's experts one device holds, whole or in part."""
        return count // self.ways if self.by_expert else count

    def first_expert(self, count: int) -> jax.Array | int:
        """Return the first expert that this device holds."""
        return jax.lax.axis_index(AXIS) * self.experts_held(count) if self.by_expert else 0

    def once(self, bias: jax.Array) -> jax.Array:
        """Return a bias of experts' results on one device and 0 on the others, where the devices' sums are added."""
        if self.ways == 1 or self.exact or self.by_expert:
            return bias
        return jnp.where(jax.lax.axis_index(AXIS) == 0, bias, 0)

    def gather_neurons(self, x: jax.Array) -> jax.Array:
        """Gather the inner features of experts, f[inner / ways, P], where `exact` needs all of them for a sum."""
        return _gather(x, axis=0) if self.exact and not self.by_expert else x

    def gather_experts(self, found: jax.Array) -> jax.Array:
        """Gather what each expert of a token found, f32[d, per_token, T], where `exact` adds them in their order. All
        but one device add 0."""
        return jax.lax.psum(found, AXIS) if self.exact and self.by_expert else found

    def join_experts(self, x: jax.Array) -> jax.Array:
        """Make the sum over a token's experts whole everywhere, f32[d, T]."""
        if self.ways == 1 or (self.exact and self.by_expert):
            return x
        return _gather(x, axis=0) if self.exact else jax.lax.psum(x, AXIS)

    def with_copies(self, q: jax.Array, kv_heads: int) -> jax.Array:
        """Repeat the queries of each key-value head, f[H, D, T], or its sinks, f[H], `query_copies` times."""
        grouped = q.reshape(kv_heads, -1, *q.shape[1:])
        return jnp.tile(grouped, (1, self.query_copies, *[1] * (q.ndim - 1))).reshape(-1, *q.shape[1:])

    def without_copies(self, mixed: jax.Array, kv_heads: int) -> jax.Array:
        """Undo `with_copies` on the result of attention."""
        grouped = mixed.reshape(kv_heads, self.query_copies, -1, *mixed.shape[1:])
        return grouped[:, 0].reshape(-1, *mixed.shape[1:])

    def look_up(self, embedding: Linear, tokens: jax.Array) -> jax.Array:
        """Look up tokens i32[T] in an embedding [V / ways, d]: f32[T, d]. Exact, since all but one device add 0."""
        if not self.splits_vocab:
            return embedding.rows(tokens)
        rows = embedding.weight.shape[0]
        own = tokens - jax.lax.axis_index(AXIS) * rows
        inside = (own >= 0) & (own < rows)
        found = jnp.where(inside[:, None], embedding.rows(jnp.clip(own, 0, rows - 1)), 0)
        return jax.lax.psum(found, AXIS)

    def join_vocabulary(self, scores: jax.Array) -> jax.Array:
        """Gather every device's scores f32[V / ways, S]: f32[V, S]."""
        return _gather(scores, axis=0) if self.splits_vocab else scores


def _divides_by_expert(experts: ExpertConfig, hidden_size: int, ways: int, exact: bool) -> bool:
    """Return True to divide by expert, False by neuron. Raises ConfigError: neither divides."""
    by_neuron, by_expert = experts.intermediate_size % ways == 0, experts.count % ways == 0
    if not (by_neuron or by_expert):
        raise ConfigError(
            f"tp must divide the number of the target's experts ({experts.count}) or their inner features "
            f"({experts.intermediate_size}), got {ways}"
        )
    if not (by_neuron and by_expert):
        return by_expert
    # Numbers exchanged for a token: the inner features and the result are gathered, or each expert's result is summed,
    # which sends it out and back. Where sums may be split, both ways sum the result alone.
    gathered, summed = experts.per_token * experts.intermediate_size + hidden_size, 2 * experts.per_token * hidden_size
    return exact and summed < gathered


WHOLE = Partition()
"""One device."""


def _gather(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)
