"""Imports of Pallas, whose names move between releases of jax. Kernels import it from here only.

`plgpu` and `pltpu` import on every platform; nothing here needs a device.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

__all__ = ["gpu_interpret", "gpu_load", "pl", "plgpu", "pltpu", "tpu_interpret"]


def tpu_interpret(detect_races: bool = False) -> Any:
    """Build the `interpret` that runs a TPU kernel on a CPU, with its memories, copies and semaphores simulated."""
    return pltpu.InterpretParams(detect_races=detect_races)


def gpu_interpret() -> Any:
    """Build the `interpret` that runs a Mosaic GPU kernel on a CPU, with shared memory and barriers simulated."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # not public in jax 0.10

    return InterpretGPUParams()


def gpu_load(ref: Any, layout: Any) -> jax.Array:
    """Load all of a reference into registers of that layout, by the widest loads that it allows."""
    whole = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *whole, layout=layout, optimized=False)
