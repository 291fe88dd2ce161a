"""What `adaserve profile --memory` shows: the ledger of an engine, as tables and as JSON. Measures nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adaserve_jax.memory.ledger import MIB, Ledger

WIDTH = 100


def show_ledger(ledger: Ledger) -> None:
    """To stdout: every part, in one table per layout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDTH))
    for title, expanded in _layouts(ledger).items():
        console.print(_table(ledger, title, expanded))
    limit = ledger.limit
    console.print(
        f"limit {limit.bytes / MIB:,.1f} MiB: {limit.source}"
        f"{'; copies on the host count too' if limit.covers_host else ''}",
        highlight=False,
    )


def write_ledger(path: Path, ledger: Ledger) -> None:
    """As JSON, in bytes: parts by layout, the limit, and what page and workspace are made of."""
    layouts = {
        title: [asdict(part) for part in ledger.parts(expanded=expanded)]
        for title, expanded in _layouts(ledger).items()
    }
    report: dict[str, Any] = {
        "kind": "adaserve ledger",
        "fits": ledger.fits,
        "limit": asdict(ledger.limit),
        "layouts": layouts,
        "num_pages": ledger.num_pages,
        "extension_pages": ledger.extension_pages,
        "target_page_bytes": ledger.sizes.target_page,
        "draft_page_bytes": ledger.sizes.draft_page,
        "reserve_bytes": ledger.sizes.reserve,
        "workspace_bytes_by_tokens": ledger.workspace.by_tokens if ledger.workspace is not None else None,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _layouts(ledger: Ledger) -> dict[str, bool]:
    """Titles, and whether the draft is away."""
    layouts = {"draft resident" if ledger.sizes.draft_weights else "without a draft": False}
    return layouts | ({"draft away, pages in its place": True} if ledger.extension_pages else {})


def _table(ledger: Ledger, title: str, expanded: bool) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for header in ("device, MiB", "host, MiB", "share of limit"):
        table.add_column(header, justify="right")
    parts = ledger.parts(expanded=expanded)
    for part in parts:
        table.add_row(
            part.name, _mib(part.device_bytes), _mib(part.host_bytes), _share(ledger.counted(part), ledger)
        )  # fmt: skip
    table.add_section()
    sums = (sum(part.device_bytes for part in parts), sum(part.host_bytes for part in parts))
    table.add_row("all", *(_mib(each) for each in sums), _share(ledger.taken(expanded=expanded), ledger))
    return table


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size else ""


def _share(size: int, ledger: Ledger) -> str:
    return f"{size / ledger.limit.bytes:.1%}"
