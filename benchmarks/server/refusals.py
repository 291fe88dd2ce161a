"""Measure what a body that is too large costs the server: seconds until its 400, memory, and the tokens of others.

    python -m benchmarks.server.refusals --out refusals.json [--at-once 20]

A server on the embedded pair gets each body alone and as many at once, while another process reads a stream. Bodies are
within `max_body_bytes`. Gaps are between two events of the stream; "quiet" is the largest one without bodies.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.server.http_load import Answer, Connection, adaserve, command_line, rss_mib, served

AIM_S, AIM_GAP_MS = 0.3, 50.0
MEGABYTES = 3_900_000
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, path and body of each attack."""
    text = "x" * MEGABYTES
    yield "one long text", COMPLETIONS, {"prompt": text}
    yield "long words", COMPLETIONS, {"prompt": "return " * (MEGABYTES // 7)}
    yield "token ids", COMPLETIONS, {"prompt": [7] * (MEGABYTES // 3)}
    yield "fewer token ids", COMPLETIONS, {"prompt": [7] * 250_000}
    yield "empty lists", COMPLETIONS, {"prompt": [[]] * (MEGABYTES // 4)}
    yield "fewer empty lists", COMPLETIONS, {"prompt": [[]] * 100_000}
    yield "short texts", COMPLETIONS, {"prompt": ["a"] * (MEGABYTES // 5)}
    yield "biases", COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MEGABYTES // 12)}}
    yield "stop texts", COMPLETIONS, {"prompt": "a", "stop": ["a"] * 250_000}
    yield "unknown fields", COMPLETIONS, {"prompt": "a"} | {f"f{i}": 1 for i in range(250_000)}
    yield "long message", CHAT, {"messages": [{"role": "user", "content": text}]}
    yield "many messages", CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}
    yield "many parts", CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]}
    yield "tokenize a long text", TOKENIZE, {"prompt": text}
    yield "tokenize a long message", TOKENIZE, {"messages": [{"role": "user", "content": text}]}


def read_stream(port: int, found: Any, stop: Event) -> None:
    """Read one stream after another until `stop`, and send the times of events and of a stream's begin."""

    async def read() -> None:
        times: list[float] = []
        while not stop.is_set():
            connection = await Connection.open(port)
            body = {"prompt": "def add(a, b):", "max_tokens": 400, "stream": True, "ignore_eos": True}
            connection.send("POST", COMPLETIONS, json.dumps(body).encode())
            answer = await connection.head(time.monotonic())
            await connection.read(answer)
            times += [float("nan"), *(at for at, _ in answer.events)]
            connection.close()
        found.send(times)

    asyncio.run(read())


def largest_gap_ms(times: list[float], begin: float, end: float) -> float:
    gaps = [after - at for at, after in pairwise(times) if begin <= after and at <= end]
    return 1e3 * max((gap for gap in gaps if gap == gap), default=0.0)


async def post(port: int, path: str, content: bytes) -> Answer:
    """Send a body that is encoded already, which takes its time for large ones."""
    sent_s = time.monotonic()
    connection = await Connection.open(port)
    try:
        connection.send("POST", path, content)
        return await connection.read(await connection.head(sent_s))
    finally:
        connection.close()


async def send(port: int, path: str, content: bytes, count: int) -> list[float]:
    """Send a body so many times at once; return seconds until each answer. Raises SystemExit for a status other
    than 200 and 400."""
    answers = await asyncio.gather(*(post(port, path, content) for _ in range(count)))
    if any(answer.status not in (200, 400) for answer in answers):
        raise SystemExit(f"error: {path} answered {answers[0].status}")
    return [answer.end_s - answer.sent_s for answer in answers]


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    at_once: Annotated[int, typer.Option(help="bodies sent together")] = 20,
) -> None:
    """Measure each body and write what was found."""
    commit, rows, spans = source_commit(), [], []
    spawned = multiprocessing.get_context("spawn")
    with served(adaserve()) as server:
        ours, theirs = spawned.Pipe()
        stop = spawned.Event()
        reader = spawned.Process(target=read_stream, args=(server.port, theirs, stop))
        reader.start()
        time.sleep(5)
        spans.append(("quiet", time.monotonic() - 4, time.monotonic()))
        for name, path, body in bodies():
            content = json.dumps(body).encode()
            alone = max(asyncio.run(send(server.port, path, content, 1))[0] for _ in range(3))
            begin = time.monotonic()
            together = asyncio.run(send(server.port, path, content, at_once))
            spans.append((name, begin, time.monotonic()))
            rows.append({"body": name, "alone_s": alone, "last_of_them_s": max(together)})
            rows[-1]["rss_mib"] = rss_mib(server.process.pid)
        stop.set()
        times = ours.recv()
        reader.join()
    quiet, *gaps = [largest_gap_ms(times, begin, end) for _, begin, end in spans]
    for row, gap in zip(rows, gaps, strict=True):
        row["gap_ms"] = gap
    report = {
        "commit": commit, "machine": machine_name(), "command": command_line(out), "at_once": at_once,
        "aims": {"alone_s": AIM_S, "gap_beyond_quiet_ms": AIM_GAP_MS}, "quiet_gap_ms": quiet, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("body", "alone, s", f"last of {at_once}, s", "memory after, MiB", "largest gap beside, ms")
    for row in rows:
        table.add_row(row["body"], *(f"{row[key]:.3g}" for key in ("alone_s", "last_of_them_s", "rss_mib", "gap_ms")))
    Console().print(table, f"largest gap without: {quiet:.1f} ms")


if __name__ == "__main__":
    typer.run(main)
