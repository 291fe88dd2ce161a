"""Does `max_queue_wait` hold: how long do admitted requests wait, and would refused ones have waited long?

    python -m benchmarks.server.queue_wait --out queue_wait.json [--max-queue-wait 5]

A server on the embedded pair gets loads that make predictions hard: bursts of short and then of long outputs, short
ones after long ones, a mixture at twice the capacity, and an engine that slows down to a fifth (its process is stopped
four fifths of the time). Outputs have fixed lengths, and nothing has a target: the queue is first come, first served.

A refused request would have started once all that were admitted before it had, so its wait is at least from its arrival
to the last of their starts. It was refused needlessly if that is less than half of the limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.server.http_load import Answer, Served, adaserve, command_line, request, served

AIM_LONGEST, AIM_LEAST = 1.2, 0.5
SLOTS = 16
SHORT, LONG = 8, 64
ANSWER_LIMIT_S = 300.0
Load = Callable[[Served, float], Coroutine[Any, Any, list[Answer]]]


async def ask(port: int, tokens: int) -> Answer:
    body = {"prompt": "def add(a, b):\n", "max_tokens": tokens, "ignore_eos": True}
    return await asyncio.wait_for(request(port, body), ANSWER_LIMIT_S)


async def bursts(server: Served, _: float) -> list[Answer]:
    """500 short outputs at once, and when all are answered 500 long ones."""
    short = await asyncio.gather(*(ask(server.port, SHORT) for _ in range(500)))
    return [*short, *await asyncio.gather(*(ask(server.port, LONG) for _ in range(500)))]


async def short_after_long(server: Served, _: float) -> list[Answer]:
    """As many very long outputs as there are slots, one after the other for a while, then 500 short ones at once."""
    long = [answer for _ in range(2) for answer in await asyncio.gather(*(ask(server.port, 256) for _ in range(SLOTS)))]
    return [*long, *await asyncio.gather(*(ask(server.port, SHORT) for _ in range(500)))]


async def mixture(server: Served, rate: float) -> list[Answer]:
    """Short and long outputs by chance at twice the capacity, for half a minute."""
    return await open_loop(server.port, 2 * rate, 30.0)


async def slowdown(server: Served, rate: float) -> list[Answer]:
    """Four fifths of the capacity for 40 s; the engine is stopped most of the time from the 10th second to the 30th."""
    load = asyncio.ensure_future(open_loop(server.port, 0.8 * rate, 40.0))
    await asyncio.sleep(10.0)
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        os.kill(server.engine_pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)
        os.kill(server.engine_pid, signal.SIGCONT)
        await asyncio.sleep(0.05)
    return await load


async def open_loop(port: int, rate: float, seconds: float) -> list[Answer]:
    draws, tasks = random.Random(0), list[asyncio.Future[Answer]]()
    due = time.monotonic()
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        tasks.append(asyncio.ensure_future(ask(port, draws.choice((SHORT, LONG)))))
        due += draws.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def capacity(server: Served) -> float:
    """Return the requests per second, short and long in turns, that as many clients as slots get through."""
    began = time.monotonic()
    done = 0
    while time.monotonic() < began + 10.0:
        await asyncio.gather(*(ask(server.port, (SHORT, LONG)[number % 2]) for number in range(SLOTS)))
        done += SLOTS
    return done / (time.monotonic() - began)


def starts(answers: Sequence[Answer]) -> Iterator[tuple[float, float]]:
    """Yield arrival and start, seconds, of each request that was served, by arrival."""
    for answer in sorted(answers, key=lambda answer: answer.sent_s):
        if answer.status == 200:
            yield answer.sent_s, answer.sent_s + answer.body["metrics"]["queue_time_ms"] / 1e3


def summary(answers: Sequence[Answer], limit_s: float) -> dict[str, Any]:
    """Count what became of requests. Raises SystemExit for an answer that is neither served nor refused with advice."""
    for answer in answers:
        if answer.status not in (200, 429) or (answer.status == 429 and "retry-after" not in answer.headers):
            raise SystemExit(f"error: answered {answer.status} {answer.error}")
    started = list(starts(answers))
    # Refused at once, or ended by the engine after the limit: then it was admitted, and waited as long as that took.
    refused = [a for a in answers if a.status == 429 and a.end_s - a.sent_s < limit_s]
    ended = [a.end_s - a.sent_s for a in answers if a.status == 429 and a.end_s - a.sent_s >= limit_s]
    would_wait = [max((start - a.sent_s for sent, start in started if sent <= a.sent_s), default=0.0) for a in refused]
    return {
        "served": len(started),
        "ended_at_the_limit": len(ended),
        "refused_at_once": len(refused),
        "longest_wait_over_limit": max([start - sent for sent, start in started] + ended) / limit_s,
        "refused_needlessly": sum(wait < AIM_LEAST * limit_s for wait in would_wait),
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    max_queue_wait: Annotated[float, typer.Option(help="longest wait, seconds")] = 5.0,
) -> None:
    """Measure each load and write what was found."""
    commit, rows = source_commit(), []
    command = adaserve(
        max_requests=SLOTS,
        token_edges=(SLOTS, 64),
        row_edges=(SLOTS,),
        max_inflight=2000,
        max_queue_wait=max_queue_wait,
    )
    loads: list[Load] = [bursts, short_after_long, mixture, slowdown]
    with served(command) as server:
        rate = asyncio.run(capacity(server))
        for load in loads:
            answers = asyncio.run(load(server, rate))
            rows.append({"load": load.__name__, **summary(answers, max_queue_wait)})
    report = {
        "commit": commit, "machine": machine_name(), "command": command_line(out), "max_queue_wait_s": max_queue_wait,
        "capacity_requests_per_s": rate,
        "aims": {"longest_wait_over_limit": AIM_LONGEST, "least_wait_of_refused_over_limit": AIM_LEAST}, "rows": rows,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(
        "load", "served", "ended at the limit", "refused at once", "longest wait / limit", "refused needlessly"
    )
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
