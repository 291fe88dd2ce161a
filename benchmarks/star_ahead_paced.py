"""Whether drafting ahead pays: one draft service with it and one without, in turns, with paced targets of one request.

    python benchmarks/star_ahead_paced.py --out benchmarks/results/star-ahead-paced.json [--verify-ms 15] [--rounds 3]

Services, targets and texts are those of star_table1.py: the demo's draft grown to 10M behind `adaserve draft`, targets
that are processes with a real remote drafter, whose verification alone is paced, along texts that the demo's target
wrote at temperature 0.7. So what a hit is, is what real texts make it; how long rounds take is the machine's. In each
round every number of targets and every depth is measured with both services one right after the other; a ratio is of
such a pair, and what stands is the median of the pairs. Hits need no quiet machine, ratios do: the share of the cores'
time that other processes took stands beside them.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from star_runs import MAX_CONTEXT, MAX_FEED, MAX_ROWS, Run, Targets, targets_at
from star_service import Service, service
from star_table1 import NEW_TOKENS, TEMPERATURE, TEXTS
from star_targets import Shape, Text, run_target

from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.provenance import machine_name, source_commit

TARGETS = (1, 2)
DEPTHS = (1, 2, 4)
COUNTERS = ("ahead_batches", "ahead_seconds", "ahead_trees", "ahead_hits", "ahead_misses", "rounds", "loop_seconds")
"""Of a service, `adaserve_draft_service_..._total`."""


@dataclass(frozen=True)
class Turn:
    """A run of one service. ahead: what its counters grew by, from before the targets began until after they ended."""

    is_ahead: bool
    depth: int
    run: Run
    ahead: dict[str, float]


@dataclass(frozen=True)
class PacedRow:
    """One number of targets at one depth. off, on: the service without and with it, medians over rounds. ratio,
    ratio_rounds: of tokens/s and of rounds/s, on over off, medians over pairs; low, high: of the first, the extremes.
    hits, made: trees that answered a round, and trees made ahead, of all rounds. wait: in the queue, of a Draft.
    ahead_load: share of the time that the device worked ahead; others_share: of other processes, the most of a run."""

    n: int
    depth: int
    off_tokens_s: float
    on_tokens_s: float
    off_rounds_s: float
    on_rounds_s: float
    ratio: float
    ratio_rounds: float
    low: float
    high: float
    hits: float
    made: float
    hit_of_made: float
    wait_off_s: float
    wait_on_s: float
    ahead_load: float
    others_share: float | None


def row_of(turns: Sequence[Turn], n: int, depth: int) -> PacedRow:
    """What the turns of one number of targets and one depth say."""
    these = [turn for turn in turns if (turn.run.n, turn.depth) == (n, depth)]
    off, on = ([turn for turn in these if turn.is_ahead == is_ahead] for is_ahead in (False, True))
    pairs = [(before.run.row(), after.run.row()) for before, after in zip(off, on, strict=True)]
    ratios = [after.throughput_tps / before.throughput_tps for before, after in pairs]
    ahead = {name: sum(turn.ahead[name] for turn in on) for name in COUNTERS}

    def median(side: int, name: str) -> float:
        return statistics.median(getattr(pair[side], name) for pair in pairs)

    return PacedRow(
        n, depth, median(0, "throughput_tps"), median(1, "throughput_tps"), median(0, "rounds_per_s"),
        median(1, "rounds_per_s"), statistics.median(ratios),
        statistics.median(after.rounds_per_s / before.rounds_per_s for before, after in pairs),
        min(ratios), max(ratios),
        ahead["ahead_hits"] / ahead["rounds"], ahead["ahead_trees"] / ahead["rounds"],
        ahead["ahead_hits"] / max(ahead["ahead_trees"], 1.0), median(0, "wait_s"), median(1, "wait_s"),
        ahead["ahead_seconds"] / ahead["loop_seconds"],
        max((turn.run.others_share for turn in these if turn.run.others_share is not None), default=None),
    )  # fmt: skip


def turn_of(there: Targets, at: Service, n: int, seconds: float, *, number: int, is_ahead: bool, depth: int) -> Turn:
    """Run `n` targets at a service for so long."""
    before = at.read()
    run = there.run(at, n, seconds, batched=True, round=number)
    after = at.read()
    return Turn(is_ahead, depth, run, {name: after[name] - before[name] for name in COUNTERS})


def measure(
    services: dict[bool, Service], texts: Sequence[Text], verify_s: float, *, rounds: int, seconds: float, most: int
) -> list[Turn]:
    """Every number of targets and every depth, both services in turns, the other first in every other round."""
    turns = []
    for depth in DEPTHS:
        with ExitStack() as held:
            shape = Shape(depth, 1, verify_s)
            there = {
                kind: held.enter_context(targets_at(at, most, run_target, texts, shape))
                for kind, at in services.items()
            }
            for number in range(rounds):
                for n in range(1, most + 1):
                    pair = []
                    for is_ahead in (False, True) if number % 2 else (True, False):
                        at = services[is_ahead]
                        turn = turn_of(there[is_ahead], at, n, seconds, number=number, is_ahead=is_ahead, depth=depth)
                        pair.append(turn)
                        typer.echo(f"round {number}, depth {depth}, ahead {is_ahead}: {turn.run.row()} {turn.ahead}")
                    turns += pair
    return turns


def star_ahead(
    out: Annotated[Path, typer.Option(help="file to write; texts are kept beside it")],
    target: Annotated[str, typer.Option(help="whose texts")] = "demo",
    draft: Annotated[str, typer.Option(help="what the services draft with; '': the demo's, grown to 10M")] = "",
    verify_ms: Annotated[float, typer.Option(help="t_v, what a verification takes")] = 15.0,
    rounds: Annotated[int, typer.Option(help="pairs of runs; medians over them stand")] = 3,
    seconds: Annotated[float, typer.Option(help="of one run")] = 5.0,
    targets: Annotated[int, typer.Option(help="most targets")] = TARGETS[-1],
) -> None:
    """Measure in turns, and write the medians."""
    from nightjar_offload import grown_draft  # these import jax, which the targets' processes need not
    from star_texts import texts_of
    from throughput import grown_target

    if min(verify_ms, seconds) <= 0 or min(rounds, targets) < 1:
        raise ConfigError("--verify-ms and --seconds must be above 0, --rounds and --targets at least 1")
    model = Path(draft) if draft else grown_draft(grown_target("110M"))
    texts = texts_of(
        target, out.with_suffix(".texts"), count=TEXTS, new_tokens=NEW_TOKENS, temperature=TEMPERATURE,
        max_context=MAX_CONTEXT,
    )  # fmt: skip
    load_1m = os.getloadavg()[0]
    with ExitStack() as held:
        services = {
            is_ahead: held.enter_context(
                service(
                    model,
                    one_by_one=False,
                    depth=max(DEPTHS),
                    max_batch=MAX_ROWS,
                    max_feed=MAX_FEED,
                    max_context=MAX_CONTEXT,
                    ahead=is_ahead,
                )
            )
            for is_ahead in (False, True)
        }
        turns = measure(services, texts, verify_ms / 1e3, rounds=rounds, seconds=seconds, most=targets)
    rows = [row_of(turns, n, depth) for depth in DEPTHS for n in range(1, targets + 1)]
    about: dict[str, Any] = {
        "commit": source_commit(), "machine": machine_name(), "load_1m": load_1m, "target": target,
        "draft": draft or model.name, "verify_s": verify_ms / 1e3, "seconds": seconds, "rounds": rounds,
        "texts": len(texts), "new_tokens": NEW_TOKENS, "temperature": TEMPERATURE,
        "command": shlex.join(["python", "benchmarks/star_ahead_paced.py", *sys.argv[1:]]),
    }  # fmt: skip
    result = about | {"rows": [asdict(row) for row in rows], "turns": [asdict(turn) for turn in turns]}
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    try:
        typer.run(star_ahead)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
