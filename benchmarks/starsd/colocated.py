"""The draft within the target's own process, as beside a draft service: one paced target, t_v + S a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.starsd.targets import PacedTarget, Shape, Text

SETTLE_S = 2.0


@dataclass(frozen=True)
class Alone:
    """One such target for some seconds: tokens and rounds a second, and seconds of a draft, S."""

    throughput_tps: float
    rounds_per_s: float
    service_s: float


def run_alone(
    port: Connection, model: Path, texts: Sequence[Text], shape: Shape, max_context: int, max_feed: int
) -> None:
    """The process: says "ready", then answers each number of seconds with what it found in them; 0: end."""
    from adaserve_jax.star.service.model import load
    from adaserve_jax.star.settings import DraftServiceSettings

    settings = DraftServiceSettings(
        model=str(model), max_batch=1, max_sessions=1, max_depth=shape.depth, max_width=shape.width,
        max_context=max_context, max_batch_tokens=max_feed,
    )  # fmt: skip
    draft = load(settings)
    try:
        target = PacedTarget(
            draft.drafter, texts, shape, pages=draft.limits.max_pages_per_request, most_fed=draft.limits.max_tokens
        )
        port.send("ready")
        while seconds := port.recv():
            _for(target, SETTLE_S)
            before, lasted = target.tally - type(target.tally)(), _for(target, seconds)
            found = target.tally - before
            port.send(Alone(found.tokens / lasted, found.rounds / lasted, found.round_s / found.drafted))
    finally:
        draft.close()


def _for(target: PacedTarget, seconds: float) -> float:
    """Decode for at least so long; returns how long."""
    began = time.monotonic()
    while (lasted := time.monotonic() - began) < seconds:
        target.step()
    return lasted
