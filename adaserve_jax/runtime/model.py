"""A loaded model on the device: weights, KV pools and compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from adaserve_jax.errors import IntegrityError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, adapter_specs, kind_of, param_specs
from adaserve_jax.models.placement import EVERYWHERE, Placement
from adaserve_jax.runtime.compile import BucketSet, Declared
from adaserve_jax.runtime.pools import IN_FLIGHT_HEADS, POOL_HEADS, InFlight, Pools, commit, new_pools
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.step_layout import PackedStep

Role = Literal["target", "draft"]
AfterForward = Callable[[Any, InFlight], tuple[Any, InFlight]]
"""Replaces the result and the in-flight K/V of a forward before they are committed."""


class DeviceModel:
    """Owns one model's weights, KV pools and compiled programs. Not thread-safe: one step at a time."""

    def __init__(
        self, role: Role, config: ModelConfig, params: Params, programs: ModelPrograms, buckets: BucketSet,
        *, num_pages: int, page_size: int, dtype: jnp.dtype, placement: Placement | None = None,
        send_step: Callable[[PackedStep], None] | None = None, further: Sequence[Params] = (),
        shared: Params | None = None,
    ) -> None:  # fmt: skip
        """Take weights, as `load_params` places them, and allocate the KV pools.

        role: first part of every program's key. config: of the whole model. programs: of one device's part. buckets:
        what the forward is compiled for. dtype: of the KV. placement: None for the first device of this process.
        send_step: called with every step before it runs, where other processes must run it too. further: weights of
        the same shapes; a step runs with any of them in the same programs and pages. shared: weights of another model
        that this one uses too; they are never freed here.
        """
        self.role = role
        self.config = config
        self.weights: list[Params] = [params, *further]
        """Weights that the model owns, by index."""
        self._shared = shared or {}
        self._like = {name: (w.shape, w.dtype, _devices(w)) for name, w in self.params.items()}
        self.programs = programs
        self.buckets = buckets
        self.placement = placement or Placement.on_one()
        self.whole = programs.partition.whole(config)
        self.pools = new_pools(
            self.whole, num_pages, page_size, dtype, self.placement, feature_layers=len(programs.feature_layers)
        )
        self.compiled: dict[tuple[Any, ...], Callable] = {}
        self._send_step = send_step

    @property
    def params(self) -> Params:
        """Weights 0; programs are compiled for their shapes."""
        return self.params_of(0)

    def params_of(self, index: int) -> Params:
        """Return the weights of this index, with those that are shared."""
        return self.weights[index] | self._shared if self._shared else self.weights[index]

    def owned(self, params: Params) -> Params:
        """Return weights without those that are shared, which stay as they are: copies of these are freed."""
        if not self._shared:
            return params
        free([params[name] for name, kept in self._shared.items() if params[name] is not kept])
        return {name: weight for name, weight in params.items() if name not in self._shared}

    def check_weights(self, params: Params, what: str) -> None:
        """Raise IntegrityError unless the programs can run with `params`. what: whose weights, for the message."""
        if params.keys() != self._like.keys():
            other = sorted(params.keys() ^ self._like.keys())[0]
            raise IntegrityError(
                f"{what} must have the {len(self._like)} weights that it was loaded with, got {len(params)}, "
                f"{'without' if other in self._like else 'with'} {other!r}"
            )
        for name, expected in self._like.items():
            weight = params[name]
            got = (weight.shape, weight.dtype, _devices(weight) if isinstance(weight, jax.Array) else "the host")
            if got != expected:
                raise IntegrityError(f"{what}: {name!r} must be {_describe(*expected)}, got {_describe(*got)}")
            if isinstance(weight, jax.Array) and weight.is_deleted():
                raise IntegrityError(f"{what}: {name!r} must be an array that is still there, got a deleted one")

    def declare_forward(
        self, function: Callable, extension_pages: int = 0, further: tuple[Any, ...] = ()
    ) -> list[Declared]:
        """Declare the forward `function(params, pools, packed, *further, bucket=...)` for every bucket, and commits.

        Its own result must be whole on every device. extension_pages: if positive, declare all again for pools extended
        by so many pages (one device only). further: arguments that the model does not own (one device only).
        """
        layouts = [self.pools]
        if extension_pages:
            layouts.append(self.pools._replace(extension=self.abstract_extension(extension_pages)))
        return [program for pools in layouts for program in self._declare(function, pools, further)]

    def _declare(self, function: Callable, pools: Pools, further: tuple[Any, ...]) -> list[Declared]:
        place = self.placement
        inputs, in_flight_specs = self._specs()
        declared, in_flight_by_tokens = [], {}
        for bucket in self.buckets.all():
            program = place.spmd(partial(function, bucket=bucket), inputs, (EVERYWHERE, in_flight_specs))
            packed = place.abstract((self.programs.layout(bucket).size,), jnp.int32)
            arguments = (self.params, pools, packed, *further)
            declared.append(Declared(self._key(pools, bucket), jax.jit(program), arguments))
            in_flight_by_tokens[bucket.tokens] = self._abstract_in_flight(bucket.tokens, in_flight_specs)
        pool_specs = inputs[1]
        committing = jax.jit(place.spmd(commit, (pool_specs, in_flight_specs), pool_specs), donate_argnums=0)
        for tokens, in_flight in in_flight_by_tokens.items():
            declared.append(Declared(self._key(pools, "commit", tokens), committing, (pools, in_flight)))
        return declared

    def abstract_extension(self, num_pages: int) -> Pools:
        """Return the shapes of an extension of `num_pages` pages, to compile for."""
        pool: Any = jax.tree.map(
            lambda pool: self.placement.abstract((pool.shape[0], num_pages, *pool.shape[2:]), pool.dtype), self.pools
        )
        return pool

    def _key(self, pools: Pools, *program: Any) -> tuple[Any, ...]:
        """Return the key of a program for pools of this layout."""
        return (self.role, *program) if pools.extension is None else (self.role, *program, "extended")

    def run(
        self, step: PackedStep, after_forward: AfterForward | None = None, *, weights: int = 0,
        further: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """Run the packed forward with weights of this index, commit its K/V to the pools, and return its result, on the
        device. after_forward: replaces result and in-flight K/V before the commit. further: as declared."""
        if self._send_step is not None:
            self._send_step(step)
        pools = self.pools
        forward = self.compiled[self._key(pools, step.bucket)]
        result, in_flight = forward(self.params_of(weights), pools, step.packed, *further)
        if after_forward is not None:
            result, in_flight = after_forward(result, in_flight)
        self.pools = self.compiled[self._key(pools, "commit", step.bucket.tokens)](pools, in_flight)
        if self.placement.blocks:
            jax.block_until_ready((result, self.pools))
        return result

    def _specs(self) -> tuple[Any, Any]:
        """Return the partition specs of (params, pools, packed) and of the in-flight K/V."""
        place, split = self.placement, self.programs.partition.split_axis
        axes_of = {name: axes for name, (_, axes) in param_specs(self.whole, kind_of(self.params)).items()}
        axes_of |= {name: axes for name, (_, axes) in adapter_specs(self.whole, 1, 1).items()}
        params = {name: place.spec(split(axes_of[name])) for name in self.params}
        pool: Any = place.spec(POOL_HEADS)
        heads: Any = place.spec(IN_FLIGHT_HEADS)
        whole: Any = EVERYWHERE
        features = whole if self.programs.feature_layers else None
        pools, in_flight = Pools(pool, pool, features=features), InFlight(heads, heads, whole, whole, features)
        return (params, pools, whole), in_flight

    def _abstract_in_flight(self, tokens: int, specs: Any) -> InFlight:
        shape = (self.config.num_layers, tokens, self.whole.num_kv_heads, self.config.head_dim)
        new: Any = self.placement.abstract(shape, self.pools.k.dtype, specs.k)
        index: Any = self.placement.abstract((tokens,), jnp.int32)
        features: Any = None
        if layers := self.programs.feature_layers:
            features = self.placement.abstract((len(layers), tokens, 1, self.whole.hidden_size), self.pools.k.dtype)
        return InFlight(new, new, index, index, features)

    def free(self) -> None:
        """Delete its own weights and pools on the device. The model cannot run until both are set again."""
        free((self.weights, self.pools))

    def close(self) -> None:
        self.free()
        self.compiled.clear()


def free(arrays: Any) -> None:
    """Delete all device arrays of a pytree; deleted ones are skipped."""
    for leaf in jax.tree.leaves(arrays):
        leaf.delete()


def _devices(weight: Any) -> Any:
    """Return the devices of an array, or of a shape to compile for."""
    return weight.sharding.device_set


def _describe(shape: tuple[int, ...], dtype: Any, devices: Any) -> str:
    where = devices if isinstance(devices, str) else ", ".join(sorted(map(str, devices)))
    return f"{jnp.dtype(dtype).name}{list(shape)} on {where}"
