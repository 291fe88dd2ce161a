"""A loaded model on the device: weights, pools, and its compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params
from adaserve_jax.runtime.buckets import BucketSet
from adaserve_jax.runtime.compiling import Declared
from adaserve_jax.runtime.packing import PackedStep, step_layout
from adaserve_jax.runtime.programs import InFlight, ModelPrograms, commit, new_pools

Role = Literal["target", "draft"]


class DeviceModel:
    """Owns one model's weights and KV pools. Not thread-safe: one step at a time."""

    def __init__(
        self, role: Role, config: ModelConfig, params: Params, programs: ModelPrograms, buckets: BucketSet,
        *, num_pages: int, page_size: int, dtype: jnp.dtype,
    ) -> None:  # fmt: skip
        self.role = role
        self.config = config
        self.params = params
        self.programs = programs
        self.buckets = buckets
        self.pools = new_pools(config, num_pages, page_size, dtype)
        self.compiled: dict[tuple[Any, ...], Callable] = {}

    def declare_forward(self, function: Callable) -> list[Declared]:
        """The packed forward `function(params, pools, packed, bucket=...)` for every bucket, and its commits."""
        declared, in_flight_by_tokens = [], {}
        for bucket in self.buckets.all():
            jitted = jax.jit(function, static_argnames="bucket")
            packed = jax.ShapeDtypeStruct((step_layout(bucket, self.programs.max_pages).size,), jnp.int32)
            arguments = (self.params, self.pools, packed)
            declared.append(Declared((self.role, bucket), _Bound(jitted, bucket), arguments))
            in_flight_by_tokens[bucket.tokens] = self._abstract_in_flight(bucket.tokens)
        committing = jax.jit(commit, donate_argnums=0)
        for tokens, in_flight in in_flight_by_tokens.items():
            declared.append(Declared((self.role, "commit", tokens), committing, (self.pools, in_flight)))
        return declared

    def run(self, step: PackedStep) -> Any:
        """Run the packed forward, then commit what it keeps; returns the program's own result, on the device."""
        result, in_flight = self.compiled[self.role, step.bucket](self.params, self.pools, step.packed)
        self.pools = self.compiled[self.role, "commit", step.bucket.tokens](self.pools, in_flight)
        return result

    def _abstract_in_flight(self, tokens: int) -> InFlight:
        shape = (self.config.num_layers, tokens, self.config.num_kv_heads, self.config.head_dim)
        new: Any = jax.ShapeDtypeStruct(shape, self.pools.k.dtype)
        index: Any = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        return InFlight(new, new, index, index)

    def close(self) -> None:
        for leaf in jax.tree.leaves((self.params, self.pools)):
            leaf.delete()
        self.compiled.clear()


class _Bound:
    """A jitted function with its bucket filled in, so that it lowers like any other."""

    def __init__(self, jitted: Any, bucket: Any):
        self._jitted, self._bucket = jitted, bucket

    def lower(self, *arguments: Any) -> Any:
        return self._jitted.lower(*arguments, bucket=self._bucket)
