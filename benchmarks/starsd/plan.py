"""How many targets one draft serves: Table 1's quantities by closed form and in simulation, and N_full and N_max.

    python -m benchmarks.starsd.plan --out star-plan.json

`rows`: targets from 1 to 64 at one setting, one by one and batched, by both. `plans`: for each return time Z (in drafts
S), acceptance b and depth d, the fewest targets that keep the draft busy and the most that are no slower than plain
decoding, by both. A plain step takes as long as a verification here: Z, with no network. Batched, a draft of n requests
takes 1 + GROWTH (n - 1) times as long as of one. In simulation N_full is the first N whose load is above FULL, and
N_max the last whose targets are as fast as the plain ones, searched from the closed form's outwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.star.service.admission import ServiceTime, max_targets_batched
from benchmarks import program
from benchmarks.starsd.closed_forms import emitted_tokens, full_targets, max_targets
from benchmarks.starsd.sim import StarPlan, StarRow, closed_row, simulated_row

SERVICE_S, GROWTH, MAX_ROWS = 0.010, 0.1, 64
TARGETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
SHOWN = {"verify_s": 0.030, "network_s": 0.001, "acceptance": 0.7, "depth": 4}
DRAFTS = 4000
"""Of all targets of a row together, at least: what is accepted is drawn, so few of them scatter."""
RATIOS, CHANCES, DEPTHS = (1.0, 2.0, 4.0, 8.0), (0.5, 0.7, 0.9), (2, 4, 8)
FULL = 0.98
"""Load from which a draft counts as busy: below 1, since a window of rounds has ends."""
SPREAD = 0.1
"""Relative standard deviation of verifications where N_max is looked for: as in a real loop, phases do not lock."""
MOST = 128
"""Targets beyond which nobody looks."""


def alone_s(rows: int) -> float:
    """S of requests that are drafted one by one."""
    return SERVICE_S


def together_s(rows: int) -> float:
    """S(n)."""
    return SERVICE_S * (1 + GROWTH * (rows - 1))


def shown_rows(targets: tuple[int, ...], rounds: int) -> list[StarRow]:
    """Both kinds, one by one and batched."""
    rows = []
    for max_rows, service_s in ((1, alone_s), (MAX_ROWS, together_s)):
        for count in targets:
            plan = StarPlan(count, max_rows=max_rows, rounds=max(rounds, DRAFTS // count), **SHOWN)
            rows += [closed_row(plan, service_s), simulated_row(plan, service_s)]
    return rows


def plan_of(ratio: float, chance: float, depth: int, rounds: int) -> dict[str, Any]:
    """Return one line of the table of targets per draft. simulated values are None where they are beyond MOST."""
    back_s, tokens = ratio * SERVICE_S, emitted_tokens(chance, depth)
    plain_s = back_s
    closed = max_targets(SERVICE_S, back_s, tokens, plain_s)
    batched = max_targets_batched(together_s, back_s, tokens, plain_s, max_rows=MAX_ROWS)

    def row(targets: int, service_s: ServiceTime, max_rows: int, spread: float) -> StarRow:
        plan = StarPlan(targets, back_s, 0.0, chance, depth, max_rows=max_rows, spread=spread, rounds=rounds)
        return simulated_row(plan, service_s)

    def pays(service_s: ServiceTime, max_rows: int) -> Callable[[int], bool]:
        def of(targets: int) -> bool:
            found = row(targets, service_s, max_rows, SPREAD)
            return tokens * found.rounds_per_s / targets * plain_s >= 1  # with expected tokens, not the drawn ones

        return of

    full = full_targets(SERVICE_S, back_s)
    return {
        "return_over_draft": ratio, "acceptance": chance, "depth": depth, "tokens": tokens,
        "full": full, "full_simulated": _first(lambda n: row(n, alone_s, 1, 0.0).load >= FULL, full),
        "most": closed, "most_simulated": _last(pays(alone_s, 1), closed),
        "most_batched": batched, "most_batched_simulated": _last(pays(together_s, MAX_ROWS), batched),
    }  # fmt: skip


def _first(holds: Callable[[int], bool], guess: int) -> int | None:
    """Return the first number from which `holds` does, looked for around a guess."""
    at = guess
    while at > 1 and holds(at - 1):
        at -= 1
    while at <= MOST and not holds(at):
        at += 1
    return at if at <= MOST else None


def _last(holds: Callable[[int], bool], guess: int) -> int | None:
    """Return the last number at which `holds` does, 0 where nowhere, looked for around a guess; None: beyond MOST."""
    at = min(guess, MOST)
    if at == 0 or holds(at):
        while at < MOST and holds(at + 1):
            at += 1
        return at if at < MOST else None
    while at > 0 and not holds(at):
        at -= 1
    return at


def star_plan(
    out: Annotated[Path, typer.Option(help="file to write")],
    rounds: Annotated[int, typer.Option(help="rounds of each request, a quarter of them warm-up")] = 80,
    quick: Annotated[bool, typer.Option(help="few targets and plans, to see it work")] = False,
) -> None:
    """Compute and simulate."""
    targets, ratios = (TARGETS[:3], RATIOS[:1]) if quick else (TARGETS, RATIOS)
    chances, depths = (CHANCES[:2], DEPTHS[:1]) if quick else (CHANCES, DEPTHS)
    plans = [plan_of(ratio, chance, depth, rounds) for depth in depths for chance in chances for ratio in ratios]
    settings = {
        "service_s": SERVICE_S, "growth": GROWTH, "max_rows": MAX_ROWS, "rounds": rounds, "spread": SPREAD,
        "full": FULL, "shown": SHOWN, "drafts": DRAFTS,
    }  # fmt: skip
    rows = [asdict(each) for each in shown_rows(targets, rounds)]
    report = {"commit": source_commit(), "machine": machine_name(), **settings, "rows": rows, "plans": plans}
    out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    typer.echo(f"{len(rows)} rows and {len(plans)} plans in {out}")


if __name__ == "__main__":
    program.run(star_plan)
