"""One draft in training: weights, gradients and optimiser state, and the version of them that is good.

Knows no requests, no buffer and no schedule: a caller hands it batches, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adaserve_jax.distill.checkpoint import Snapshot, checksum, read
from adaserve_jax.distill.programs import State, TrainPrograms
from adaserve_jax.distill.records import Batch
from adaserve_jax.models.decoder import Params


@dataclass(frozen=True)
class Applied:
    """One optimiser step. loss: nats per row; grad_norm: of the mean gradient, before it is shortened. finite: both are
    numbers; otherwise, or if there were no rows, nothing changed."""

    loss: float
    grad_norm: float
    finite: bool


@dataclass(frozen=True)
class Scores:
    """Sums over the rows of a batch: of overlap, the acceptance rate from below, of loss in nats, and of rows."""

    overlap_sum: float
    loss_sum: float
    weight: float

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.overlap_sum + other.overlap_sum, self.loss_sum + other.loss_sum, self.weight + other.weight)


class Trainer:
    """Trains a copy of `params`, the draft in force, which is the good version at first. Not thread-safe.

    programs: compiled. target: a fingerprint of the model that it learns from; a checkpoint of another one is refused,
    and "" is compared with none. Every call but the constructor runs one program at most and blocks until it is done.
    """

    def __init__(self, programs: TrainPrograms, params: Params, target: str = "") -> None:
        self.programs = programs
        self._target = target
        self._draft = checksum(params)
        self._state, self._base, self._sums = programs.run("begin", params)
        self._good: State = programs.run("begin", params)[0]

    def accumulate(self, batch: Batch) -> None:
        """Add the gradients of a batch: one micro-step."""
        fields = self.programs.fields(batch)
        self._sums = jax.block_until_ready(
            self.programs.run("accumulate", self._state.trained, self._base, self._sums, fields)
        )

    def apply(self, rate_share: float = 1.0) -> Applied:
        """One step of AdamW on the mean gradient over all rows since the last one; gradients begin at 0 again.
        rate_share: by what the learning rate is multiplied in this step."""
        self._state, self._sums, report = self.programs.run("apply", self._state, self._sums, np.float32(rate_share))
        loss, norm, finite = np.asarray(report).tolist()
        return Applied(loss, norm, bool(finite))

    def evaluate(self, batch: Batch, *, good: bool = False) -> Scores:
        """Of the weights in training, or of the good ones; nothing changes."""
        state = self._good if good else self._state
        scores = self.programs.run("evaluate", state.trained, self._base, self.programs.fields(batch))
        return Scores(*np.asarray(scores).tolist())

    def weights(self) -> Params:
        """The weights in training, in the type in which the draft serves: arrays that stay what they are."""
        return jax.block_until_ready(self.programs.run("export", self._state.trained, self._base))

    def mark_good(self) -> None:
        """Remember weights and optimiser state as they are now, in the place of those remembered before."""
        self._good = jax.block_until_ready(self.programs.run("copy", self._state, self._good))

    def back_to_good(self) -> None:
        """Weights and optimiser state as they were when marked; gradients of unfinished steps are dropped."""
        self._state = jax.block_until_ready(self.programs.run("copy", self._good, self._state))
        self._sums = self.programs.run("no_sums", self._sums)

    def snapshot(self) -> Snapshot:
        """The good version, copied to the host."""
        named = jax.tree_util.tree_leaves_with_path(self._good)
        arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in named}
        return Snapshot(self._draft, self.programs.learn.learn_lora_rank, arrays, self._target)

    def save(self, folder: Path, step: int, meta: dict[str, Any]) -> None:
        """Write the good version as `Snapshot.save` does; slow, so a step loop has another thread do that."""
        self.snapshot().save(folder, step, meta)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Go on from the latest checkpoint of a folder: it is what is trained, and good. Returns its meta; None: there
        is none, and nothing changes. Raises CheckpointError, and nothing changes."""
        like = self.snapshot()
        found = read(folder, like)
        if found is None:
            return None
        arrays, meta = found
        structure = jax.tree.structure(self._good)
        del self._good  # what was read takes its place
        leaves = [
            jax.device_put(arrays[name].astype(old.dtype), self.programs.device) for name, old in like.arrays.items()
        ]
        self._good = jax.tree.unflatten(structure, leaves)
        self.back_to_good()
        return meta
