"""Captures the target's likeliest tokens at some positions of the last step, for learning.

A verification returns its logits on the device anyway. The gathering program runs behind it, and the rows are fetched
later, so no step waits. The learner chooses the positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.errors import IntegrityError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.placement import EVERYWHERE
from adaserve_jax.runtime.compile import Declared
from adaserve_jax.runtime.model import AfterForward, DeviceModel
from adaserve_jax.runtime.pools import InFlight
from adaserve_jax.runtime.programs import VerifyResult

LEAST_ROWS, GROWTH = 8, 4
"""Rows of the smallest program, and the factor from each program to the next. The last has one per sampled position."""


class TargetRows(NamedTuple):
    """The target's K likeliest tokens at M positions, likeliest first, by its logits before edits. ids: i32[M, K];
    log_p: f32[M, K], natural logs of their probabilities at the temperature of learning."""

    ids: np.ndarray
    log_p: np.ndarray


class Pending:
    """Captured rows on their way to the host."""

    def __init__(self, packed: jax.Array | np.ndarray, num_rows: int):
        """Take a result of `score_rows`, i32[M, 2 K], of which the first num_rows rows count."""
        self._packed = packed
        self._num_rows = num_rows

    def collect(self) -> TargetRows:
        """Return the rows on the host. Waits if the device is not done."""
        host = np.asarray(self._packed)[: self._num_rows]
        top_k = host.shape[1] // 2
        return TargetRows(host[:, :top_k], np.ascontiguousarray(host[:, top_k:]).view(np.float32))


def score_rows(logits: jax.Array, at: jax.Array, *, top_k: int, temperature: float, tokens: int) -> jax.Array:
    """Return the K likeliest tokens of the rows `at`, i32[M], of logits f32[N, V], among the first `tokens` of V.

    Packed as i32[M, 2 K]: their ids, then the bits of log_softmax(logits / temperature) there.
    """
    scores = logits[at, :tokens] / temperature
    top, ids = lax.top_k(scores, top_k)
    log_p = top - jax.nn.logsumexp(scores, axis=1, keepdims=True)
    return jnp.concatenate([ids.astype(jnp.int32), lax.bitcast_convert_type(log_p, jnp.int32)], axis=1)


def row_edges(sampled: int) -> tuple[int, ...]:
    """Return the row counts that are compiled for steps with `sampled` sampled positions."""
    edges, rows = [], LEAST_ROWS
    while rows < sampled:
        edges.append(rows)
        rows *= GROWTH
    return (*edges, sampled)


class LogitCapture:
    """Holds the logits of the last step until the next one, and runs `score_rows` on them."""

    def __init__(self, target: DeviceModel, learn: LearnConfig, draft_vocab_size: int):
        """Set up for a target. draft_vocab_size: rows of the drafts, which cannot learn tokens beyond."""
        self._target = target
        self._vocab_size = target.config.vocab_size
        self._tokens = min(self._vocab_size, draft_vocab_size)
        self._top_k = min(learn.learn_top_k, self._tokens)
        self._temperature = learn.learn_temperature
        sizes = sorted({bucket.sampled for bucket in target.buckets.all()})
        self._programs = [(sampled, rows) for sampled in sizes for rows in row_edges(sampled)]
        self.logits: jax.Array | None = None
        """Logits of the last step, f32[N, V]; None once they are dropped."""
        self._num_sampled = 0

    def declare(self) -> list[Declared]:
        """Declare the programs. They take no pools, so they serve extended pools too."""
        place = self._target.placement
        program = partial(score_rows, top_k=self._top_k, temperature=self._temperature, tokens=self._tokens)
        function = jax.jit(place.spmd(program, (EVERYWHERE, EVERYWHERE), EVERYWHERE))
        declared = []
        for sampled, rows in self._programs:
            shapes = place.abstract((sampled, self._vocab_size), jnp.float32), place.abstract((rows,), jnp.int32)
            declared.append(Declared(self._key(sampled, rows), function, shapes))
        return declared

    def hold_logits(self, after_forward: AfterForward | None, num_sampled: int) -> AfterForward:
        """Return `after_forward` extended to hold the logits of a step that samples num_sampled positions.

        The logits of the last step are dropped at once, so that memory never holds two.
        """
        self.drop_logits()

        def hold(result: VerifyResult, in_flight: InFlight) -> tuple[Any, InFlight]:
            self.logits, self._num_sampled = result.logits, num_sampled
            return (result, in_flight) if after_forward is None else after_forward(result, in_flight)

        return hold

    def drop_logits(self) -> None:
        """Release the logits. Rows that are being gathered still arrive."""
        self.logits = None

    def gather(self, sampled: np.ndarray) -> Pending:
        """Begin to gather these positions of the last step, i32[M]; never waits.

        Raises IntegrityError: the next step has begun, or the step has no such position.
        """
        if self.logits is None:
            raise IntegrityError("the step's logits are gone; capture between a verification and the next step")
        if len(sampled) and not 0 <= int(sampled.min()) <= int(sampled.max()) < self._num_sampled:
            raise IntegrityError(f"positions must be from 0 to {self._num_sampled - 1}, got {sampled.tolist()}")
        if not len(sampled):
            return Pending(np.zeros((0, 2 * self._top_k), np.int32), 0)
        size = self.logits.shape[0]
        rows = next(edge for edge in row_edges(size) if edge >= len(sampled))
        at = np.zeros(rows, np.int32)
        at[: len(sampled)] = sampled
        packed = self._target.compiled[self._key(size, rows)](self.logits, at)
        packed.copy_to_host_async()
        return Pending(packed, len(sampled))

    def run_once(self) -> None:
        """Run every program once: a first run takes longer, and must not fall into serving."""
        place = self._target.placement
        for size, rows in self._programs:
            logits = place.zeros((size, self._vocab_size), jnp.dtype(jnp.float32), EVERYWHERE)
            np.asarray(self._target.compiled[self._key(size, rows)](logits, np.zeros(rows, np.int32)))

    def _key(self, sampled: int, rows: int) -> tuple:
        return (self._target.role, "capture", sampled, rows)
