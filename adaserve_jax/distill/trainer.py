"""Trainer: weights, gradients and optimiser state of one draft, and a good version to return to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adaserve_jax.distill.checkpoint import Snapshot, checksum, read
from adaserve_jax.distill.programs import State, TrainPrograms
from adaserve_jax.distill.records import PackedBatch
from adaserve_jax.models.decoder import Params


@dataclass(frozen=True)
class Applied:
    """Report of one optimiser step.

    loss: nats per row. grad_norm: of the mean gradient, before clipping. finite: both are finite; otherwise, or without
    rows, nothing changed.
    """

    loss: float
    grad_norm: float
    finite: bool


@dataclass(frozen=True)
class Scores:
    """Sums over the rows of a batch: overlap (a lower bound of acceptance), loss in nats, and weights."""

    overlap_sum: float
    loss_sum: float
    weight: float

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.overlap_sum + other.overlap_sum, self.loss_sum + other.loss_sum, self.weight + other.weight)


class Trainer:
    """Trains a copy of a draft. Every call but the constructor runs at most one program, of a head its target's too,
    and blocks until it is done. Not thread-safe."""

    def __init__(self, programs: TrainPrograms, params: Params, target: str = "") -> None:
        """Begin with a copy of `params`, which is also the first good version.

        target: fingerprint of the target; a checkpoint of another one is refused, "" matches any.
        """
        self.programs = programs
        self._target = target
        self._draft = checksum(params)
        self._state, self._base, self._sums = programs.run("begin", params)
        self._good: State = programs.run("begin", params)[0]

    def accumulate(self, batch: PackedBatch) -> None:
        """Add the gradients of a batch: one micro-step."""
        self.programs.check(batch)
        self._sums = jax.block_until_ready(
            self.programs.run("accumulate", self._state.trained, self._base, self._sums, batch)
        )

    def apply(self, rate_share: float = 1.0) -> Applied:
        """Take one AdamW step on the mean gradient over all rows since the last step, then clear the gradients.
        rate_share: factor of the learning rate."""
        self._state, self._sums, report = self.programs.run("apply", self._state, self._sums, np.float32(rate_share))
        loss, norm, finite = np.asarray(report).tolist()
        return Applied(loss, norm, bool(finite))

    def evaluate(self, batch: PackedBatch, *, good: bool = False) -> Scores:
        """Score the weights in training, or the good ones, on a batch."""
        self.programs.check(batch)
        state = self._good if good else self._state
        return Scores(*np.asarray(self.programs.run("evaluate", state.trained, self._base, batch)).tolist())

    def weights(self) -> Params:
        """Return the weights in training in the draft's serving type, as arrays that training never changes."""
        return jax.block_until_ready(self.programs.run("export", self._state.trained, self._base))

    def mark_good(self) -> None:
        """Make the current weights and optimiser state the good version."""
        self._good = jax.block_until_ready(self.programs.run("copy", self._state, self._good))

    def restore_good(self) -> None:
        """Return to the weights and optimiser state of the good version; drop gradients of unfinished steps."""
        self._state = jax.block_until_ready(self.programs.run("copy", self._good, self._state))
        self._sums = self.programs.run("no_sums", self._sums)

    def snapshot(self) -> Snapshot:
        """Copy the good version to the host."""
        return self._snapshot(np.array)

    def _snapshot(self, array_of: Callable[[jax.Array], np.ndarray]) -> Snapshot:
        named = jax.tree_util.tree_leaves_with_path(self._good)
        arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): array_of(leaf) for path, leaf in named}
        return Snapshot(self._draft, self.programs.learn.learn_lora_rank, arrays, self._target)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Load the latest checkpoint of a folder as the weights in training and the good version.

        Return its meta, or None if there is no checkpoint. Raises CheckpointError, and then nothing changes.
        """
        like = self._snapshot(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape))  # takes no memory
        found = read(folder, like)
        if found is None:
            return None
        arrays, meta = found
        structure = jax.tree.structure(self._good)
        del self._good  # frees its memory for the arrays that were read
        leaves = [
            jax.device_put(arrays[name].astype(old.dtype), self.programs.device) for name, old in like.arrays.items()
        ]
        self._good = jax.tree.unflatten(structure, leaves)
        self.restore_good()
        return meta

    def close(self) -> None:
        """Release the arrays on the device; again: nothing. Nothing else may be called afterwards."""
        for name in ("_state", "_base", "_sums", "_good"):
            vars(self).pop(name, None)
