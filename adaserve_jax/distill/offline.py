"""Offline distillation of a target into its draft, from prompts alone.

Rounds of prompts are continued, scored by the target and learned from, with the trainer that also learns while serving.
A round's texts are written with the draft as it was before, and only the state between two rounds is saved, so that a
run that was stopped and resumed ends like one that was not. Axes: T packed tokens, K likeliest tokens of the target, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.generate import Drawing, Generator
from adaserve_jax.distill.heads import FIRST_POSITION, HeadTarget
from adaserve_jax.distill.offline_config import OfflineConfig
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import LOG_ZERO, PADDING, PackedBatch, Record, pack
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.errors import CheckpointError, ConfigError
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.decoder import Params, attend_dense, decode, init_params, logits
from adaserve_jax.models.export import export
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.tokenizer import Tokenizer, check_same_vocabulary
from adaserve_jax.results.whole_file import PRIVATE, whole_file, write_whole
from adaserve_jax.types import Progress

FILE, SETTINGS, WEIGHTS = "texts.npz", "settings.json", "weights"
"""Files of a run's state: the target's texts, the settings, and the trainer's checkpoints."""
SAVE_EVERY_S = 120.0
MIN_TOKENS = 512
"""Texts share a forward of at least so many tokens."""
COLUMNS = 64
"""Positions whose scores over the vocabulary are in memory at once."""
MIN_LENGTH, MAX_LENGTH = 128, 2048
"""Bounds of a micro-step's tokens; longer texts are learned from in windows."""
_HELD_OUT, _TRAINED = 0, 1
"""Streams of random orders."""
OnDone = Callable[[int], None]


