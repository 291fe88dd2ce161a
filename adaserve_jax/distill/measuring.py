"""What each kind of piece of training takes on this machine, measured before requests come. Knows no requests."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from adaserve_jax.distill.batches import pack
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import PieceKind
from adaserve_jax.models.decoder import Params

TIMED_RUNS = 2
"""Of each kind; the quicker one counts."""


def measure_pieces(trainer: Trainer, num_records: int, serve: Callable[[Params], None]) -> dict[str, float]:
    """Seconds of each kind of piece. trainer: whose weights are its good ones, as they are again afterwards.
    num_records: of one optimiser step. serve: takes weights as `DraftUpdates` hands them on."""
    num_tokens, rng = trainer.programs.num_tokens, np.random.default_rng(0)
    records = [_full_record(num_tokens, trainer.programs.top_k)] * num_records
    batch = pack(records[:1], num_tokens, rng)[0]
    pieces: dict[PieceKind, Callable[[], object]] = {
        "pack": lambda: pack(records, num_tokens, rng),
        "accumulate": lambda: trainer.accumulate(batch),
        "apply": trainer.apply,
        "check": lambda: trainer.evaluate(batch),
        "copy": trainer.back_to_good,
        "swap": lambda: serve(trainer.weights()),
    }
    taken: dict[PieceKind, list[float]] = {kind: [] for kind in pieces}
    for _ in range(TIMED_RUNS):
        for kind, run in pieces.items():
            started = time.perf_counter()
            run()
            taken[kind].append(time.perf_counter() - started)
    return {kind: min(seconds) for kind, seconds in taken.items()}


def _full_record(num_tokens: int, top_k: int) -> Record:
    """A text as long as a micro-step, with a row wherever there can be one."""
    position = np.arange(num_tokens - 1, dtype=np.int32)
    ids = np.tile(np.arange(top_k, dtype=np.int32), (len(position), 1))
    log_p = np.full(ids.shape, -np.log(top_k + 1), np.float32)
    return Record(np.zeros(num_tokens, np.int32), position, ids, log_p)
