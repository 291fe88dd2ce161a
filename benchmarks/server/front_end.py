"""What the front end adds: the time from a step's end to the token on the client's socket, and tokens per second
through HTTP beside the engine alone.

    python -m benchmarks.server.front_end --out front_end.json [--streams 64] [--steps 20] [--seconds 20] [--rounds 3]

Latency: an engine that steps at a fixed pace and computes nothing (paced_engine.py) serves so many streams at once, all
of which get a token in every step; the token's text is the time of its step, and the client, a process of its own,
notes when it read it. Client, server and engine share the machine's cores, as they would.

Throughput: the embedded pair generates for so many requests at once, in this process through `LLM`, and through
`adaserve serve`, in turns; tokens/s is all new tokens over the time from the first request to the last token.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import selectors
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.engine.cpu_time import cpu_s
from benchmarks.server.http_load import FEW_PROGRAMS, HOST, Answer, adaserve, command_line, quantile, request, served

PACED = Path(__file__).resolve().parent / "paced_engine.py"
PROMPT = "def add(a, b):\n"
SETTLE_STEPS = 5
"""Of each stream, at its begin and its end: then not all streams are there."""
STAMP = re.compile(rb'"text":\s*"(\d+\.\d+) "')
AIM_P50_MS, AIM_P99_MS = 2.0, 8.0


def read_streams(port: int, streams: int, tokens: int) -> list[float]:
    """Seconds from each step's end to its token here, over all streams. Reads first and looks at what it read later."""
    poll = selectors.DefaultSelector()
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(streams):
        connection = socket.create_connection((HOST, port))
        connection.sendall(head + body)
        poll.register(connection, selectors.EVENT_READ)
    read: list[tuple[int, float, bytes]] = []
    left = streams
    while left:
        for key, _ in poll.select():
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            read.append((key.fd, time.monotonic(), data))
            if not data:
                poll.unregister(key.fileobj)
                left -= 1
    return latencies(read, tokens)


def latencies(read: list[tuple[int, float, bytes]], tokens: int) -> list[float]:
    """From what was read of each connection, and when. Raises SystemExit when a token is missing."""
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for stream, at, data in read:
        by_stream.setdefault(stream, []).extend((at, float(stamp)) for stamp in STAMP.findall(data))
    found = []
    for pairs in by_stream.values():
        if len(pairs) != tokens:
            raise SystemExit(f"error: expected {tokens} tokens of every stream, got {len(pairs)}")
        found += [at - stamp for at, stamp in pairs[SETTLE_STEPS:-SETTLE_STEPS]]
    return found


def measure_latency(streams: int, steps_per_s: int, seconds: float) -> dict[str, Any]:
    tokens = int(seconds * steps_per_s) + 2 * SETTLE_STEPS
    spawned = multiprocessing.get_context("spawn")
    with served([sys.executable, str(PACED), str(steps_per_s)]) as server, spawned.Pool(1) as client:
        client.apply(read_streams, (server.port, streams, steps_per_s))  # once for nothing
        began = cpu_s(server.process.pid)
        found = client.apply(read_streams, (server.port, streams, tokens))
        used = cpu_s(server.process.pid) - began
    return {
        "streams": streams,
        "steps_per_s": steps_per_s,
        "tokens": len(found),
        "p50_ms": 1e3 * quantile(found, 0.5),
        "p90_ms": 1e3 * quantile(found, 0.9),
        "p99_ms": 1e3 * quantile(found, 0.99),
        "max_ms": 1e3 * max(found),
        "server_cpu_us_per_token": 1e6 * used / (streams * tokens),
        "aims_ms": {"p50": AIM_P50_MS, "p99": AIM_P99_MS},
    }


async def all_at_once(port: int, bodies: list[dict[str, Any]]) -> list[Answer]:
    return list(await asyncio.gather(*(request(port, body) for body in bodies)))


def measure_throughput(streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second through HTTP and alone, in turns; the first round is for nothing."""
    options = {**FEW_PROGRAMS, "max_requests": streams, "token_edges": (streams, 2 * streams), "row_edges": (streams,)}
    http: list[float] = []
    alone: list[float] = []
    with LLM(**options) as llm, served(adaserve(**options)) as server:
        for number in range(rounds + 1):
            seeds = [number * streams + i for i in range(streams)]
            params = [SamplingParams(max_tokens=tokens, temperature=0.8, seed=s, ignore_eos=True) for s in seeds]
            bodies = [
                {
                    "prompt": PROMPT,
                    "max_tokens": tokens,
                    "temperature": 0.8,
                    "seed": s,
                    "ignore_eos": True,
                    "stream": True,
                }
                for s in seeds
            ]
            began = time.perf_counter()
            outputs = llm.generate([PROMPT] * streams, params)
            alone.append(streams * tokens / (time.perf_counter() - began))
            began = time.perf_counter()
            answers = asyncio.run(all_at_once(server.port, bodies))
            http.append(streams * tokens / (time.perf_counter() - began))
            if [output.text for output in outputs] != [answer.text for answer in answers]:
                differ = sum(o.text != a.text for o, a in zip(outputs, answers, strict=True))
                Console(stderr=True).print(f"round {number}: {differ} of {streams} texts differ (near-ties)")
    ratios = [a / b for a, b in zip(http[1:], alone[1:], strict=True)]
    return {
        "streams": streams,
        "new_tokens": tokens,
        "http_tps": http[1:],
        "alone_tps": alone[1:],
        "ratio_median": median(ratios),
        "config": options,
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    streams: Annotated[int, typer.Option(help="streams at once")] = 64,
    steps: Annotated[int, typer.Option(help="steps per second of the paced engine")] = 20,
    seconds: Annotated[float, typer.Option(help="how long the paced engine is watched")] = 20.0,
    new_tokens: Annotated[int, typer.Option(help="tokens of each request on the real engine")] = 128,
    rounds: Annotated[int, typer.Option(help="rounds on the real engine; 0: none")] = 3,
) -> None:
    """Measure the front end, and write and show what was found."""
    commit = source_commit()
    latency = measure_latency(streams, steps, seconds)
    throughput = measure_throughput(streams, new_tokens, rounds) if rounds else None
    report = {
        "commit": commit,
        "machine": machine_name(),
        "command": command_line(out),
        "latency": latency,
        "throughput": throughput,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("streams", "p50, ms", "p90", "p99", "max", "server CPU, us/token")
    keys = ("p50_ms", "p90_ms", "p99_ms", "max_ms", "server_cpu_us_per_token")
    table.add_row(str(streams), *(f"{latency[key]:.2f}" for key in keys))
    Console().print(table)
    if throughput is not None:
        rates = (sorted(throughput[key])[rounds // 2] for key in ("http_tps", "alone_tps"))
        Console().print("tokens/s through HTTP {:.0f}, alone {:.0f}".format(*rates))


if __name__ == "__main__":
    typer.run(main)
