"""The texts that the target wrote for a run of distillation, by prompt: written once, learned from in every epoch, and
kept on disk while the run is, so that going on with it needs none of them again."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adaserve_jax.distill.generate import Drawing, Generator
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.decoder import Params

FILE = "texts.npz"
OnDone = Callable[[int], None]


@dataclass(eq=False)
class Writer:
    """Writes texts after prompts. prompts: i32[tokens] each; models: (target, draft) weights, that of the draft changes
    while it learns. kept: the target's texts by prompt index."""

    generator: Generator
    config: OfflineConfig
    eos_ids: tuple[int, ...]
    prompts: Sequence[np.ndarray]
    target: Params
    kept: dict[int, np.ndarray] = field(default_factory=dict)

    def by_target(self, indices: Sequence[int], on_done: OnDone) -> list[np.ndarray]:
        """The target's text after each of these prompts, in order."""
        missing = [index for index in indices if index not in self.kept]
        if missing:
            written = self._written(missing, 0, 1.0, None, on_done)
            self.kept |= dict(zip(missing, written, strict=True))
        return [self.kept[index] for index in indices]

    def by_both(self, indices: Sequence[int], epoch: int, draft: Params, on_done: OnDone) -> list[np.ndarray]:
        """Texts of the draft as it is, or of both models by turns, in order; others in each epoch."""
        return self._written(indices, 1 + epoch, self.config.target_share, draft, on_done)

    def _written(
        self, indices: Sequence[int], stream: int, mix: float, draft: Params | None, on_done: OnDone
    ) -> list[np.ndarray]:
        config = self.config
        drawing = Drawing(mix, config.max_tokens, config.temperature, self.eos_ids)
        seeds = [_seed(config.seed, stream, index) for index in indices]
        prompts = [self.prompts[index] for index in indices]
        return self.generator.texts((self.target, draft), prompts, seeds, drawing, on_done)

    def save(self, folder: Path) -> None:
        """Write the target's texts; a file that is there already is replaced whole."""
        lengths = np.array([len(text) for text in self.kept.values()], np.int32)
        tokens = np.concatenate([*self.kept.values(), np.empty(0, np.int32)])
        new = folder / f"new-{FILE}"
        np.savez(new, prompt=np.array(list(self.kept), np.int32), length=lengths, tokens=tokens)
        new.replace(folder / FILE)

    def load(self, folder: Path) -> None:
        """Take the texts that were saved. Raises CheckpointError: the file is broken."""
        try:
            with (folder / FILE).open("rb") as opened, np.load(opened) as held:
                parts = np.split(held["tokens"].astype(np.int32), np.cumsum(held["length"]))
                self.kept = dict(zip(held["prompt"].tolist(), parts[:-1], strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read ({error}); remove {folder} and begin anew") from None


def _seed(seed: int, stream: int, index: int) -> int:
    """u64, of one text."""
    return int(np.random.SeedSequence([seed, stream, index]).generate_state(1, np.uint64)[0])
