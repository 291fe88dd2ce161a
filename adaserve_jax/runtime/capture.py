"""What the target thought at some positions of the last step: gathered on the device, and fetched when it is wanted.

For learning. The step hands its logits on, which it has made anyway; what is asked of them is dispatched behind it, and
nobody waits. Decides nothing: which positions, and what becomes of the rows, is the learner's.
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
from adaserve_jax.runtime.model import Amend, DeviceModel
from adaserve_jax.runtime.pools import InFlight
from adaserve_jax.runtime.programs import Sampled

LEAST_ROWS, GROWTH = 8, 4
"""Rows of the smallest program, and of each next one as a multiple; the last has as many as positions are sampled."""


class TargetRows(NamedTuple):
    """Of M positions, the target's K likeliest tokens, likeliest first, by its raw logits. ids: i32[M, K]; log_p:
    f32[M, K], natural logs of their probabilities at the temperature of learning."""

    ids: np.ndarray
    log_p: np.ndarray


class Pending:
    """Rows that are on their way to the host."""

    def __init__(self, packed: jax.Array | np.ndarray, num_rows: int):
        """packed: i32[at least num_rows, 2 K], of `score_rows`."""
        self._packed = packed
        self._num_rows = num_rows

    def collect(self) -> TargetRows:
        """The rows, on the host. Waits only where the device is not done."""
        host = np.asarray(self._packed)[: self._num_rows]
        top_k = host.shape[1] // 2
        return TargetRows(host[:, :top_k], np.ascontiguousarray(host[:, top_k:]).view(np.float32))


def score_rows(logits: jax.Array, at: jax.Array, *, top_k: int, temperature: float) -> jax.Array:
    """i32[M, 2 K]: of the rows `at` (i32[M]) of logits f32[N, V], the ids of the K likeliest tokens, and the bits of
    log_softmax(logits / temperature) there."""
    scores = logits[at] / temperature
    top, ids = lax.top_k(scores, top_k)
    log_p = top - jax.nn.logsumexp(scores, axis=1, keepdims=True)
    return jnp.concatenate([ids.astype(jnp.int32), lax.bitcast_convert_type(log_p, jnp.int32)], axis=1)


def row_edges(sampled: int) -> tuple[int, ...]:
    """Numbers of rows that are compiled for steps that sample at most so many positions."""
    edges, rows = [], LEAST_ROWS
    while rows < sampled:
        edges.append(rows)
        rows *= GROWTH
    return (*edges, sampled)


class Capture:
    """`score_rows` for every number of sampled positions, and the logits of the last step, until the next one."""

    def __init__(self, target: DeviceModel, learn: LearnConfig):
        self._target = target
        self._vocab_size = target.config.vocab_size
        self._top_k = min(learn.learn_top_k, self._vocab_size)
        self._temperature = learn.learn_temperature
        self._sizes = sorted({bucket.sampled for bucket in target.buckets.all()})
        self._logits: jax.Array | None = None
        self._num_sampled = 0

    def declare(self) -> list[Declared]:
        """The programs. They know no pools, so they serve pools of either layout."""
        place = self._target.placement
        program = partial(score_rows, top_k=self._top_k, temperature=self._temperature)
        function = jax.jit(place.spmd(program, (EVERYWHERE, EVERYWHERE), EVERYWHERE))
        declared = []
        for sampled in self._sizes:
            logits = place.abstract((sampled, self._vocab_size), jnp.float32)
            for rows in row_edges(sampled):
                at = place.abstract((rows,), jnp.int32)
                declared.append(Declared(self._key(sampled, rows), function, (logits, at)))
        return declared

    def keeping(self, amend: Amend | None, num_sampled: int) -> Amend:
        """`amend`, or nothing, for a step that samples so many positions and whose logits are to stay. Those of the
        last one go at once, so that never two are there."""
        self.forget()

        def kept(sampled: Sampled, in_flight: InFlight) -> tuple[Any, InFlight]:
            self._logits, self._num_sampled = sampled.logits, num_sampled
            return (sampled, in_flight) if amend is None else amend(sampled, in_flight)

        return kept

    def forget(self) -> None:
        """Let the logits go; what was asked of them still comes."""
        self._logits = None

    def take(self, sampled: np.ndarray) -> Pending:
        """Begin to gather these positions of the last step (i32[M]); returns at once. Raises IntegrityError: there is
        no such step any more, or no such position in it."""
        if self._logits is None:
            raise IntegrityError("the step's logits are gone; capture between a verification and the next step")
        if len(sampled) and not 0 <= int(sampled.min()) <= int(sampled.max()) < self._num_sampled:
            raise IntegrityError(f"positions must be from 0 to {self._num_sampled - 1}, got {sampled.tolist()}")
        if not len(sampled):
            return Pending(np.zeros((0, 2 * self._top_k), np.int32), 0)
        size = self._logits.shape[0]
        rows = next(edge for edge in row_edges(size) if edge >= len(sampled))
        at = np.zeros(rows, np.int32)
        at[: len(sampled)] = sampled
        packed = self._target.compiled[self._key(size, rows)](self._logits, at)
        packed.copy_to_host_async()
        return Pending(packed, len(sampled))

    def run_once(self) -> None:
        """Run every program once, so that none does so for the first time while somebody waits."""
        place = self._target.placement
        for size in self._sizes:
            logits = place.zeros((size, self._vocab_size), jnp.dtype(jnp.float32), EVERYWHERE)
            for rows in row_edges(size):
                np.asarray(self._target.compiled[self._key(size, rows)](logits, np.zeros(rows, np.int32)))

    def _key(self, sampled: int, rows: int) -> tuple:
        return (self._target.role, "capture", sampled, rows)
