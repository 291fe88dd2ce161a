"""What kernels need to know of jax: Pallas, whose names move between releases, and the platform to compile for.

`plgpu` and `pltpu` import on every platform; nothing here needs a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

__all__ = ["compiling_for", "gpu_interpret", "gpu_load", "pl", "platform", "plgpu", "pltpu", "tpu_interpret"]

_chosen: ContextVar[str | None] = ContextVar("platform", default=None)


def platform() -> str:
    """Return the platform that programs are traced for: jax's own, or that of `compiling_for`."""
    return _chosen.get() or jax.default_backend()


@contextmanager
def compiling_for(chosen: str) -> Iterator[None]:
    """Trace for another platform, cpu, gpu or tpu, than jax's own inside the block, in this thread."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


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
