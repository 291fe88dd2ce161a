"""Placement of a model: one device, or a mesh over which its weights, pages and programs are divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from adaserve_jax.models.partition import AXIS, WHOLE, Partition

EVERYWHERE = PartitionSpec()
"""Whole on every device."""


@dataclass(frozen=True)
class Placement:
    """Devices of a model and its partition over them. mesh: None for one device."""

    devices: tuple[Any, ...]
    partition: Partition = WHOLE
    mesh: Mesh | None = None

    @classmethod
    def on_one(cls) -> Placement:
        """Place the whole model on the first device of this process."""
        return cls((jax.local_devices()[0],))

    @classmethod
    def over(cls, devices: tuple[Any, ...], partition: Partition) -> Placement:
        """Place one shard on each device; a single device needs no mesh."""
        if partition.ways == 1:
            return cls(devices[:1])
        return cls(devices, partition, Mesh(np.array(devices), (AXIS,)))

    @property
    def blocks(self) -> bool:
        """True where a program must end before the next may start: CPU devices of one process share their threads, and
        two programs that wait for each other's exchanges deadlock."""
        return self.mesh is not None and self.devices[0].platform == "cpu"

    def spec(self, split_axis: int | None) -> PartitionSpec:
        """Return the spec of an array that is divided along one axis."""
        return EVERYWHERE if split_axis is None else PartitionSpec(*[None] * split_axis, AXIS)

    def sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.devices[0]) if self.mesh is None else NamedSharding(self.mesh, spec)

    def abstract(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> jax.ShapeDtypeStruct:
        """Return the shape of a global array, to compile for."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(spec))

    def spmd(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Wrap a function that every device runs on its shards; on one device, return it as it is.

        Results that out_specs calls whole are not checked to be: the partition's exchanges make them so.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.Array:
        """Make a global array of zeros; every process makes its own shards."""
        return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=self.sharding(spec))()