@dataclass(eq=False)
class TextWriter:
    """Writes texts after prompts. The target's texts are written once, kept for every epoch, and saved with the run.

    prompts: i32[tokens] each. kept: the target's texts by prompt index.
    """

    generator: Generator
    config: OfflineConfig
    eos_ids: tuple[int, ...]
    prompts: Sequence[np.ndarray]
    target: Params
    kept: dict[int, np.ndarray] = field(default_factory=dict)

    def by_target(self, indices: Sequence[int], on_done: OnDone) -> list[np.ndarray]:
        """Return the target's text after each of these prompts, in order."""
        missing = [index for index in indices if index not in self.kept]
        if missing:
            written = self._written(missing, 0, 1.0, None, on_done)
            self.kept |= dict(zip(missing, written, strict=True))
        return [self.kept[index] for index in indices]

    def by_both(self, indices: Sequence[int], epoch: int, draft: Params, on_done: OnDone) -> list[np.ndarray]:
        """Write texts of the draft as it is, or of both models mixed, in order; they differ in each epoch."""
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
        """Write the target's texts, replacing the file atomically."""
        lengths = np.array([len(text) for text in self.kept.values()], np.int32)
        tokens = np.concatenate([*self.kept.values(), np.empty(0, np.int32)])
        with whole_file(folder / FILE, mode=PRIVATE) as file:
            np.savez(file, prompt=np.array(list(self.kept), np.int32), length=lengths, tokens=tokens)

    def load(self, folder: Path) -> None:
        """Read the saved texts. Raises CheckpointError if the file is broken."""
        try:
            with (folder / FILE).open("rb") as opened, np.load(opened) as held:
                parts = np.split(held["tokens"].astype(np.int32), np.cumsum(held["length"]))
                self.kept = dict(zip(held["prompt"].tolist(), parts[:-1], strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read ({error}); remove {folder} and begin anew") from None


def _seed(seed: int, stream: int, index: int) -> int:
    """Return the u64 seed of one text."""
    return int(np.random.SeedSequence([seed, stream, index]).generate_state(1, np.uint64)[0])


class Scorer:
    """Scores finished texts with the target, as records. Compiles on first use, for each power of two of tokens.

    top_k: tokens kept per position. vocab_size: token ids that both models have. temperature: of the distribution.
    """

    def __init__(self, config: ModelConfig, *, top_k: int, vocab_size: int, temperature: float):
        self._program = jax.jit(partial(_top, config, min(top_k, vocab_size), vocab_size, temperature))

    def records(
        self,
        params: Params,
        texts: Sequence[np.ndarray],
        first: Sequence[int],
        on_done: OnDone = lambda _: None,
    ) -> list[Record]:
        """Return one record per text, in order, with a row for each position from `first` to the last but one token.

        texts: i32[tokens], each longer than its first + 1. on_done: called with the number of texts that are scored.
        """
        size = max(MIN_TOKENS, _power_of_two(max(map(len, texts))))
        records: list[Record] = []
        for begin, end in _shared(texts, size):
            records += self._scored(params, texts[begin:end], first[begin:end], size)
            on_done(end)
        return records

    def _scored(self, params: Params, texts: Sequence[np.ndarray], first: Sequence[int], size: int) -> list[Record]:
        tokens, position = np.zeros(size, np.int32), np.zeros(size, np.int32)
        segment = np.full(size, PADDING, np.int32)
        *starts, end = np.cumsum([0, *map(len, texts)]).tolist()
        tokens[:end] = np.concatenate(texts)
        position[:end] = np.concatenate([np.arange(len(text)) for text in texts])
        segment[:end] = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        ids, log_p = (np.asarray(part) for part in self._program(params, tokens, position, segment))
        found = []
        for text, start, row in zip(texts, starts, first, strict=True):
            rows = slice(start + row, start + len(text) - 1)
            at = np.arange(row, len(text) - 1, dtype=np.int32)
            found.append(Record(text, at, ids[rows].copy(), log_p[rows].copy()))
        return found


def _shared(texts: Sequence[np.ndarray], size: int) -> list[tuple[int, int]]:
    """Split texts into runs [begin, end) of at most `size` tokens together."""
    runs, begin, filled = [], 0, 0
    for index, text in enumerate(texts):
        if filled + len(text) > size:
            runs.append((begin, index))
            begin, filled = index, 0
        filled += len(text)
    return [*runs, (begin, len(texts))]


def _top(
    config: ModelConfig, top_k: int, vocab_size: int, temperature: float, params: Params, tokens: jax.Array,
    position: jax.Array, segment: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return (ids i32[T, K], natural logs of their probabilities f32[T, K]), likeliest first."""
    hidden = decode(params, config, tokens, position, attend_dense(config, segment))

    def top(columns: jax.Array) -> tuple[Any, Any]:
        scores = logits(params, config, columns)[:, :vocab_size] / temperature
        log_p, ids = jax.lax.top_k(jax.nn.log_softmax(scores), top_k)
        return ids.astype(jnp.int32), jnp.maximum(log_p, LOG_ZERO)

    blocks = hidden.reshape(hidden.shape[0], -1, COLUMNS).transpose(1, 0, 2)
    ids, log_p = jax.lax.map(top, blocks)
    return ids.reshape(-1, top_k), log_p.reshape(-1, top_k)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the draft after some epochs on held-out texts of the target.

    acceptance: mean over positions of sum min(p, q); a lower bound if top_k is less than the vocabulary. loss,
    training_loss: nats per position; the latter over the epoch. steps, tokens, seconds: totals since the start.
    """

    epoch: int
    acceptance: float
    loss: float
    training_loss: float | None
    steps: int
    tokens: int
    seconds: float


@dataclass
class RunProgress:
    """Progress of a run.

    steps: of the optimiser. tokens: positions learned from, counted each time. seconds: by kind of work. evaluations:
    the first comes before any training.
    """

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    epoch_loss: float = 0.0
    epoch_tokens: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)


class Distillation:
    """One run of distillation.

    held_out, trained: indices of the writer's prompts. settings: JSON that a resumed run must have been begun with.
    wants_stop: asked between pieces of work.
    """

    def __init__(
        self, config: OfflineConfig, trainer: Trainer, writer: TextWriter, scorer: Scorer, held_out: Sequence[int],
        trained: Sequence[int], *, settings: dict[str, Any], progress: Progress,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._config, self._trainer, self._writer, self._scorer = config, trainer, writer, scorer
        self._held_out, self._trained = list(held_out), list(trained)
        self._settings, self._progress, self._wants_stop = settings, progress, wants_stop
        self._rounds_per_epoch = -(-len(trained) // config.round_prompts)
        self.done = RunProgress()

    @property
    def num_rounds(self) -> int:
        return self._rounds_per_epoch * self._config.epochs

    def run(self, folder: Path, on_epoch: Callable[[Evaluation], None] = lambda _: None) -> bool:
        """Run all rounds that are left; return False if stopped before the end.

        folder: the state is saved here now and then, and when the run is stopped. on_epoch: called with the evaluation
        before training and after each epoch. Raises ConfigError if training diverged, or no held-out text says anything
        of a head; CheckpointError if the state cannot be written.
        """
        saved_s = time.monotonic()
        try:
            batches = self._held_out_batches()
            if not self.done.evaluations:
                on_epoch(self._evaluate(batches))
            while self.done.rounds < self.num_rounds:
                self._round(self.done.rounds)
                if self.done.rounds % self._rounds_per_epoch == 0:
                    on_epoch(self._evaluate(batches))
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    self.save(folder)
                    saved_s = time.monotonic()
        except _StoppedError:
            self.save(folder)
            return False
        return True

    def weights(self) -> Params:
        return self._trainer.weights()

    def save(self, folder: Path) -> None:
        """Write the state after the last round, readable by the owner only, since it holds texts. Raises
        CheckpointError if it cannot be written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # also if the folder existed before
            settings, text = folder / SETTINGS, json.dumps(self._settings, indent=1) + "\n"
            if not settings.exists() or settings.read_text() != text:
                write_whole(settings, text, mode=PRIVATE)
            self._writer.save(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot save the run: {error.strerror}") from None
        self._trainer.mark_good()
        self._trainer.snapshot().save(folder / WEIGHTS, self.done.rounds, asdict(self.done))

    def load(self, folder: Path) -> None:
        """Resume from a saved state. Raises CheckpointError if there is none, or it was begun with other settings."""
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
        done["evaluations"] = [Evaluation(**each) for each in done["evaluations"]]
        self.done = RunProgress(**done)

    def _held_out_batches(self) -> list[PackedBatch]:
        texts: list[np.ndarray] = []
        for first in range(0, len(self._held_out), self._config.round_prompts):
            chosen = self._held_out[first : first + self._config.round_prompts]
            with self._spent("writing"):
                tell = self._tell("writing held-out texts", len(self._held_out), first)
                texts += self._writer.by_target(chosen, tell)
        records = self._records(self._held_out, texts, prompt_rows=False)
        if not records:
            raise ConfigError(
                "expected a held-out text of at least 3 tokens, its prompt included, since a head learns nothing from "
                "a first token, got none; give longer prompts, or raise max_tokens"
            )
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
            if records:
                self._learn(records, number)
        self.done.rounds = number + 1
        self._progress("training", self.done.rounds, self.num_rounds)

    def _learn(self, records: list[Record], number: int) -> None:
        """Take all optimiser steps of a round; a stop waits for its end."""
        config, done = self._config, self.done
        num_tokens = self._trainer.programs.num_tokens
        batches = pack(records, num_tokens, self._rng(_TRAINED, number, 1))
        steps = min(max(1, round(len(batches) * num_tokens / config.step_tokens)), len(batches))
        for step, part in enumerate(np.array_split(np.arange(len(batches)), steps)):
            rows = 0
            for index in part.tolist():
                self._trainer.accumulate(batches[index])
                rows += batches[index].num_rows
            progress = (number + (step + 0.5) / steps) / self.num_rounds  # at 0, warm-up would train nothing
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
        """Return records of these prompts' texts, without those that a head learns nothing from."""
        least = FIRST_POSITION if self._trainer.programs.config.is_head else 0
        firsts = [max(least, 0 if prompt_rows else len(self._writer.prompts[index]) - 1) for index in indices]
        kept = [at for at, text in enumerate(texts) if len(text) > firsts[at] + 1]
        if not kept:
            return []
        texts, firsts = [texts[at] for at in kept], [firsts[at] for at in kept]
        with self._spent("scoring"):
            return self._scorer.records(self._writer.target, texts, firsts, lambda _: self._stop_if_wanted())

    def _evaluate(self, batches: Sequence[PackedBatch]) -> Evaluation:
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

    def _tell(self, what: str, total: int, before: int) -> OnDone:
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
        start = time.monotonic()
        try:
            yield
        finally:
            self.done.seconds[what] = self.done.seconds.get(what, 0.0) + time.monotonic() - start


class _StoppedError(Exception):
    """Raised between pieces of work when the caller wants to stop."""


def split(num_prompts: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split prompts into sorted indices (held out, trained), each with at least one. num_prompts >= 2."""
    order = np.random.default_rng([seed]).permutation(num_prompts)
    count = min(max(1, round(share * num_prompts)), num_prompts - 1)
    return sorted(order[:count].tolist()), sorted(order[count:].tolist())


def reset_top_layer(params: Params, fresh: Params) -> Params:
    """Replace the last layer of the weights by that of `fresh`, random weights of the same model."""
    last = max(int(name.split(".")[1]) for name in params if name.startswith("layers."))
    prefix = f"layers.{last}."
    return {
        name: fresh[name].astype(weight.dtype) if name.startswith(prefix) else weight for name, weight in params.items()
    }


@dataclass(frozen=True)
class Models:
    """Folders, configurations and tokenizer of a target and a draft, before their weights are read.

    begins_with: name of the draft in a run's settings.
    """

    target_folder: Path
    draft_folder: Path
    target: ModelConfig
    draft: ModelConfig
    tokenizer: Tokenizer
    begins_with: str

    @classmethod
    def find(cls, target_folder: Path, draft_folder: Path, begins_with: str | None = None) -> Models:
        """Read both configurations. The draft may be a head. Raises CheckpointError if a folder cannot be read
        or the vocabularies differ."""
        tokenizer, target = Tokenizer.from_folder(target_folder), ModelConfig.from_folder(target_folder)
        draft = ModelConfig.from_folder(draft_folder, may_be_head=True)
        if draft.is_head:
            draft.check_target(target)
        else:
            check_same_vocabulary(tokenizer, Tokenizer.from_folder(draft_folder), target.vocab_size)
        name = str(draft_folder.resolve()) if begins_with is None else begins_with
        return cls(target_folder, draft_folder, target, draft, tokenizer, name)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.target.eos_token_ids, *self.tokenizer.eos_token_ids)))

    @property
    def max_context(self) -> int:
        longest = self.target.usual_context
        return longest if self.draft.is_head else min(longest, self.draft.usual_context)


@dataclass(frozen=True)
class Prompts:
    """Prompts to learn from, i32[tokens], all different; and the numbers left out: repeated ones, and those that leave
    no room for max_tokens in the models' context."""

    kept: list[np.ndarray]
    repeated: int
    too_long: int

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], config: OfflineConfig, max_context: int) -> Prompts:
        """Choose usable prompts. Raises ConfigError if fewer than two are left: one to train on, one to measure on."""
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
    """Load both models and compile training.

    Raises CheckpointError if a model cannot be loaded; ConfigError: the settings are not for a head.
    """
    is_head = models.draft.is_head
    if is_head and config.sampling != "teacher":
        raise ConfigError(
            f"sampling must be teacher for {models.draft.head_name}, which writes no texts, got {config.sampling!r}"
        )
    if is_head and config.reset_top_layer:
        raise ConfigError(f"reset_top_layer is not for {models.draft.head_name}; begin with a new head")
    target = load_params(models.target_folder, models.target, dtype, _named(progress, "loading target"))
    draft = load_draft(models, config, dtype, progress)
    source = HeadTarget(models.target, target) if is_head else None
    vocab_size = min(models.target.vocab_size, models.draft.vocab_size)
    learn = replace(config.learn, learn_top_k=min(config.top_k, vocab_size))
    programs = TrainPrograms(models.draft, learn, _length(prompts.kept, config), dtype, target=source)
    programs.compile(progress)
    generator = Generator(models.target, None if is_head else models.draft, rows=config.rows, dtype=dtype)
    writer = TextWriter(generator, config, models.eos_ids, prompts.kept, target)
    scorer = Scorer(models.target, top_k=programs.top_k, vocab_size=vocab_size, temperature=config.loss_temperature)
    held_out, trained = split(len(prompts.kept), config.held_out, config.seed)
    settings = {
        **asdict(config), "target": str(models.target_folder.resolve()), "draft": models.begins_with,
        "dtype": str(jnp.dtype(dtype)), "prompts": f"sha256 {_hash(prompts.kept)}",
    }  # fmt: skip
    return Distillation(
        config, Trainer(programs, draft), writer, scorer, held_out, trained, settings=settings, progress=progress,
        wants_stop=wants_stop,
    )  # fmt: skip


def load_draft(models: Models, config: OfflineConfig, dtype: Any, progress: Progress) -> Params:
    """Load the weights that training begins with."""
    params = load_params(
        models.draft_folder, models.draft, dtype, _named(progress, "loading draft"), target=models.target_folder
    )
    if config.reset_top_layer:
        return reset_top_layer(params, init_params(models.draft, config.seed, dtype))
    return params


def load_online_draft(
    models: Models, folder: Path, name: str, config: OfflineConfig, dtype: Any, progress: Progress
) -> tuple[Params, dict[str, Any]]:
    """Load the latest version of a draft from a server's learn_folder; return its weights and meta.

    Raises CheckpointError if there is none, or it began with another draft, type or rank.
    """
    drafts = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    if name not in drafts:
        found = f"drafts {', '.join(drafts)}" if drafts else "no draft's folder"
        raise CheckpointError(f"{folder}: expected checkpoints of draft {name!r}, found {found}; say --draft-name")
    programs = TrainPrograms(models.draft, config.learn, MIN_LENGTH, dtype)
    programs.compile(progress, only=("begin", "copy", "no_sums", "export"))
    trainer = Trainer(programs, load_draft(models, config, dtype, progress))
    noted = trainer.load(folder / name)
    if noted is None:
        raise CheckpointError(f"{folder / name}: expected a checkpoint, found none; nothing was learned yet")
    return trainer.weights(), noted


def write_draft(params: Params, source: Path, out: Path, dtype: str, progress: Progress) -> None:
    """Write a checkpoint folder atomically. Raises ConfigError, CheckpointError."""
    partial = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        export(params, source, partial, dtype=dtype, progress=progress)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: the draft cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _length(prompts: Sequence[np.ndarray], config: OfflineConfig) -> int:
    """Return the tokens of a micro-step: the length of the longest possible text, within bounds."""
    longest = max(map(len, prompts)) + config.max_tokens
    return max(MIN_LENGTH, _power_of_two(min(longest, MAX_LENGTH)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _named(progress: Progress, what: str) -> Progress:
    return lambda _, done, total: progress(what, done, total)


def _hash(prompts: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + prompt.astype("<i4").tobytes())
    return digest.hexdigest()
