"""`adaserve report`: what a server did in a time, from the file that it writes with --records."""

from __future__ import annotations

import re
import time
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.cli.report_text import as_json, as_markdown, nothing_found, print_table
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.served_report import report_of

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class Format(StrEnum):
    table = "table"
    markdown = "markdown"
    json = "json"


def report(
    records: Annotated[
        Path, typer.Option("--from", help="file that `adaserve serve --records` writes, or has written")
    ],
    since: Annotated[
        str, typer.Option(help="choices that ended since then: 30m, 1h, 7d before now, or such as 2026-01-31T08:00")
    ] = "1h",
    until: Annotated[str, typer.Option(help="and before then, written likewise; now: all there are")] = "now",
    slo_class: Annotated[str | None, typer.Option("--class", help="this SLO class only")] = None,
    key: Annotated[str | None, typer.Option(help="requests that came with the API key of this name only")] = None,
    format: Annotated[Format, typer.Option(help="how to write the report")] = Format.table,
) -> None:
    """Attainment, goodput, times, tokens and causes of violations, of a server that runs or ran.

    Definitions: docs/metrics.md. A time without a zone is the local one.
    """
    now = time.time()
    until_unix_s = float("inf") if until == "now" else parse_time(until, now, "--until")
    since_unix_s = parse_time(since, now, "--since")
    if since_unix_s >= until_unix_s:
        raise ConfigError(f"--since must be before --until, got {since} and {until}")
    found = report_of(records, since_unix_s=since_unix_s, until_unix_s=until_unix_s, slo_class=slo_class, key=key)
    if format is Format.json:
        typer.echo(as_json(found))
    elif not found.classes:
        typer.echo(nothing_found(records, found, slo_class=slo_class, key=key))
    elif format is Format.markdown:
        typer.echo(as_markdown(found))
    else:
        print_table(found)


def parse_time(text: str, now_unix_s: float, option: str) -> float:
    """Unix time of "1h" (before now) or of an ISO 8601 date or time. Raises ConfigError naming the option."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if ago is not None:
        return max(0.0, now_unix_s - float(ago[1]) * UNITS_S[ago[2]])
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            f"{option} must be a time before now such as 30m, 1h or 7d, or an ISO time such as 2026-01-31T08:00, "
            f"got {text!r}"
        ) from error
