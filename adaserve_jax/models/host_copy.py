"""Weights kept in host memory, so that their device's memory can be lent out and filled again.

Knows neither who lends it nor what for.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import aligned_buffer


class HostCopy:
    """A copy of weights that lie on one device; it stays what it is, whatever becomes of them.

    In pinned memory, from which a GPU or TPU reads at full speed. On a CPU in plain memory of its own: a device array
    made of host memory may share it there, and would not free it.
    """

    def __init__(self, params: Params):
        (self._device,) = next(iter(params.values())).devices()
        self._pinned = has_own_memory(self._device)
        self._held = {name: self._to_host(weight) for name, weight in params.items()}

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    def load(self) -> Params:
        """New device arrays. On a CPU they are there; elsewhere the copies may still be under way."""
        return {name: self._to_device(held) for name, held in self._held.items()}

    def _to_host(self, weight: jax.Array) -> np.ndarray | jax.Array:
        if not self._pinned:
            return np.array(weight)
        return jax.device_put(weight, SingleDeviceSharding(self._device, memory_kind="pinned_host"))

    def _to_device(self, held: np.ndarray | jax.Array) -> jax.Array:
        if isinstance(held, jax.Array):
            return jax.device_put(held, SingleDeviceSharding(self._device))
        buffer = aligned_buffer(held.shape, held.dtype)
        np.copyto(buffer, held)
        return jax.device_put(buffer, self._device)


def has_own_memory(device: jax.Device) -> bool:
    """Whether a device's memory is another than the host's."""
    return device.platform != "cpu"
