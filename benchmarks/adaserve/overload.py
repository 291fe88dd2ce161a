"""What a server does with three times what it can serve: do admitted requests keep their targets, and how soon are the
others refused?

    python -m benchmarks.adaserve.overload --out overload.json [--factor 3] [--seconds 30]

The embedded pair behind `adaserve serve`. Capacity is what a closed loop of as many clients as there are slots gets
through, requests per second; its second run carries the targets whose attainment is compared. Then requests come open
loop at `factor` times that rate, as a Poisson process, whatever the server does. Every request has a TPOT target of
--tpot-scale times the median TPOT of the first run, every other one a TTFT target too; every other pair is a stream.
Attainment: requests that met all their targets over those served. A refusal's time is from the connect to the end of
its answer; requests that were admitted and ended after `max_queue_wait` are counted apart.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.errors import AdaServeError
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.server.settings import ServerSettings
from benchmarks import program
from benchmarks.server.http_load import Answer, adaserve, command_line, parse_samples, quantile, request, served

HANG_LIMIT_S = 120.0
MAX_DROP = 0.05
MAX_QUEUE_WAIT_S = ServerSettings().max_queue_wait
"""Wait after which the server ends a request that it had admitted."""
MAX_REFUSAL_MS = 50.0
PROMPTS = ("def add(a, b):\n", "Tom has 3 apples and eats one.", "import os\n\nclass Reader:\n", "for line in lines:\n")


@dataclass(frozen=True)
class Load:
    """tpot_ms, ttft_ms: targets; None: none."""

    slots: int
    new_tokens: int
    seconds: float
    seed: int
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def body(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": self.new_tokens, "temperature": 0.8,
            "seed": number, "ignore_eos": True, "stream": number % 4 < 2,
        }  # fmt: skip
        if self.tpot_ms is not None:
            body["slo_tpot_ms"] = self.tpot_ms
            if number % 2:
                body["slo_ttft_ms"] = self.ttft_ms
        return body


async def closed_loop(port: int, load: Load) -> tuple[list[Answer], float]:
    """As many clients as slots, one request after the other; the answers, and the seconds that they took."""
    began = time.monotonic()
    answers: list[Answer] = []
    numbers = iter(range(10**9))

    async def client() -> None:
        while time.monotonic() < began + load.seconds:
            answers.append(await request(port, load.body(next(numbers))))

    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(load.slots))), load.seconds + HANG_LIMIT_S)
    return answers, time.monotonic() - began


async def open_loop(port: int, load: Load, rate: float) -> list[Answer]:
    """Requests at their own times. Raises TimeoutError when one hangs."""
    draws = random.Random(load.seed)
    due, tasks = time.monotonic(), []
    end = due + load.seconds
    while due < end:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        tasks.append(asyncio.ensure_future(request(port, load.body(len(tasks)))))
        due += draws.expovariate(rate)
    return list(await asyncio.wait_for(asyncio.gather(*tasks), HANG_LIMIT_S))


def metrics_of(answer: Answer) -> dict[str, Any]:
    return answer.events[-1][1]["metrics"] if answer.events else answer.body["metrics"]


def finished(answers: Sequence[Answer]) -> list[Answer]:
    """Return those that were served to their end. Raises AdaServeError: none was."""
    found = [answer for answer in answers if answer.status == 200 and answer.error is None]
    if not found:
        others = dict(Counter(f"{answer.status} {answer.error}" for answer in answers))
        raise AdaServeError(f"none of {len(answers)} requests was served to its end: {others}")
    return found


def attainment(answers: Sequence[Answer]) -> float:
    """Of those that were served to their end."""
    return sum(metrics_of(answer)["slo"]["met"] for answer in answers) / len(answers)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """What became of requests: how many, and of those admitted and refused what counts."""
    served_ones = finished(answers)
    late = [a for a in answers if a.status == 429 and a.end_s - a.sent_s >= MAX_QUEUE_WAIT_S]
    refused = [a for a in answers if a.status == 429 and a not in late]
    refusal_ms = [1e3 * (a.end_s - a.sent_s) for a in refused]
    found = [metrics_of(answer) for answer in served_ones]
    return {
        "offered": len(answers),
        "admitted": len(served_ones),
        "attainment": attainment(served_ones),
        "missed_tpot": sum(m["slo"]["tpot_ms"] > m["slo"]["tpot_target_ms"] for m in found),
        "missed_ttft": sum(
            m["slo"]["ttft_target_ms"] is not None and m["time_to_first_token_ms"] > m["slo"]["ttft_target_ms"]
            for m in found
        ),
        "tpot_ms_p50": median(m["slo"]["tpot_ms"] for m in found),
        "ttft_ms_p50": median(m["time_to_first_token_ms"] for m in found),
        "ttft_ms_p99": quantile([m["time_to_first_token_ms"] for m in found], 0.99),
        "queue_ms_max": max(m["queue_time_ms"] for m in found),
        "refused": len(refused),
        "ended_at_the_limit": len(late),
        "refused_without_retry_after": sum("retry-after" not in a.headers for a in [*refused, *late]),
        "retry_after_s": dict(sorted(Counter(int(a.headers.get("retry-after", -1)) for a in refused).items())),
        "refusal_ms_p50": quantile(refusal_ms, 0.5) if refused else None,
        "refusal_ms_p99": quantile(refusal_ms, 0.99) if refused else None,
        "others": dict(Counter(f"{a.status} {a.error}" for a in answers if a.status != 429 and a not in served_ones)),
    }


def failures(capacity: dict[str, Any], overload: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    if overload["attainment"] < capacity["attainment"] - MAX_DROP:
        found.append(f"attainment fell from {capacity['attainment']:.3f} to {overload['attainment']:.3f}")
    if overload["others"] or capacity["others"]:
        found.append(f"answers that are neither served nor refused: {overload['others'] or capacity['others']}")
    if not overload["refused"] or overload["refused_without_retry_after"]:
        found.append("expected refusals, each with Retry-After")
    elif overload["refusal_ms_p99"] > MAX_REFUSAL_MS:
        found.append(f"the 99th percentile of refusals took {overload['refusal_ms_p99']:.0f} ms")
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    factor: Annotated[float, typer.Option(help="how much more than the capacity is offered")] = 3.0,
    seconds: Annotated[float, typer.Option(help="of each of the three runs")] = 30.0,
    slots: Annotated[int, typer.Option(help="requests that run at once")] = 16,
    new_tokens: Annotated[int, typer.Option(help="tokens of each request")] = 64,
    tpot_scale: Annotated[float, typer.Option(help="TPOT target over the median TPOT at capacity")] = 2.0,
    ttft_ms: Annotated[float, typer.Option(help="TTFT target of every other request")] = 2000.0,
    seed: Annotated[int, typer.Option(help="of the arrivals")] = 0,
) -> None:
    """Measure a server at its capacity and at a multiple of it."""
    commit = source_commit()
    plain = Load(slots, new_tokens, seconds, seed)
    with served(adaserve(max_requests=slots, token_edges=(slots, 64), row_edges=(slots,))) as server:
        answers, took_s = asyncio.run(closed_loop(server.port, plain))
        answers = finished(answers)
        rate = len(answers) / took_s
        tpot_ms = tpot_scale * median(metrics_of(answer)["slo"]["tpot_ms"] for answer in answers)
        load = Load(slots, new_tokens, seconds, seed, tpot_ms, ttft_ms)
        capacity = summary(asyncio.run(closed_loop(server.port, load))[0])
        overload = summary(asyncio.run(open_loop(server.port, load, factor * rate)))
        samples = parse_samples(asyncio.run(request(server.port, path="/metrics")).body)
    report = {
        "commit": commit,
        "machine": machine_name(),
        "command": command_line(out),
        "capacity_requests_per_s": rate,
        "offered_requests_per_s": factor * rate,
        "slo_tpot_ms": tpot_ms,
        "slo_ttft_ms": ttft_ms,
        "compiles_after_ready": samples["adaserve_compiles_after_ready_total"],
        "capacity": capacity,
        "overload": overload,
        "failures": failures(capacity, overload),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("", "offered", "admitted", "attainment", "TTFT p99, ms", "refused", "refusal p99, ms")
    for name, row in (("capacity", capacity), (f"{factor:g} times", overload)):
        late = "-" if row["refusal_ms_p99"] is None else f"{row['refusal_ms_p99']:.1f}"
        counts = (str(row["offered"]), str(row["admitted"]), f"{row['attainment']:.3f}", f"{row['ttft_ms_p99']:.0f}")
        table.add_row(name, *counts, str(row["refused"]), late)
    Console().print(table)
    if report["failures"]:
        raise SystemExit("error: " + "; ".join(report["failures"]))


if __name__ == "__main__":
    program.run(main)
