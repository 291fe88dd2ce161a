"""The checkpoints of an engine before their weights are read: where they lie, and whether they belong together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from adaserve_jax.config import DEFAULT_DRAFT, EngineConfig
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.folders import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.tree.chances import ChanceTable, read_chances

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
