"""The ledger of an engine that is not there: programs are compiled for shapes, no weight is read and no page made.

So it says of a model that does not fit what it would take.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import Workspace
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.placement import Placement
from adaserve_jax.runtime.compiling import compile_all, use_compile_cache
from adaserve_jax.runtime.footprint import weight_dtype, workspace_of
from adaserve_jax.runtime.pair import find_chances, find_pair
from adaserve_jax.runtime.parts import capture_of, declare_all, load_drafter, load_target
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.resolve import Resolved, resolve
from adaserve_jax.types import Progress


class Unfilled(Placement):
    """A placement whose arrays are shapes, to compile for."""

    @classmethod
    def like(cls, placement: Placement) -> Unfilled:
        return cls(**{each.name: getattr(placement, each.name) for each in fields(Placement)})

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        return self.abstract(shape, dtype, spec)


def plan_memory(
    config: EngineConfig, progress: Progress | None = None, *, swaps: bool = False, training_bytes: int = 0
) -> tuple[Resolved, Workspace]:
    """The engine that `config` describes, resolved, and what its compiled programs take; whether it fits or not. swaps,
    training_bytes: as for `load_executor`.

    Raises CheckpointError, ConfigError: as loading it would, but for memory.
    """
    if config.num_processes > 1:
        raise ConfigError(
            f"memory is planned for one process, got num_processes {config.num_processes}; leave it out, since each of "
            "several checks its own memory as it starts"
        )
    use_compile_cache(config.compile_cache)
    pair = find_pair(config)
    resolved = resolve(config, pair.target, pair.draft, swaps=swaps, training_bytes=training_bytes)
    unfilled = replace(resolved, placement=Unfilled.like(resolved.placement))
    target = load_target(pair, unfilled, progress, read=_shapes)
    resampler = Resampler(target, resolved.limits)
    on_one = Unfilled.like(Placement.on_one())
    drafter = load_drafter(pair, unfilled, find_chances(config, pair), progress, _shapes, on_one)
    declared = declare_all(target, resolved.limits, resampler, capture_of(resolved, target), drafter)
    return resolved, workspace_of(compile_all(declared, progress), resampler.blank_bytes)


def _shapes(
    folder: Path, config: ModelConfig, dtype: jnp.dtype, progress: Progress | None, placement: Placement,
    *, quantize: str = "none",
) -> dict[str, Any]:  # fmt: skip
    """What `load_params` would give, as jax.ShapeDtypeStruct."""
    partition = placement.partition
    specs = param_specs(partition.whole(config), quantize)
    return {
        name: placement.abstract(shape, weight_dtype(name, specs, dtype), placement.spec(partition.split_axis(axes)))
        for name, (shape, axes) in specs.items()
    }
