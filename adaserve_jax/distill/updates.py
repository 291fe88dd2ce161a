"""From the records of one draft to a version of it that serves, piece by piece. Knows no requests, executor or clock.

A version is on probation until held-out records that came after it have been asked too. Meanwhile the trainer remembers
the version before as the good one, and takes it back when acceptance fell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

import numpy as np

from adaserve_jax.distill.batches import pack
from adaserve_jax.distill.buffer import Buffer
from adaserve_jax.distill.check import Verdict, judge, parts_of
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.trainer import Scores, Trainer
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.decoder import Params

_log = logging.getLogger(__name__)
CHECK_BATCHES = 8
"""Held-out batches that a version is asked about before it serves."""
PROBATION_BATCHES = 4
"""The same once it serves, the latest records first."""
PROBATION_RECORDS = 4
"""New held-out records that end a version's probation; any do when the next update is due."""

PieceKind = Literal["pack", "accumulate", "apply", "check", "copy", "swap"]
"""What comes next: records drawn and packed on the host, a micro-step forward and back, an optimiser step, a forward,
weights and optimiser state remembered or restored, or new weights for the executor."""


class DraftUpdates:
    """Of one draft. serve: called with the weights of a version, between steps, to serve from now on; where it raises,
    the version before goes on serving. version: the one in force; 0 is what was loaded."""

    def __init__(
        self, name: str, trainer: Trainer, buffer: Buffer, learn: LearnConfig, num_tokens: int,
        serve: Callable[[Params], None], rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.name = name
        self.trainer = trainer
        self.buffer = buffer
        self.updates = self.refused = self.rolled_back = 0
        self.version = self._before = self._made = 0
        self.acceptance: float | None = None
        """Of the version in force on held-out records; None: never asked."""
        self.loss: float | None = None
        self._learn = learn
        self._num_tokens = num_tokens
        self._serve = serve
        self._rng = rng
        self._new = self._new_held_out = 0
        self._on_probation = self._is_training = self._is_worse = False

    def add(self, record: Record) -> None:
        """A finished request of this draft's."""
        self.buffer.add(record)
        self._new += 1
        self._new_held_out += record.held_out

    @property
    def due(self) -> bool:
        """Whether `run` has something to do."""
        return self._update_is_due or self._verdict_is_due

    @property
    def _update_is_due(self) -> bool:
        records, held_out = len(self.buffer), self.buffer.num_held_out
        return self._new >= self._learn.learn_every and 0 < held_out < records

    @property
    def _verdict_is_due(self) -> bool:
        return self._on_probation and self._new_held_out >= (1 if self._update_is_due else PROBATION_RECORDS)

    def run(self) -> Iterator[PieceKind]:
        """Do what is due. Says what kind of piece comes next, does it when it is asked again, and ends. What is not
        announced takes no time."""
        if self._verdict_is_due:
            yield from self._end_probation()
        elif self._update_is_due:
            yield from self._update()

    def _update(self) -> Iterator[PieceKind]:
        self._new = 0
        if self._on_probation:  # no held-out record came since: nothing speaks against it
            yield "copy"
            self._confirm()
        self._is_training = True
        for _ in range(self._learn.learn_steps):
            yield "pack"
            for batch in pack(self.buffer.sample(self._rng, self._learn.learn_every), self._num_tokens, self._rng):
                yield "accumulate"
                self.trainer.accumulate(batch)
            yield "apply"
            applied = self.trainer.apply()
            if not applied.finite:
                yield "copy"
                self._refuse("a gradient is not finite")
                return
            self.loss = applied.loss
        records = self.buffer.held_out()
        shuffled = [records[index] for index in self._rng.permutation(len(records))]
        verdict = yield from self._compare(shuffled, CHECK_BATCHES)
        if not verdict.good:
            self.acceptance = verdict.before
            yield "copy"
            self._refuse(f"acceptance on held-out requests went from {verdict.before:.4f} to {verdict.acceptance:.4f}")
            return
        yield "swap"
        self._serve(self.trainer.weights())
        self._made += 1
        self._before, self.version = self.version, self._made
        self.acceptance = verdict.acceptance
        self.updates += 1
        self._is_training, self._on_probation, self._new_held_out = False, True, 0

    def _end_probation(self) -> Iterator[PieceKind]:
        self._new_held_out = 0
        verdict = yield from self._compare(self.buffer.held_out()[::-1], PROBATION_BATCHES)
        self.acceptance = verdict.acceptance
        if verdict.good:
            yield "copy"
            self._confirm()
            return
        self._is_worse = True
        _log.warning(
            "draft %s: version %d is taken back: acceptance on held-out requests is %.4f, and %.4f with version %d",
            self.name, self.version, verdict.acceptance, verdict.before, self._before,
        )  # fmt: skip
        yield "copy"
        self.trainer.back_to_good()
        yield "swap"
        self._take_back()
        self.acceptance = verdict.before

    def _compare(self, records: list[Record], most_batches: int) -> Generator[PieceKind, None, Verdict]:
        """The weights in training against the good ones."""
        yield "pack"
        parts = parts_of(records, self._num_tokens, most_batches, self._rng)
        scores: tuple[list[list[Scores]], list[list[Scores]]] = ([], [])
        for part in parts:
            for sums, good in zip(scores, (False, True), strict=True):
                sums.append([])
                for batch in part.batches:
                    yield "check"
                    sums[-1].append(self.trainer.evaluate(batch, good=good))
        return judge([part.weight for part in parts], *scores, self._learn.learn_tolerance)

    def _confirm(self) -> None:
        self.trainer.mark_good()
        self._on_probation = False

    def _take_back(self) -> None:
        """The trainer is back at the version before: it serves again."""
        self._serve(self.trainer.weights())
        self.version = self._before
        self._on_probation = self._is_worse = False
        self.rolled_back += 1

    def _refuse(self, reason: str) -> None:
        self.trainer.back_to_good()
        self._is_training = False
        self.refused += 1
        _log.warning("draft %s: an update of version %d is refused: %s", self.name, self.version, reason)

    def settle(self) -> None:
        """At the end: leave an update that is under way. The version in force is the good one, unless it was found to
        be worse than the one before, which is good then."""
        if self._is_training or self._is_worse:
            self.trainer.back_to_good()
            self._is_training = False
        if self._is_worse:
            self._take_back()
        if self._on_probation:
            self._confirm()

    @property
    def good_version(self) -> int:
        """The version that the trainer remembers: the one in force, or while that is on probation the one before."""
        return self._before if self._on_probation else self.version

    def state(self) -> dict[str, Any]:
        """Of the good version: what a restart needs to know beside the trainer's state and the records."""
        return {"version": self.good_version, "made": self._made}

    def go_on_from(self, state: dict[str, Any]) -> None:
        """The trainer's state was read, and is good: serve it. Raises KeyError, TypeError: not what `state` gave."""
        self.version, self._made = int(state["version"]), int(state["made"])
        self._serve(self.trainer.weights())
