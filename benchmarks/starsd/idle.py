"""Time of a drafted token by how long the draft was idle before, and after warming it up: StarSD's figure 6.

    python -m benchmarks.starsd.idle --out star-idle.json [--samples 40]

What drafts is the model of a draft service (`star.model`) as `adaserve draft` loads it, in this process and without the
service around it, so that an idle time is the sleep that was asked for. Before each sample it drafts a few chains one
after another, which brings it to its steady state; then it sleeps, drafts `warm` chains that are not timed, and one
that is. All settings take turns, in an order that is drawn anew for each round of them, so that a machine whose speed
changes changes all alike. A token's time is that of its chain over the chain's length, its root's feeding included.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program
from benchmarks.grown import grown_draft

IDLE_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WARMED_AT_S = 0.03
"""Idle time before drafts that are warmed up: about what the paper has with one target."""
WARM = (1, 2, 4, 8)
STEADY = 4
"""Chains drafted one after another before each sleep."""
MAX_CONTEXT, MAX_FEED = 512, 32


@dataclass(frozen=True)
class Setting:
    """Seconds of sleep before a draft, and chains drafted between the two."""

    idle_s: float
    warm: int


SETTINGS = (*(Setting(idle_s, 0) for idle_s in IDLE_S), *(Setting(WARMED_AT_S, warm) for warm in WARM))


def measure(
    draft: Callable[[], object], depth: int, samples: int, settings: Sequence[Setting] = SETTINGS, *, seed: int = 0,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], object] = time.sleep,
) -> dict[Setting, list[float]]:  # fmt: skip
    """Seconds of a token, `samples` of each setting. draft: drafts one chain of `depth` tokens and waits for it."""
    rng, found = random.Random(seed), {setting: [] for setting in settings}
    for _ in range(samples):
        for setting in rng.sample(settings, len(settings)):
            for _ in range(STEADY):
                draft()
            if setting.idle_s:
                sleep(setting.idle_s)
            for _ in range(setting.warm):
                draft()
            began = clock()
            draft()
            found[setting].append((clock() - began) / depth)
    return found


def chain_of(model: Path, depth: int, context: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """What drafts one chain of one request behind so many tokens, and what frees the device."""
    import numpy as np

    from adaserve_jax.runtime.warmup import decode_plan, draft_plan
    from adaserve_jax.star.service.model import load
    from adaserve_jax.star.settings import DraftServiceSettings

    settings = DraftServiceSettings(
        model=str(model), max_batch=1, max_sessions=1, max_depth=depth, max_width=1, max_context=MAX_CONTEXT,
        max_batch_tokens=MAX_FEED,
    )  # fmt: skip
    ready = load(settings)
    plan = decode_plan(ready.limits, 1, context, draft_plan(np.ones(1, np.int32), context, depth, 1))
    return lambda: ready.drafter.propose(plan), ready.close


def star_idle(
    out: Annotated[Path, typer.Option(help="file to write")],
    draft: Annotated[str, typer.Option(help="what drafts; '': the demo's, grown to 10M")] = "",
    depth: Annotated[int, typer.Option(help="tokens of a chain")] = 4,
    context: Annotated[int, typer.Option(help="tokens before it")] = 128,
    samples: Annotated[int, typer.Option(help="of each setting")] = 40,
) -> None:
    """Measure."""
    if min(depth, samples) < 1 or not 0 <= context <= MAX_CONTEXT - 2 * depth:
        raise ConfigError(
            f"--depth and --samples must be at least 1 and --context from 0 to {MAX_CONTEXT} less two chains, got "
            f"{depth}, {samples} and {context}"
        )
    load_1m = os.getloadavg()[0]
    model = Path(draft) if draft else grown_draft()
    drafts, close = chain_of(model, depth, context)
    try:
        found = measure(drafts, depth, samples)
    finally:
        close()
    report: dict[str, Any] = {
        "commit": source_commit(), "machine": machine_name(), "device": _device(), "load_1m": load_1m,
        "command": shlex.join(["python", "-m", "benchmarks.starsd.idle", *sys.argv[1:]]), "draft": draft or model.name,
        "depth": depth, "context": context, "steady": STEADY,
        "rows": [
            {"idle_s": setting.idle_s, "warm": setting.warm, "token_s": seconds} for setting, seconds in found.items()
        ],
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    typer.echo(f"{len(SETTINGS)} settings of {samples} samples in {out}")


def _device() -> str:
    from adaserve_jax.runtime.loading import device_name

    return device_name(1)


if __name__ == "__main__":
    program.run(star_idle)
