"""What an executor is made of: the models on their devices, what runs beside them, and the programs of them all.

Compiles nothing and times nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from adaserve_jax.config import DEFAULT_DRAFT, EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.memory.ledger import Workspace
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import Params, param_specs
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.results.profile import Identity
from adaserve_jax.results.provenance import machine_name, model_hash
from adaserve_jax.runtime.capture import Capture
from adaserve_jax.runtime.compile import Declared, compile_all, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import declare_expansion
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.sizing import Resolved, resolve, weight_dtype, workspace_of
from adaserve_jax.runtime.step_layout import PackedStep
from adaserve_jax.tree.acceptance_table import ChanceTable, read_chances
from adaserve_jax.tree.beam import AcceptanceTable
from adaserve_jax.types import Limits, Progress

# The checkpoints of an engine before their weights are read: where they lie, and whether they belong together.

CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Pair:
    """The checkpoints of an engine, before their weights are read. further_drafts: folders by name, of the shape of
    `draft`."""

    target_folder: Path
    target: ModelConfig
    draft_folder: Path | None
    draft: ModelConfig | None
    further_drafts: dict[str, Path] = field(default_factory=dict)

    @property
    def draft_names(self) -> tuple[str, ...]:
        return () if self.draft is None else (DEFAULT_DRAFT, *self.further_drafts)

    @property
    def draft_folders(self) -> tuple[Path, ...]:
        return () if self.draft_folder is None else (self.draft_folder, *self.further_drafts.values())


def find_pair(config: EngineConfig) -> Pair:
    """Read the configurations, and hold them and the vocabularies against each other. Raises CheckpointError;
    ConfigError: a further draft is of another shape than the first."""
    target_folder = resolve_folder(config.target, "target")
    target = ModelConfig.from_folder(target_folder)
    tokenizer = Tokenizer.from_folder(target_folder)
    if tokenizer.vocab_size > target.vocab_size:
        raise CheckpointError(
            f"{target_folder}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{target.vocab_size}; use the tokenizer that belongs to the model"
        )
    if config.draft is None:
        return Pair(target_folder, target, None, None)
    draft_folder = resolve_folder(config.draft, "draft")
    draft = ModelConfig.from_folder(draft_folder)
    check_same_vocabulary(tokenizer, Tokenizer.from_folder(draft_folder))
    further: dict[str, Path] = {}
    _, *named = config.draft_folders.items()
    for name, path in named:
        further[name] = folder = resolve_folder(path, "draft")
        _check_same_shape(name, ModelConfig.from_folder(folder), draft)
        check_same_vocabulary(tokenizer, Tokenizer.from_folder(folder))
    return Pair(target_folder, target, draft_folder, draft, further)


def _check_same_shape(name: str, other: ModelConfig, first: ModelConfig) -> None:
    """All drafts run in the same programs and pages."""
    for each in fields(ModelConfig):
        expected, got = getattr(first, each.name), getattr(other, each.name)
        if got != expected:
            raise ConfigError(
                f"draft {name!r} must be of the shape of the first draft, whose {each.name} is {expected!r}, got "
                f"{got!r}; give drafts of one architecture and size"
            )


def find_chances(config: EngineConfig, pair: Pair) -> ChanceTable | None:
    """What was learned before, or else the pair's own table, or the embedded pair's, which is a fair start for any
    pair, and for a draft service's; None where nothing drafts. Raises CheckpointError: the file is not a table.
    ConfigError: it could not be written."""
    if not config.speculates:
        if config.calibration is not None:
            raise ConfigError("calibration is about a draft, but there is none; load a draft, or leave it out")
        return None
    if config.calibration is not None:
        learned = Path(config.calibration)
        if config.calibrate and not os.access(learned.absolute().parent, os.W_OK):
            raise ConfigError(f"calibration: cannot write into {learned.absolute().parent}; choose another file")
        if learned.exists():
            return read_chances(learned)
    own = None if pair.draft_folder is None else pair.draft_folder / CALIBRATION_FILE
    if own is not None and own.exists():
        return read_chances(own)
    return read_chances(resolve_folder("demo", "draft").parent / CALIBRATION_FILE)


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
    """Every program of an engine with these parts, those of elastic too where its pools can be extended."""
    declared = declare_target(target, limits)
    for part in (resampler, capture, drafter):
        if part is not None:
            declared += part.declare()
    if drafter is not None and limits.extension_pages:
        declared += declare_expansion(target, drafter.model, limits.extension_pages)
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


# The ledger of an engine that is not there: programs are compiled for shapes, no weight is read and no page
# made.
#
# So it says of a model that does not fit what it would take.


class Unfilled(Placement):
    """A placement whose arrays are shapes, to compile for."""

    @classmethod
    def like(cls, placement: Placement) -> Unfilled:
        return cls(**{each.name: getattr(placement, each.name) for each in fields(Placement)})

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        return self.abstract(shape, dtype, spec)


def plan_memory(
    config: EngineConfig, progress: Progress | None = None, *, elastic: bool = False, training_bytes: int = 0
) -> tuple[Resolved, Workspace]:
    """The engine that `config` describes, resolved, and what its compiled programs take; whether it fits or not.
    elastic, training_bytes: as for `load_executor`.

    Raises CheckpointError, ConfigError: as loading it would, but for memory.
    """
    if config.num_processes > 1:
        raise ConfigError(
            f"memory is planned for one process, got num_processes {config.num_processes}; leave it out, since each of "
            "several checks its own memory as it starts"
        )
    use_compile_cache(config.compile_cache)
    pair = find_pair(config)
    resolved = resolve(config, pair.target, pair.draft, elastic=elastic, training_bytes=training_bytes)
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


# What this engine's times hold for: the machine, the device, the models and the settings that decide its
# programs.

SETTINGS = ("dtype", "quantize", "deterministic", "tp", "num_processes")


def identify(resolved: Resolved, target_folder: Path, draft_folder: Path | None) -> Identity:
    """Of a resolved engine and the folders of its models."""
    config = resolved.config
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {
        "attention": resolved.attention,
        "row_edges": list(resolved.verify_buckets.row_edges),
        "search_widths": list(resolved.search_widths),
    }
    return Identity(
        machine=machine_name(),
        device=device_name(config.tp),
        target=model_hash(target_folder),
        draft=None if draft_folder is None else model_hash(draft_folder),
        limits=resolved.limits,
        settings=settings,
    )


def device_name(tp: int) -> str:
    """Platform and kind of the first device, and how many hold the target."""
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}{f', {tp} devices' if tp > 1 else ''}"
