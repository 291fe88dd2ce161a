"""What an executor is made of: the models on their devices, what runs beside them, and the programs of them all.

Compiles nothing and times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.placement import Placement
from adaserve_jax.runtime.capture import Capture
from adaserve_jax.runtime.compiling import Declared
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import declare_swaps
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.packing import PackedStep
from adaserve_jax.runtime.pair import Pair
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.resolve import Resolved
from adaserve_jax.tree.acceptance import AcceptanceTable
from adaserve_jax.tree.chances import ChanceTable
from adaserve_jax.types import Limits, Progress


def load_target(
    pair: Pair, resolved: Resolved, progress: Progress | None, announce: Callable[[PackedStep], None] | None = None,
    read: Callable[..., Params] = load_params,
) -> DeviceModel:  # fmt: skip
    """The target on its devices; in each of several processes, the part that lies on its own. read: called as
    `load_params` is."""
    partition, limits = resolved.placement.partition, resolved.limits
    programs = ModelPrograms(
        partition.local(pair.target), limits.max_pages_per_request, resolved.config.deterministic, partition,
        resolved.attention,
    )  # fmt: skip
    return DeviceModel(
        "target",
        pair.target,
        read(
            pair.target_folder,
            pair.target,
            resolved.dtype,
            progress,
            resolved.placement,
            quantize=resolved.config.quantize,
        ),
        programs,
        resolved.verify_buckets,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        dtype=resolved.dtype,
        placement=resolved.placement,
        announce=announce,
    )


def declare_target(target: DeviceModel, limits: Limits) -> list[Declared]:
    """The verify program for every bucket, and its commits; both for pools that are extended too, where they can be."""
    return target.declare_forward(partial(target.programs.verify, max_depth=limits.max_depth), limits.extension_pages)


def declare_all(
    target: DeviceModel, limits: Limits, resampler: Resampler | None, capture: Capture | None,
    drafter: LocalDrafter | None,
) -> list[Declared]:  # fmt: skip
    """Every program of an engine with these parts, those of swaps too where its pools can be extended."""
    declared = declare_target(target, limits)
    for part in (resampler, capture, drafter):
        if part is not None:
            declared += part.declare()
    if drafter is not None and limits.extension_pages:
        declared += declare_swaps(target, drafter.model, limits.extension_pages)
    return declared


def resampler_of(resolved: Resolved, target: DeviceModel) -> Resampler | None:
    """None with several processes: the others mirror the forward alone."""
    return Resampler(target, resolved.limits) if resolved.config.num_processes == 1 else None


def capture_of(resolved: Resolved, target: DeviceModel) -> Capture | None:
    """None without learning."""
    learning = resolved.config.learning
    return None if learning is None else Capture(target, learning)


def load_drafter(
    pair: Pair, resolved: Resolved, chances: ChanceTable | None, progress: Progress | None,
    read: Callable[..., Params] = load_params, placement: Placement | None = None,
) -> LocalDrafter | None:  # fmt: skip
    """The drafts on the first device, wherever the target lies: they are small, and exchanges would cost more than
    they save. read: called as `load_params` is; placement: None for that device."""
    if pair.draft is None or pair.draft_folder is None or chances is None:
        return None
    limits = resolved.limits
    first, *further = (read(folder, pair.draft, resolved.dtype, progress, placement) for folder in pair.draft_folders)
    model = DeviceModel(
        "draft",
        pair.draft,
        first,
        ModelPrograms(pair.draft, limits.max_pages_per_request, attention=resolved.attention),
        resolved.catchup_buckets,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        dtype=resolved.dtype,
        placement=placement,
        further=further,
    )
    return LocalDrafter(model, AcceptanceTable.of(chances), max_depth=limits.max_depth, widths=resolved.search_widths)
