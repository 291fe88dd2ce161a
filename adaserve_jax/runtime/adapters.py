"""Room for LoRA adapters among a target's weights: arrays of a fixed shape, of which a load replaces one entry.

The arrays are arguments of the programs, as weights are, so that loading and unloading compile nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.errors import RequestError
from adaserve_jax.models.decoder import Params, adapter_specs
from adaserve_jax.models.lora import Matrices, read_adapter
from adaserve_jax.models.placement import EVERYWHERE, Placement
from adaserve_jax.runtime.compile import Declared
from adaserve_jax.runtime.model import DeviceModel

KEY = ("target", "adapter")
"""Key of the program that replaces an adapter."""


def empty_adapters(config: Any, count: int, rank: int, dtype: Any, placement: Placement) -> Params:
    """Return arrays of zeros for `count` adapters, divided as the weights that they belong to. config: whole model."""
    specs = adapter_specs(placement.partition.whole(config), count, rank)
    split = placement.partition.split_axis
    return {name: placement.zeros(shape, dtype, placement.spec(split(axes))) for name, (shape, axes) in specs.items()}


class AdapterBank:
    """Slots 1 to `count` of a target, whose weights are those of `empty_adapters` too. Slot 0 is the model alone."""

    def __init__(self, target: DeviceModel, count: int, rank: int) -> None:
        """Take a loaded target with room for `count` adapters of at most `rank`."""
        self._target = target
        self.count = count
        self.rank = rank
        self._specs = adapter_specs(target.whole, count, rank)

    def declare(self) -> list[Declared]:
        """Declare the program that replaces one adapter by another, in place."""
        place, split = self._target.placement, self._target.programs.partition.split_axis
        bank = {name: self._target.params[name] for name in self._specs}
        of_bank = {name: place.spec(split(axes)) for name, (_, axes) in self._specs.items()}
        of_one = {name: self._spec_of_one(name) for name in self._specs}
        one = {
            name: place.abstract(shape[1:], bank[name].dtype, of_one[name]) for name, (shape, _) in self._specs.items()
        }
        program = jax.jit(place.spmd(replace_one, (of_bank, of_one, EVERYWHERE), of_bank), donate_argnums=0)
        return [Declared(KEY, program, (bank, one, place.abstract((), jnp.int32)))]

    def read(self, folder: str | Path) -> Matrices:
        """Read an adapter's folder; safe in any thread. Raises CheckpointError."""
        return read_adapter(folder, self._target.config, self.rank)

    def put(self, slot: int, matrices: Matrices) -> None:
        """Replace what a slot, from 1 to `count`, holds. Call it between steps, when no sequence uses the slot.

        Raises RequestError, and changes nothing, if the device has no room for the matrices; RuntimeError: the adapters
        that were loaded are lost, and the engine must end.
        """
        assert 1 <= slot <= self.count
        place, weights = self._target.placement, self._target.weights[0]
        bank = {name: weights[name] for name in self._specs}
        try:
            one = {
                name: jax.device_put(
                    self._in_device_order(name, matrix).astype(self._target.params[name].dtype),
                    place.sharding(self._spec_of_one(name)),
                )
                for name, matrix in matrices.items()
            }
            replaced = self._target.compiled[KEY](bank, one, np.int32(slot - 1))
        except (RuntimeError, MemoryError) as error:
            if any(array.is_deleted() for array in bank.values()):
                raise
            raise RequestError(f"the device has no room for the adapter: {error}", param="lora_name") from error
        weights |= replaced

    def _spec_of_one(self, name: str) -> Any:
        """Return the partition spec of one adapter's matrix."""
        axis = self._target.programs.partition.split_axis(self._specs[name][1])
        return self._target.placement.spec(None if axis is None else axis - 1)

    def _in_device_order(self, name: str, matrix: np.ndarray) -> np.ndarray:
        """Order the rows of a B that is divided as those of its weight are."""
        partition, axes = self._target.programs.partition, self._specs[name][1]
        if partition.split_axis(axes) != 1:
            return matrix
        config = self._target.config
        parts = [partition.rows_of(axes[1], len(matrix), config, shard) for shard in range(partition.ways)]
        return np.concatenate([matrix[start:stop] for rows in parts for start, stop in rows])


def replace_one(bank: Params, one: Params, index: jax.Array) -> Params:
    """Return the arrays [N, ...] with entry `index` replaced by the arrays of one adapter."""
    return {name: lax.dynamic_update_index_in_dim(bank[name], new, index, 0) for name, new in one.items()}
