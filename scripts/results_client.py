"""The table of benchmarks/server/client_accuracy.py in docs/results.md."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import line, short_commit

HEADER = (
    "| client | server | requests | late, ms: p50 | p99 | max | error, ms: p50 | p99 | max | other processes |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
CELLS = ("late_p50_ms", "late_p99_ms", "late_max_ms", "error_p50_ms", "error_p99_ms", "error_max_ms")


def client_table(result: dict[str, Any]) -> str:
    """Return the table of one run."""
    rows = [
        line(
            each["client"], each["server"], str(each["requests"]),
            *("-" if each[name] is None else f"{each[name]:.2f}" for name in CELLS),
            "-" if each["others_share"] is None else f"{each['others_share']:.0%}",
        )
        for each in result["measured"]
    ]  # fmt: skip
    aims = result["aims_ms"]
    about = (
        f"Poisson arrivals at {result['rate_rps']:g} requests/s for {result['seconds']:g} s, {result['tokens']} tokens "
        f"each; *other processes*: their share of the cores' time. Aims: late p50 at most {aims['late_p50']:g} ms, "
        f"error p99 at most {aims['error_p99']:g} ms. Python {result['python']}, httptools {result['httptools']}: "
        f"{result['machine']}. Commit {short_commit(result['commit'])}."
    )
    return "\n\n".join([f"Measured with `{result['command']}`:", "\n".join([HEADER, *rows]), about])
