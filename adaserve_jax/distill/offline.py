"""Distils a target into its draft from prompts alone: texts are written, scored by the target, and learned from in
rounds, with the trainer that learns while serving.

A round is the unit of everything: its texts are written with the draft as it was before, and what is saved is the state
between two rounds, so that a run that was stopped ends as if it had not been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.distill.batches import Batch, pack
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.scoring import Scorer
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.distill.written import Writer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.settings import read_json
from adaserve_jax.results.whole_file import PRIVATE, write_whole
from adaserve_jax.types import Progress

SAVE_EVERY_S = 120.0
SETTINGS, WEIGHTS = "settings.json", "weights"
"""What lies in the folder of a run's state, beside the texts that the target wrote."""
_HELD_OUT, _TRAINED = 0, 1
"""Streams of random orders."""


@dataclass(frozen=True)
class Evaluation:
    """The draft after so many epochs, on held-out texts of the target. acceptance: mean over positions of
    sum min(p, q), from below where top_k is less than the vocabulary; loss, training_loss: nats per position, the
    latter over the epoch. The rest counts from the start: seconds of all, not of this evaluation alone."""

    epoch: int
    acceptance: float
    loss: float
    training_loss: float | None
    steps: int
    tokens: int
    seconds: float


@dataclass
class Done:
    """How far a run is. rounds: finished; steps of the optimiser; tokens: positions learned from, counted each time;
    seconds: by what they were spent on; evaluations: the first before any training."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epoch_loss: float = 0.0
    epoch_tokens: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Done:
        evaluations = [Evaluation(**each) for each in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations})


class Distillation:
    """One run. held_out, trained: indices of the writer's prompts. settings: what a run that is gone on with must have
    been begun with, JSON. wants_stop: asked between pieces of work."""

    def __init__(
        self, config: OfflineConfig, trainer: Trainer, writer: Writer, scorer: Scorer, held_out: Sequence[int],
        trained: Sequence[int], *, settings: dict[str, Any], progress: Progress,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._config, self._trainer, self._writer, self._scorer = config, trainer, writer, scorer
        self._held_out, self._trained = list(held_out), list(trained)
        self._settings, self._progress, self._wants_stop = settings, progress, wants_stop
        self._rounds_per_epoch = -(-len(trained) // config.round_prompts)
        self._clock = time.monotonic
        self.done = Done()

    @property
    def num_rounds(self) -> int:
        return self._rounds_per_epoch * self._config.epochs

    def run(self, folder: Path, on_epoch: Callable[[Evaluation], None] = lambda _: None) -> bool:
        """Go through all rounds that are left; whether that was all of them, or it was stopped. folder: where state is
        saved, now and then, and when it stops. Raises ConfigError: training gave no
        numbers. CheckpointError: the state cannot be written."""
        saved_s = self._clock()
        try:
            batches = self._held_out_batches()
            if not self.done.evaluations:
                on_epoch(self._evaluate(batches))
            while self.done.rounds < self.num_rounds:
                self._round(self.done.rounds)
                if self.done.rounds % self._rounds_per_epoch == 0:
                    on_epoch(self._evaluate(batches))
                if self._clock() - saved_s > SAVE_EVERY_S:
                    self.save(folder)
                    saved_s = self._clock()
        except _StoppedError:
            self.save(folder)
            return False
        return True

    def weights(self) -> Params:
        """The draft as it is now."""
        return self._trainer.weights()

    def save(self, folder: Path) -> None:
        """Write the state after the last round; only its owner may look into the folder, in which texts are. Raises
        CheckpointError: it cannot be written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # one that was there already, too
            self._save_settings(folder / SETTINGS)
            self._writer.save(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot save the run: {error.strerror}") from None
        self._trainer.mark_good()
        self._trainer.save(folder / WEIGHTS, self.done.rounds, self.done.to_json())

    def _save_settings(self, path: Path) -> None:
        """Whole, and once: they stay what the run was begun with."""
        text = json.dumps(self._settings, indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text, mode=PRIVATE)

    def load(self, folder: Path) -> None:
        """Go on from a saved state. Raises CheckpointError: there is none, or it was begun with other settings."""
        begun = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        for name, value in self._settings.items() if begun else ():
            if begun.get(name) != value:
                raise CheckpointError(
                    f"{folder}: the run was begun with {name} {begun.get(name)!r}, not {value!r}; give what it was "
                    "begun with, or remove that folder and begin anew"
                )
        done = self._trainer.load(folder / WEIGHTS) if begun else None
        if done is None:
            raise CheckpointError(f"{folder}: expected the state of a run that was stopped, found none; begin anew")
        self._writer.load(folder)
        self.done = Done.from_json(done)

    def _held_out_batches(self) -> list[Batch]:
        texts: list[np.ndarray] = []
        for first in range(0, len(self._held_out), self._config.round_prompts):
            chosen = self._held_out[first : first + self._config.round_prompts]
            with self._spent("writing"):
                tell = self._tell("writing held-out texts", len(self._held_out), first)
                texts += self._writer.by_target(chosen, tell)
        records = self._records(self._held_out, texts, prompt_rows=False)
        return pack(records, self._trainer.programs.num_tokens, self._rng(_HELD_OUT))

    def _round(self, number: int) -> None:
        """Write, score and learn from the texts of one round."""
        epoch, index = divmod(number, self._rounds_per_epoch)
        order = self._rng(_TRAINED, epoch).permutation(self._trained)
        size = self._config.round_prompts
        chosen = order[index * size : (index + 1) * size].tolist()
        tell = self._tell("writing", self._config.epochs * len(order), epoch * len(order) + index * size)
        with self._spent("writing"):
            if self._config.target_share == 1:
                texts = self._writer.by_target(chosen, tell)
            else:
                texts = self._writer.by_both(chosen, epoch, self._trainer.weights(), tell)
        records = self._records(chosen, texts, prompt_rows=self._config.prompt_rows)
        with self._spent("training"):
            self._learn(records, number)
        self.done.rounds = number + 1
        self._progress("training", self.done.rounds, self.num_rounds)

    def _learn(self, records: list[Record], number: int) -> None:
        """All optimiser steps of a round, which is not left half done."""
        config, done = self._config, self.done
        num_tokens = self._trainer.programs.num_tokens
        batches = pack(records, num_tokens, self._rng(_TRAINED, number, 1))
        steps = min(max(1, round(len(batches) * num_tokens / config.step_tokens)), len(batches))
        for step, part in enumerate(np.array_split(np.arange(len(batches)), steps)):
            rows = 0
            for index in part.tolist():
                self._trainer.accumulate(batches[index])
                rows += batches[index].num_rows
            progress = (number + step / steps) / self.num_rounds
            applied = self._trainer.apply(config.rate_share(progress))
            if not applied.finite:
                raise ConfigError(
                    f"training gave a loss of {applied.loss} and a gradient of {applied.grad_norm} at step "
                    f"{done.steps + 1}; rate must be lower than {config.rate}, if the checkpoints are sound"
                )
            done.steps += 1
            done.tokens += rows
            done.epoch_loss += applied.loss * rows
            done.epoch_tokens += rows

    def _records(self, indices: Sequence[int], texts: Sequence[np.ndarray], *, prompt_rows: bool) -> list[Record]:
        firsts = [0 if prompt_rows else len(self._writer.prompts[index]) - 1 for index in indices]
        with self._spent("scoring"):
            return self._scorer.records(self._writer.target, texts, firsts, lambda _: self._stop_if_wanted())

    def _evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        done = self.done
        with self._spent("evaluating"):
            scores = Scores(0, 0, 0)
            for number, batch in enumerate(batches, 1):
                scores += self._trainer.evaluate(batch)
                self._progress("evaluating", number, len(batches))
        found = Evaluation(
            epoch=done.rounds // self._rounds_per_epoch,
            acceptance=scores.overlap_sum / scores.weight,
            loss=scores.loss_sum / scores.weight,
            training_loss=done.epoch_loss / done.epoch_tokens if done.epoch_tokens else None,
            steps=done.steps, tokens=done.tokens, seconds=sum(done.seconds.values()),
        )  # fmt: skip
        done.evaluations.append(found)
        done.epoch_loss, done.epoch_tokens = 0.0, 0
        return found

    def _tell(self, what: str, total: int, before: int = 0) -> Callable[[int], None]:
        def tell(count: int) -> None:
            self._progress(what, before + count, total)
            self._stop_if_wanted()

        return tell

    def _stop_if_wanted(self) -> None:
        if self._wants_stop():
            raise _StoppedError

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self._config.seed, *stream])

    @contextmanager
    def _spent(self, what: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.done.seconds[what] = self.done.seconds.get(what, 0.0) + self._clock() - start


class _StoppedError(Exception):
    """The caller wants an end between two rounds."""


def split(num_prompts: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """(held out, trained): indices in order, each at least one. num_prompts >= 2."""
    order = np.random.default_rng([seed]).permutation(num_prompts)
    count = min(max(1, round(share * num_prompts)), num_prompts - 1)
    return sorted(order[:count].tolist()), sorted(order[count:].tolist())


def reset_top_layer(params: Params, fresh: Params) -> Params:
    """The weights with their last layer taken from `fresh`, which are random ones of that model."""
    last = max(int(name.split(".")[1]) for name in params if name.startswith("layers."))
    prefix = f"layers.{last}."
    return {
        name: fresh[name].astype(weight.dtype) if name.startswith(prefix) else weight for name, weight in params.items()
    }
