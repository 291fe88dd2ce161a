"""From measurements to rows, and from rows to the terminal. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.engine.throughput_rows import REFERENCE, Figures, ThroughputRow, aims, paired_ratio
from benchmarks.engine.throughput_systems import Looped

THROUGHPUT = (
    "requests", "T", "policy", "tokens/s", f"times {REFERENCE}", "tokens\nper step", "accepted", "texts that\ndiffer",
    "others'\nshare",
)  # fmt: skip
STEPS = (
    "requests", "T", "policy", "steps", "depth x width\nwhen drafting", "drafts in", "tree tokens\nper row",
    "ms per step", "draft", "verify", "decide",
)  # fmt: skip


def point_figures(found: dict[str, list[Looped]], requests: int, temperature: float) -> list[Figures]:
    """Rows of one point. Policies are compared with `ar`, or the first, as the same seed is to give the same text."""
    reference = REFERENCE if REFERENCE in found else next(iter(found))
    texts = [looped.token_ids for looped in found[reference]]
    return [
        figures_of(policy, requests, temperature, rounds, texts if policy != reference else [])
        for policy, rounds in found.items()
    ]


def figures_of(
    policy: str, requests: int, temperature: float, rounds: Sequence[Looped], texts: Sequence[list[list[int]]]
) -> Figures:
    """A policy's row. texts: of each round, what its own are compared with, as far as both came; empty: nothing."""
    pairs = [
        (ours, theirs)
        for looped, text in zip(rounds, texts, strict=False)
        for ours, theirs in zip(looped.token_ids, text, strict=True)
        if ours and theirs
    ]
    differing = [(ours, theirs) for ours, theirs in pairs if equal_tokens(ours, theirs) < min(len(ours), len(theirs))]
    steps = [step for looped in rounds for step in looped.steps]
    decoding = [step for step in steps if step.rows]
    drafting = [step for step in decoding if step.depth]
    rows, emitted, nodes = (sum(getattr(step, name) for step in decoding) for name in ("rows", "emitted", "nodes"))
    others = [looped.others_share for looped in rounds if looped.others_share is not None]

    def per_step_ms(*names: str) -> float:
        return 1e3 * sum(getattr(looped.totals, name) for looped in rounds for name in names) / len(steps)

    return Figures(
        system=policy,
        requests=requests,
        temperature=temperature,
        tps=[looped.tps for looped in rounds],
        tokens_per_step=emitted / rows,
        acceptance_rate=(emitted - rows) / (nodes - rows) if nodes > rows else None,
        drafting_share=len(drafting) / len(decoding),
        depth=fmean(step.depth for step in drafting) if drafting else None,
        width=fmean(step.width for step in drafting) if drafting else None,
        tree_tokens=nodes / rows,
        steps=len(steps) / len(rounds),
        step_ms=1e3 * sum(looped.seconds for looped in rounds) / len(steps),
        draft_ms=per_step_ms("draft_s"),
        verify_ms=per_step_ms("verify_s"),
        deciding_ms=per_step_ms("plan_s", "select_s", "commit_s"),
        texts_compared=len(pairs),
        differing=len(differing),
        equal_tokens=min((equal_tokens(a, b) for a, b in differing), default=None),
        others_share=max(others) if others else None,
    )


def equal_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def show(rows: Sequence[ThroughputRow]) -> None:
    """Show tokens/s, then what the engine's steps were, then the aims, met or not."""
    console = Console(width=170)
    first = rows[0]
    size = "" if first.target_params is None else f" ({first.target_params / 1e6:.1f}M)"
    console.print(
        f"{first.target}{size}, draft {first.draft}, {first.dtype}, {first.min_new_tokens} to {first.max_new_tokens} "
        f"new tokens each; {first.machine}; commit {first.commit[:12]}",
        highlight=False,
    )
    references = {row.point: row for row in rows if row.system == REFERENCE}
    console.print(_table("closed loop", THROUGHPUT, [_throughput_cells(r, references.get(r.point)) for r in rows]))
    console.print(_table("steps", STEPS, [_step_cells(row) for row in rows]))
    for aim in aims(rows):
        met = "[green]met[/green]   " if aim.met else "[red]MISSED[/red]"
        console.print(f"{met} {aim.text}", highlight=False)


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _point(row: ThroughputRow) -> tuple[str, str, str]:
    return str(row.requests), f"{row.temperature:g}", row.system


def _throughput_cells(row: ThroughputRow, reference: ThroughputRow | None) -> list[str]:
    ratio = "" if reference is None or reference is row else str(paired_ratio(row.tps, reference.tps))
    differ = f"{row.differing} of {row.texts_compared}" if row.texts_compared else ""
    return [
        *_point(row),
        f"{median(row.tps):.1f}",
        ratio,
        _number(row.tokens_per_step),
        _number(row.acceptance_rate),
        f"{differ}, from token {row.equal_tokens}" if row.differing else differ,
        _number(row.others_share),
    ]


def _step_cells(row: ThroughputRow) -> list[str]:
    shape = "" if row.depth is None or row.width is None else f"{row.depth:.1f} x {row.width:.1f}"
    shares = (_number(value) for value in (row.drafting_share, row.tree_tokens))
    times = (_number(value) for value in (row.step_ms, row.draft_ms, row.verify_ms, row.deciding_ms))
    return [*_point(row), _number(row.steps, 1), shape, *shares, *times]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
