"""What AdaServe's figure 15 states, read from benchmarks/engine/host_share.py. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.entry import Claim, Folders, Found
from benchmarks.papers.reading import figure, read_json, series

POLICY = "adaserve"
PHASES = ("plan", "draft", "select", "verify", "commit")
MINIMAL = 0.01
"""The largest share of the serving time that counts as next to nothing."""
SHARE_CLAIMS = (
    Claim("share of the serving time that selection takes", "select share", "at most", MINIMAL, 0.0041, "share"),
    Claim("share of the serving time, with the choice of depth, width and budget", "plan and select share",
          "at most", MINIMAL, None,
          "share"),
)  # fmt: skip


def host_share(step: str) -> Callable[[Folders], Found]:
    """Of the step that ran the benchmark; the paper's number is that of its larger model."""

    def read(folders: Folders) -> Found:
        result = read_json(folders[step] / "share.json")
        row = next(row for row in result["rows"] if row["policy"] == POLICY)
        values = {
            "select share": row["select_ms"] / row["wall_ms"],
            "plan and select share": row["plan_and_select_share"],
        }
        bars = series({phase: {POLICY: row[f"{phase}_ms"]} for phase in PHASES})
        caption = f"Milliseconds per step, {result['requests']} requests at once."
        shown = figure("phases", "Phases of a step", caption, "policy", [("phases", "ms per step", bars)], kind="stack")
        return Found(values, (shown,), {name: str(result[name]) for name in ("commit", "machine")})

    return read
