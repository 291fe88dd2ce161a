"""Makes a run of distillation from checkpoint folders and prompts, and checkpoint folders from what was learned."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.generate import Generator
from adaserve_jax.distill.offline import Distillation, reset_top_layer, split
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.scoring import Scorer
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.written import Writer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, init_params
from adaserve_jax.models.export import export
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.types import Progress

LEAST_LENGTH, MOST_LENGTH = 128, 2048
"""Tokens of a micro-step; longer texts are learned from in windows."""


@dataclass(frozen=True)
class Models:
    """A target and a draft, before their weights are read. eos_ids: end a text of the target."""

    target_folder: Path
    draft_folder: Path
    target: ModelConfig
    draft: ModelConfig
    tokenizer: Tokenizer

    @classmethod
    def find(cls, target_folder: Path, draft_folder: Path) -> Models:
        """Raises CheckpointError: a folder cannot be read, or the vocabularies differ."""
        tokenizer = Tokenizer.from_folder(target_folder)
        target, draft = ModelConfig.from_folder(target_folder), ModelConfig.from_folder(draft_folder)
        check_same_vocabulary(tokenizer, Tokenizer.from_folder(draft_folder))
        return cls(target_folder, draft_folder, target, draft, tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.target.eos_token_ids, *self.tokenizer.eos_token_ids)))

    @property
    def max_context(self) -> int:
        return min(self.target.max_position, self.draft.max_position)


@dataclass(frozen=True)
class Prompts:
    """Prompts to learn from, i32[tokens], all different; and how many were left out: repeated ones, and those that
    leave no room for max_tokens in the models' context."""

    kept: list[np.ndarray]
    repeated: int
    too_long: int

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], config: OfflineConfig, max_context: int) -> Prompts:
        """Raises ConfigError: fewer than two are left, one to learn from and one to measure on."""
        different = list(dict.fromkeys(tuple(prompt) for prompt in prompts if prompt))
        room = max_context - config.max_tokens
        kept = [np.array(prompt, np.int32) for prompt in different if len(prompt) <= room]
        found = cls(kept, len(prompts) - len(different), len(different) - len(kept))
        if len(kept) < 2:
            raise ConfigError(
                f"expected at least 2 different prompts of at most {room} tokens (context {max_context} less "
                f"max-tokens {config.max_tokens}), got {len(kept)} of {len(prompts)}: {found.repeated} repeated or "
                f"empty, {found.too_long} too long"
            )
        return found


def open_distillation(
    models: Models, prompts: Prompts, config: OfflineConfig, dtype: Any, *, progress: Progress,
    wants_stop: Callable[[], bool],
) -> Distillation:  # fmt: skip
    """Load both models and compile training. Raises CheckpointError: as loading."""
    target = load_params(models.target_folder, models.target, dtype, _named(progress, "loading target"))
    draft = load_draft(models, config, dtype, progress)
    programs = TrainPrograms(models.draft, config.learn, _length(prompts.kept, config), dtype)
    programs.compile(progress)
    generator = Generator(models.target, models.draft, rows=config.rows, dtype=dtype)
    writer = Writer(generator, config, models.eos_ids, prompts.kept, target)
    scorer = Scorer(
        models.target, top_k=programs.top_k, vocab_size=min(models.target.vocab_size, models.draft.vocab_size),
        temperature=config.loss_temperature,
    )  # fmt: skip
    held_out, trained = split(len(prompts.kept), config.held_out, config.seed)
    settings = {
        **asdict(config), "target": str(models.target_folder.resolve()), "draft": str(models.draft_folder.resolve()),
        "dtype": str(jnp.dtype(dtype)), "prompts": f"sha256 {_hash(prompts.kept)}",
    }  # fmt: skip
    return Distillation(
        config, Trainer(programs, draft), writer, scorer, held_out, trained, settings=settings, progress=progress,
        wants_stop=wants_stop,
    )  # fmt: skip


def load_draft(models: Models, config: OfflineConfig, dtype: Any, progress: Progress) -> Params:
    """The weights that training begins with."""
    params = load_params(models.draft_folder, models.draft, dtype, _named(progress, "loading draft"))
    if config.reset_top_layer:
        return reset_top_layer(params, init_params(models.draft, config.seed, dtype))
    return params


def learned_online(models: Models, folder: Path, name: str, config: OfflineConfig, dtype: Any, progress: Progress) -> (
    tuple[Params, dict[str, Any]]
):  # fmt: skip
    """The latest version that a server left in its learn_folder of the draft of that name, and what it noted of it.

    Raises CheckpointError: there is none, or it began with another draft, type or rank.
    """
    drafts = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    if name not in drafts:
        found = f"drafts {', '.join(drafts)}" if drafts else "no draft's folder"
        raise CheckpointError(f"{folder}: expected checkpoints of draft {name!r}, found {found}; say --draft-name")
    programs = TrainPrograms(models.draft, config.learn, LEAST_LENGTH, dtype)
    programs.compile(progress, only=("begin", "copy", "no_sums", "export"))
    trainer = Trainer(programs, load_draft(models, config, dtype, progress))
    noted = trainer.load(folder / name)
    if noted is None:
        raise CheckpointError(f"{folder / name}: expected a checkpoint, found none; nothing was learned yet")
    return trainer.weights(), noted


def write_draft(params: Params, source: Path, out: Path, dtype: str, progress: Progress) -> None:
    """Write a checkpoint folder that is whole, or not there. Raises ConfigError, CheckpointError."""
    partial = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            export(params, source, partial, dtype=dtype, progress=progress)
            if out.exists():
                out.rmdir()
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{out}: the draft cannot be written: {error.strerror or error}") from None


def _length(prompts: Sequence[np.ndarray], config: OfflineConfig) -> int:
    """Tokens of a micro-step: as long as the longest text may be, within bounds."""
    longest = max(map(len, prompts)) + config.max_tokens
    length = LEAST_LENGTH
    while length < min(longest, MOST_LENGTH):
        length *= 2
    return length


def _named(progress: Progress, what: str) -> Progress:
    return lambda _, done, total: progress(what, done, total)


def _hash(prompts: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + prompt.astype("<i4").tobytes())
    return digest.hexdigest()
