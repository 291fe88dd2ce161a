"""What it costs that draft and target are apart: StarSD's figure 4, by running both, window by window, in turns.

    python -m benchmarks.starsd.apart --out star-apart.json [--windows 12]

One paced target (targets.py) with the draft in its own process, and one whose draft is `adaserve draft`, over gRPC
on this machine: the same texts, chains and verification times. `message_s` is what a round takes from the target's call
to its tree beside the wait in the service's queue and the draft itself: bytes made and read, and the way
there and back.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.errors import ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program
from benchmarks.grown import grown_draft
from benchmarks.starsd.runs import MAX_CONTEXT, MAX_FEED, Run, alone_in_turns, targets_at
from benchmarks.starsd.service import service
from benchmarks.starsd.table1 import NEW_TOKENS, TEMPERATURE, TEXTS
from benchmarks.starsd.targets import Shape, run_target


def window_of(run: Run) -> dict[str, float]:
    """Of one target at the service, in the terms of `colocated.Alone`, and where a round's time went."""
    wait_s = run.counts.queue_s / run.counts.trees
    return {
        "throughput_tps": run.tally.tokens / run.seconds, "rounds_per_s": run.tally.rounds / run.seconds,
        "service_s": run.service_s, "wait_s": wait_s,
        "message_s": run.tally.round_s / run.tally.drafted - wait_s - run.service_s,
    }  # fmt: skip


def star_apart(
    out: Annotated[Path, typer.Option(help="file to write; texts are kept beside it")],
    target: Annotated[str, typer.Option(help="whose texts")] = "demo",
    draft: Annotated[str, typer.Option(help="what drafts; '': the demo's, grown to 10M")] = "",
    verify_ms: Annotated[float, typer.Option(help="t_v, what a verification takes")] = 15.0,
    depth: Annotated[int, typer.Option(help="levels of a chain")] = 4,
    windows: Annotated[int, typer.Option(help="of both, in turns")] = 12,
    seconds: Annotated[float, typer.Option(help="of a window")] = 4.0,
) -> None:
    """Measure."""
    from benchmarks.starsd.texts import texts_of  # it imports jax, which the target's process need not

    if min(verify_ms, seconds) <= 0 or min(depth, windows) < 1:
        raise ConfigError(
            f"--verify-ms and --seconds must be above 0, --depth and --windows at least 1, got {verify_ms:g}, "
            f"{seconds:g}, {depth} and {windows}"
        )
    model = Path(draft) if draft else grown_draft()
    texts = texts_of(
        target, out.with_suffix(".texts"), count=TEXTS, new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    shape, load_1m = Shape(depth, 1, verify_ms / 1e3), os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    with ExitStack() as held:
        together = alone_in_turns(held, model, texts, shape)
        at = held.enter_context(
            service(model, one_by_one=True, depth=depth, max_batch=1, max_feed=MAX_FEED, max_context=MAX_CONTEXT)
        )
        there = held.enter_context(targets_at(at, 1, run_target, texts, shape))
        for number in range(windows):
            together.send(seconds)
            found.append({"together": asdict(together.recv())})
            run = there.run(at, 1, seconds, batched=False, round=number)
            found[-1] |= {"apart": window_of(run), "others_share": run.others_share}
    report = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": load_1m, "target": target,
        "draft": draft or model.name, "shape": asdict(shape), "seconds": seconds, "texts": len(texts),
        "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE,
        "command": shlex.join(["python", "-m", "benchmarks.starsd.apart", *sys.argv[1:]]), "windows": found,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    typer.echo(f"{windows} windows in {out}")


if __name__ == "__main__":
    program.run(star_apart)
