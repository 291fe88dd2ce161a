"""Finds, checks and loads the models of an engine, and declares all of its programs.

In order: `find_pair` reads the checkpoints' configurations, `load_target` and `load_drafter` place the models on their
devices, `declare_all` lists what to compile. `plan_memory` does the same with shapes in place of arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.memory.ledger import Workspace
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.decoder import Params, param_specs
from adaserve_jax.models.loading import has_own_embedding, load_params, weight_dtype
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.models.vocabulary_map import VocabularyMap, map_vocabulary
from adaserve_jax.results.profile import Identity
from adaserve_jax.results.provenance import machine_name, model_hash
from adaserve_jax.runtime.adapters import AdapterBank, empty_adapters
from adaserve_jax.runtime.capture import LogitCapture
from adaserve_jax.runtime.compile import Declared, compile_all, use_compile_cache
from adaserve_jax.runtime.drafter import LocalDrafter
from adaserve_jax.runtime.elastic import declare_expansion
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.sizing import Resolved, resolve, shared_weights, workspace_of
from adaserve_jax.runtime.step_layout import PackedStep
from adaserve_jax.runtime.vocabulary_table import map_bytes
from adaserve_jax.synthetic_acceptance import acceptance_rates
from adaserve_jax.tree.acceptance_table import ChanceTable, read_chances
from adaserve_jax.tree.beam import AcceptanceTable
from adaserve_jax.types import Limits, Progress

CALIBRATION_FILE = "calibration.json"
IDENTITY_SETTINGS = ("dtype", "quantize", "deterministic", "tp", "num_processes")


@dataclass(frozen=True)
class ModelPair:
    """Checkpoints of an engine before their weights are read. draft: the shape of all drafts. draft_folders: in the
    order of `EngineConfig.draft_names`. vocabularies: how each draft's tokens are found from the target's, in the same
    order; empty where tokenizers were not read."""

    target_folder: Path
    target: ModelConfig
    draft: ModelConfig | None
    draft_folders: tuple[Path, ...]
    vocabularies: tuple[VocabularyMap, ...] = ()

    @property
    def draft_folder(self) -> Path | None:
        """Folder of the first draft."""
        return self.draft_folders[0] if self.draft_folders else None


def find_pair(config: EngineConfig) -> ModelPair:
    """Read the models' configurations, check that they fit each other, and map the drafts' vocabularies.

    A head has its target's vocabulary, and needs no tokenizer.
    Raises CheckpointError: a folder cannot be read, or a vocabulary has too little of the target's, or is not the same
    where drafts learn; ConfigError: a further draft is of another shape than the first, or topics cannot be told.
    """
    target_folder = resolve_folder(config.target, "target")
    target = ModelConfig.from_folder(target_folder).for_context(config.max_context)
    tokenizer = Tokenizer.from_folder(target_folder)
    first, folders, vocabularies = None, [], []
    for name, path in config.draft_folders.items():
        folder = resolve_folder(path, "draft", config.target)
        draft = read_draft(path, folder, config.max_context)
        first = first or draft
        for each in fields(ModelConfig):  # all drafts run in the same programs and pages
            expected, got = getattr(first, each.name), getattr(draft, each.name)
            if (
                each.compare and each.name != "eos_token_ids" and got != expected
            ):  # only the target's EOS ids end a text
                raise ConfigError(
                    f"draft {name!r} must be of the shape of the first draft, whose {each.name} is {expected!r}, got "
                    f"{got!r}; give drafts of one architecture and size"
                )
        folders.append(folder)
        if draft.is_head:
            continue
        own = Tokenizer.from_folder(folder)
        if config.learning is not None:  # it learns from the target's tokens
            check_same_vocabulary(tokenizer, own, target.vocab_size, "a draft that learns")
        vocabularies.append(map_vocabulary(tokenizer, own, target.vocab_size, draft.vocab_size))
    if first is not None and first.medusa is not None and len(folders) > 1 and config.route == "topic":
        raise ConfigError(
            "route must be tag or language with Medusa heads, which have no embedding to tell topics by, got 'topic'"
        )
    return ModelPair(target_folder, target, first, tuple(folders), tuple(vocabularies))


def read_draft(path: str, folder: Path, max_context: int, *, may_lack_weights: bool = False) -> ModelConfig:
    """Read a draft's configuration; an EAGLE-3 head's weights say whether it has an embedding of its own.

    may_lack_weights: assume one where they cannot be read. Raises CheckpointError: as `ModelConfig.of_draft`, or the
    weights cannot be read.
    """
    draft = ModelConfig.of_draft(path, folder).for_context(max_context)
    with suppress(CheckpointError) if may_lack_weights else nullcontext():
        if draft.eagle3 is not None and not has_own_embedding(folder):
            return replace(draft, eagle3=replace(draft.eagle3, shares_embedding=True))
    return draft


def resolve_pair(config: EngineConfig, pair: ModelPair, *, elastic: bool = False, training_bytes: int = 0) -> Resolved:
    """Call `resolve` for the models of a pair, with what is known of the drafts' vocabularies and of synthetic
    acceptance. Raises ConfigError: its chances cannot be read, or nothing drafts what they would accept."""
    resolved = resolve(
        config, pair.target, pair.draft, elastic=elastic, training_bytes=training_bytes,
        map_bytes=map_bytes(pair.vocabularies),
    )  # fmt: skip
    asked = config.synthetic_acceptance
    if asked is not None and not config.speculates:
        raise ConfigError("synthetic_acceptance needs a draft, whose tokens are accepted; draft is none")
    return replace(
        resolved, draft_vocabulary=_describe_vocabularies(config, pair),
        synthetic=None if asked is None else acceptance_rates(asked, resolved.limits.max_depth),
    )  # fmt: skip


def _describe_vocabularies(config: EngineConfig, pair: ModelPair) -> str:
    """Say how the drafts' vocabularies are mapped; "" if all are the target's."""
    if not any(each.differs for each in pair.vocabularies):
        return ""
    if len(pair.vocabularies) == 1:
        return str(pair.vocabularies[0])
    named = zip(config.draft_names, pair.vocabularies, strict=True)
    return "; ".join(f"{name}: {each}" for name, each in named)


def find_chances(config: EngineConfig, pair: ModelPair) -> ChanceTable | None:
    """Return the acceptance table to start with; None without a draft.

    The learned table of `config.calibration` if there is one, else the table beside the draft, else that of the
    embedded pair, which is a fair start for any pair and for a draft service.
    Raises CheckpointError: the file is not a table; ConfigError: there is no draft to calibrate, or the file could not
    be written.
    """
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
    pair: ModelPair, resolved: Resolved, progress: Progress | None,
    send_step: Callable[[PackedStep], None] | None = None, read: Callable[..., Params] = load_params,
) -> DeviceModel:  # fmt: skip
    """Load the target on its devices; with several processes, the part on those of this process.

    send_step: as for `DeviceModel`. read: called in place of `load_params`.
    """
    partition, limits, config = resolved.placement.partition, resolved.limits, resolved.config
    read_by_draft = () if pair.draft is None else pair.draft.feature_layers(pair.target.num_layers)
    programs = ModelPrograms(
        partition.local(pair.target), limits.max_pages_per_request, config.deterministic, partition,
        resolved.attention, config.lora_slots, read_by_draft, resolved.synthetic,
    )  # fmt: skip
    params = read(
        pair.target_folder, pair.target, resolved.dtype, progress, resolved.placement, quantize=config.quantize
    )
    if config.lora_slots:
        params |= empty_adapters(
            pair.target, config.lora_slots, config.max_lora_rank, resolved.dtype, resolved.placement
        )
    return DeviceModel(
        "target", pair.target, params, programs, resolved.verify_buckets, num_pages=limits.num_pages,
        page_size=limits.page_size, dtype=resolved.dtype, placement=resolved.placement, send_step=send_step,
    )  # fmt: skip


def declare_target(target: DeviceModel, limits: Limits) -> list[Declared]:
    """Declare the verify program for every bucket and its commits; where pools can be extended, for both layouts."""
    return target.declare_forward(
        partial(target.programs.verify, max_depth=limits.max_tree_depth), limits.extension_pages
    )


def declare_all(
    target: DeviceModel, limits: Limits, resampler: Resampler | None, logit_capture: LogitCapture | None,
    drafter: LocalDrafter | None, adapters: AdapterBank | None,
) -> list[Declared]:  # fmt: skip
    """Declare every program of an engine, with those of expansion where its pools can be extended."""
    declared = declare_target(target, limits)
    for part in (resampler, logit_capture, drafter, adapters):
        if part is not None:
            declared += part.declare()
    if drafter is not None and limits.extension_pages:
        declared += declare_expansion(target, drafter.model, limits.extension_pages)
    return declared


def adapter_bank(target: DeviceModel, config: EngineConfig) -> AdapterBank | None:
    """Return the room for adapters of a loaded target; None where it has none."""
    return AdapterBank(target, config.lora_slots, config.max_lora_rank) if config.lora_slots else None


def load_drafter(
    pair: ModelPair, resolved: Resolved, chances: ChanceTable | None, progress: Progress | None,
    read: Callable[..., Params] = load_params, placement: Placement | None = None, target: DeviceModel | None = None,
) -> LocalDrafter | None:  # fmt: skip
    """Load the drafts; None without one.

    They lie whole on the first device, even if the target is divided: drafts are small, and exchanges between devices
    would cost more than they save. read: called in place of `load_params`. placement: None for that device. target: as
    loaded; a head reads its features.
    """
    if pair.draft is None or pair.draft_folder is None or chances is None:
        return None
    limits = resolved.limits
    is_head = pair.draft.is_head
    beside: dict[str, Any] = {"target": pair.target_folder} if is_head else {}
    shared: Params = {}
    if names := shared_weights(pair.draft, resolved.config.quantize, resolved.config.tp):
        assert target is not None
        shared = {name: target.params[name] for name in names}
        beside["without"] = names
    first, *further = (
        read(folder, pair.draft, resolved.dtype, progress, placement, **beside) for folder in pair.draft_folders
    )
    programs = ModelPrograms(pair.draft, limits.max_pages_per_request, attention=resolved.draft_attention)
    model = DeviceModel(
        "draft", pair.draft, first, programs, resolved.catchup_buckets, num_pages=limits.num_pages,
        page_size=limits.page_size, dtype=resolved.dtype, placement=placement, further=further, shared=shared,
    )  # fmt: skip
    return LocalDrafter(
        model, AcceptanceTable.of(chances), max_depth=limits.max_depth, widths=resolved.search_widths,
        vocabularies=pair.vocabularies, target=target if is_head else None,
    )  # fmt: skip


class AbstractPlacement(Placement):
    """A placement whose arrays are shapes, to compile for."""

    @classmethod
    def like(cls, placement: Placement) -> AbstractPlacement:
        return cls(**{each.name: getattr(placement, each.name) for each in fields(Placement)})

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        return self.abstract(shape, dtype, spec)


def plan_shapes(config: EngineConfig, *, elastic: bool = False) -> tuple[ModelPair, Resolved]:
    """Plan memory from shapes alone, without loading weights or compiling: the workspace is then the reserve for it.

    Raises CheckpointError, ConfigError: as `load_executor` does, except for memory.
    """
    if config.num_processes > 1:
        raise ConfigError(
            f"memory is planned for one process, got num_processes {config.num_processes}; leave it out, since each of "
            "several checks its own memory as it starts"
        )
    pair = find_pair(config)
    return pair, resolve_pair(config, pair, elastic=elastic)


def plan_memory(
    config: EngineConfig, progress: Progress | None = None, *, elastic: bool = False
) -> tuple[Resolved, Workspace]:
    """Plan memory without loading weights, for a model that may not fit. Arguments are those of `load_executor`.

    Compiles every program for shapes alone, to learn its workspace. Raises as `plan_shapes` does.
    """
    pair, resolved = plan_shapes(config, elastic=elastic)
    use_compile_cache(config.compile_cache)
    abstract = declare_shapes(pair, resolved, progress)
    return resolved, workspace_of(compile_all(abstract.declared, progress), abstract.resampler.shapes.bytes)


@dataclass(frozen=True)
class AbstractEngine:
    """An engine of shapes in place of arrays, with all of its programs to compile."""

    target: DeviceModel
    drafter: LocalDrafter | None
    resampler: Resampler
    declared: list[Declared]


def declare_shapes(pair: ModelPair, resolved: Resolved, progress: Progress | None = None) -> AbstractEngine:
    """Declare every program of an engine on the devices of `resolved` without making an array.

    Raises CheckpointError: the draft's acceptance table cannot be read.
    """
    config = resolved.config
    abstract = replace(resolved, placement=AbstractPlacement.like(resolved.placement))
    target = load_target(pair, abstract, progress, read=_abstract_params)
    resampler = Resampler(target, resolved.limits)
    on_first = AbstractPlacement(resolved.placement.devices[:1])
    drafter = load_drafter(pair, abstract, find_chances(config, pair), progress, _abstract_params, on_first, target)
    capture = None
    if config.learning is not None:
        assert pair.draft is not None, "a LearnConfig comes with a draft"
        capture = LogitCapture(target, config.learning, pair.draft.vocab_size)
    adapters = adapter_bank(target, config)
    declared = declare_all(target, resolved.limits, resampler, capture, drafter, adapters)
    return AbstractEngine(target, drafter, resampler, declared)


def _abstract_params(
    folder: Path, config: ModelConfig, dtype: jnp.dtype, progress: Progress | None, placement: Placement,
    *, quantize: str = "none", target: Path | None = None, without: Collection[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return what `load_params` would, as jax.ShapeDtypeStruct."""
    partition = placement.partition
    specs = param_specs(partition.whole(config), quantize)
    return {
        name: placement.abstract(shape, weight_dtype(name, specs, dtype), placement.spec(partition.split_axis(axes)))
        for name, (shape, axes) in specs.items()
        if name not in without
    }


def identify(resolved: Resolved, target_folder: Path, draft_folder: Path | None) -> Identity:
    """Return the key under which a profile of this engine is stored: machine, device, models and settings."""
    config = resolved.config
    settings = {name: getattr(config, name) for name in IDENTITY_SETTINGS}
    settings |= {
        "attention": resolved.attention,
        "row_edges": list(resolved.verify_buckets.row_edges),
        "search_widths": list(resolved.search_widths),
    }
    if config.lora_slots:
        settings |= {"lora_slots": config.lora_slots, "max_lora_rank": config.max_lora_rank}
    return Identity(
        machine=machine_name(),
        device=device_name(config.tp),
        target=model_hash(target_folder),
        draft=None if draft_folder is None else model_hash(draft_folder),
        limits=resolved.limits,
        settings=settings,
    )


def device_name(tp: int) -> str:
    """Describe the first device and how many hold the target."""
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}{f', {tp} devices' if tp > 1 else ''}"
