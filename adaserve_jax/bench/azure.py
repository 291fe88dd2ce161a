"""Reads Azure's LLM inference traces (2023): arrival time, prompt tokens and output tokens of each request, no target.

CSV, gzip or plain, with the header TIMESTAMP,ContextTokens,GeneratedTokens. Knows nothing of machines or policies.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from adaserve_jax.bench.traces import Trace, TraceRequest
from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOST_ROWS = 1_000_000
MOST_TOKENS = 1 << 20
MOST_BYTES = 64 << 20
"""Larger files, uncompressed, and rows beyond these bounds are refused."""
MICROSECONDS = len("2023-11-16 18:15:46.680590")
"""What datetime reads of a timestamp; the files have one digit more."""


def load_azure(path: Path, slo_class: str = "default") -> Trace:
    """The requests of a file in order of arrival, counted from the earliest, all of one class and without targets.

    Raises ConfigError naming file, line and field.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read trace {path}: {error}") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"trace {path} has more than {MOST_BYTES} bytes; cut it")
    rows = list(_rows(text, path))
    if not rows:
        raise ConfigError(f"trace {path} holds no request")
    first = min(at for at, _, _ in rows)
    requests = sorted(
        (TraceRequest((at - first).total_seconds(), prompt, output, SLO(), slo_class) for at, prompt, output in rows),
        key=lambda request: request.due_s,
    )
    return Trace(path.name, hashlib.sha256(raw).hexdigest(), tuple(requests))


def _rows(text: str, path: Path) -> Iterator[tuple[datetime, int, int]]:
    reader = csv.reader(text.splitlines())
    header = next(reader, [])
    if header != HEADER:
        raise ConfigError(f"{path}:1: expected the header {','.join(HEADER)}, got {','.join(header)!r}")
    for row in reader:
        if not row:
            continue
        where = f"{path}:{reader.line_num}"
        if reader.line_num > MOST_ROWS + 1:
            raise ConfigError(f"{where}: expected at most {MOST_ROWS} requests; cut the file")
        if len(row) != len(HEADER):
            raise ConfigError(f"{where}: expected {len(HEADER)} fields, got {len(row)}")
        yield _time(row[0], where), _tokens(row[1], HEADER[1], where), _tokens(row[2], HEADER[2], where)


def _time(text: str, where: str) -> datetime:
    try:
        at = datetime.strptime(text[:MICROSECONDS], "%Y-%m-%d %H:%M:%S.%f")
    except ValueError:
        at = None
    if at is None or not (text[MICROSECONDS:] or "0").isdecimal():
        raise ConfigError(f"{where}: TIMESTAMP: expected a time as 2023-11-16 18:15:46.6805900, got {text!r}")
    return at


def _tokens(text: str, field: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST_TOKENS and len(text) <= 9):
        raise ConfigError(f"{where}: {field}: expected an integer from 1 to {MOST_TOKENS}, got {text!r}")
    return int(text)
