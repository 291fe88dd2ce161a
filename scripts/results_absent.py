"""Table of docs/howto/gpu-and-tpu.md from a run of benchmarks/kernels/absent_devices.py. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import short_commit

HEADER = (
    "| device | target, devices | attention of target, draft | fits; pages; requests of full context "
    "| programs that compile | copies of a pool | arguments that the ledger counts | most registers; spilled bytes "
    "| verify: launches, kernels in them | verify: VMEM, SMEM | exchanged by verify "
    "|\n|---|---|---|---|---|---|---|---|---|---|---|"
)
MIB = 1 << 20


def absent_table(result: dict[str, Any]) -> str:
    """Return a row for each engine, and below the table what did not compile, in the compiler's words."""
    engines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        engines.setdefault((row["device"], row["target"], row["tp"], row["attention"]), []).append(row)
    lines, refusals = [], []
    for (device, target, tp, attention), rows in engines.items():
        failed = [row for row in rows if row.get("error")]
        refusals += [f"* `{device}`, {target}, `{attention}`, {row['kind']}: {row['error']}" for row in failed]
        if rows[0]["kind"] == "plan":
            lines.append(f"| {device} | {target}, {tp} | `{attention}` | not planned | | | | | | | |")
            continue
        first = rows[0]
        held = f"{'yes' if first['fits'] else 'no'}; {first['pages']:,}; {first['requests']} of {first['context']:,}"
        shares = [row["ledger_bytes"] / row["argument_bytes"] for row in rows if row.get("ledger_bytes")]
        verify = next((row for row in rows if row["kind"] == "verify"), {})
        exchanged = sum(verify.get("collectives", {}).values())
        lines.append(
            f"| {device} | {target}, {tp} | `{first['chosen']}`, `{first['chosen_by_draft']}` | {held} "
            f"| {len(rows) - len(failed)} of {len(rows)} | {sum(row['pool_copies'] for row in rows)} "
            f"| {_range(shares)} | {_kernels(rows)} | {_launches(verify)} | {_memory(verify)} "
            f"| {f'{exchanged / MIB:,.0f} MiB' if exchanged else ''} |"
        )
    commits = ", ".join(sorted({short_commit(row["commit"]) for row in result["rows"]}))
    about = (
        "Compiled with `python -m benchmarks.kernels.absent_devices --out absent-devices.json`: the largest program "
        f"of each kind, {result['layers']} layers, llama-1b as draft, bf16, no weights. Compiled for, not run on. jax "
        f"{result['jax_version']}, commits {commits}."
    )
    parts = ["\n".join([HEADER, *lines]), "\n".join(dict.fromkeys(refusals)), about, _deep(result.get("deep", []))]
    return "\n\n".join(part for part in parts if part)


def _deep(rows: list[dict[str, Any]]) -> str:
    """Return the workspace of an engine compiled with all layers beside the reserve that was planned for it."""
    if not rows:
        return ""
    first = rows[0]
    results = {row["kind"]: row["result_bytes"] - row["alias_bytes"] for row in rows if not _makes_pages(row["kind"])}
    temporary, kept = max(rows, key=lambda row: row["temporary_bytes"]), first["kept_bytes"]
    returned = max(results, key=lambda kind: results[kind])
    workspace = temporary["temporary_bytes"] + results[returned] + kept
    shares = [row["ledger_bytes"] / row["argument_bytes"] for row in rows if row.get("ledger_bytes")]
    return (
        f"With all {first['layers']} layers ({first['device']}, {first['target']}; `--deep`): the ledger counts "
        f"{_range(shares)} of the arguments of verify and catch-up. The workspace takes "
        f"{workspace / MIB:,.0f} MiB: {temporary['temporary_bytes'] / MIB:,.0f} of temporaries ({temporary['kind']}), "
        f"{results[returned] / MIB:,.0f} of results ({returned}), and {kept / MIB:,.0f} of tables of edits. That is "
        f"{workspace / first['reserve_bytes']:.0%} of the {first['reserve_bytes'] / MIB:,.0f} MiB that the ledger "
        f"reserves for it. Commit {short_commit(first['commit'])}."
    )


def _makes_pages(kind: str) -> bool:
    """Return whether a program's results are pages, which the ledger counts itself."""
    return kind in ("move", "empty pools of the draft", "empty extension")


def _kernels(rows: Iterable[dict[str, Any]]) -> str:
    counted = [row for row in rows if row.get("registers") is not None]
    if not counted:
        return ""
    return f"{max(row['registers'] for row in counted)}; {sum(row['spilled_bytes'] for row in counted)}"


def _launches(verify: dict[str, Any]) -> str:
    return "" if verify.get("launches") is None else f"{verify['launches']}, {verify['kernels']}"


def _memory(verify: dict[str, Any]) -> str:
    if verify.get("vmem_bytes") is None:
        return ""
    return f"{verify['vmem_bytes'] / MIB:.1f} MiB, {verify['smem_bytes'] / 1024:.0f} KiB"


def _range(shares: list[float]) -> str:
    if not shares:
        return ""
    return " to ".join(dict.fromkeys(f"{share:.1%}" for share in (min(shares), max(shares))))
