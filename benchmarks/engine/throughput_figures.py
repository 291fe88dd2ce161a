"""From measurements to rows, and from rows to the terminal. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.engine.throughput_rows import REFERENCE, Figures, ThroughputRow, aims
from benchmarks.engine.throughput_systems import Measured

THROUGHPUT = (
    "requests", "T", "system", "decode\ntokens/s", f"times {REFERENCE}", "whole call\ntokens/s", f"times {REFERENCE}",
    "tokens\nper step", "accepted", "texts that\ndiffer", "others'\nshare",
)  # fmt: skip
STEPS = (
    "requests", "T", "policy", "steps", "depth x width\nwhen drafting", "drafts in", "tree tokens\nper row",
    "ms per step", "draft", "verify", "decide",
)  # fmt: skip


def point_figures(
    found: dict[str, list[Measured]], policies: Sequence[str], requests: int, temperature: float
) -> list[Figures]:
    """Rows of one point. Policies are compared with `ar`, or the first, at every temperature, since the same seed is
    to give the same text; transformers draws by another generator and is compared where it is greedy."""
    reference = REFERENCE if REFERENCE in found else policies[0]
    texts = [measured.token_ids for measured in found[reference]]
    rows = []
    for system, rounds in found.items():
        comparable = system != reference and (system in policies or temperature == 0)
        rows.append(figures_of(system, requests, temperature, rounds, texts if comparable else []))
    return rows


def figures_of(
    system: str, requests: int, temperature: float, rounds: Sequence[Measured], texts: Sequence[list[list[int]]]
) -> Figures:
    """A system's row. texts: of each round, what its own are compared with; empty: nothing."""
    pairs = [(a, b) for r, text in zip(rounds, texts, strict=False) for a, b in zip(r.token_ids, text, strict=True)]
    totals = [r.totals for r in rounds if r.totals is not None]
    count = sum(t.steps for t in totals)
    steps = [step for r in rounds for step in r.steps if step.rows]
    drafting = [step for step in steps if step.depth]
    drafted, forwards = sum(r.drafted for r in rounds), sum(r.forwards for r in rounds)
    decode_tps = [r.decode_tps for r in rounds if r.decode_tps is not None]
    others = [r.others_share for r in rounds if r.others_share is not None]

    def per_step_ms(*names: str) -> float | None:
        return 1e3 * sum(getattr(t, name) for t in totals for name in names) / count if count else None

    return Figures(
        system=system,
        requests=requests,
        temperature=temperature,
        whole_tps=[r.whole_tps for r in rounds],
        decode_tps=decode_tps or None,
        tokens_per_step=sum(r.decoded_tokens for r in rounds) / forwards if forwards else None,
        acceptance_rate=sum(r.accepted for r in rounds) / drafted if drafted else None,
        drafting_share=len(drafting) / len(steps) if steps else None,
        depth=fmean(step.depth for step in drafting) if drafting else None,
        width=fmean(step.width for step in drafting) if drafting else None,
        tree_tokens=sum(step.nodes for step in steps) / sum(step.rows for step in steps) if steps else None,
        steps=count / len(rounds) if count else None,
        step_ms=1e3 * sum(r.wall_s for r in rounds) / count if count else None,
        draft_ms=per_step_ms("draft_s"),
        verify_ms=per_step_ms("verify_s"),
        deciding_ms=per_step_ms("plan_s", "select_s", "commit_s"),
        sequences=len(pairs),
        differing=sum(a != b for a, b in pairs),
        equal_tokens=min((equal_tokens(a, b) for a, b in pairs), default=None),
        others_share=max(others) if others else None,
    )


def equal_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def show(rows: Sequence[ThroughputRow]) -> None:
    """Throughput, then what the engine's steps were, then the aims, met or not."""
    console = Console(width=170)
    first = rows[0]
    size = "" if first.target_params is None else f" ({first.target_params / 1e6:.1f}M)"
    console.print(
        f"{first.target}{size}, draft {first.draft}, {first.dtype}, {first.new_tokens} new tokens each; "
        f"{first.machine}; commit {first.commit[:12]}",
        highlight=False,
    )
    references = {(row.requests, row.temperature): row for row in rows if row.system == REFERENCE}
    by_point = [(row, references.get((row.requests, row.temperature))) for row in rows]
    console.print(_table("throughput", THROUGHPUT, [_throughput_cells(*pair) for pair in by_point]))
    console.print(_table("steps of the engine", STEPS, [_step_cells(row) for row in rows if row.steps]))
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
    decode, whole = row.times(reference)
    differ = f"{row.differing} of {row.sequences}" if row.sequences else ""
    return [
        *_point(row),
        "" if row.decode_tps is None else f"{median(row.decode_tps):.1f}",
        "" if decode is None else str(decode),
        f"{median(row.whole_tps):.1f}",
        "" if whole is None else str(whole),
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
