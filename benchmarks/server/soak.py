"""A server under everything that clients do, for as long as one likes: nothing lost, nothing leaked.

    python -m benchmarks.server.soak --out soak.json --minutes 10
    python -m benchmarks.server.soak --out soak.json --elastic             # the draft's memory comes and goes
    python -m benchmarks.server.soak --out soak.json --kill-service-s 75   # a draft service dies every 75 seconds

The embedded pair in deterministic mode behind `adaserve serve`, and so many clients at once, each of which does one
thing after the other, drawn at random: streams and bodies read to their end, streams left in the middle, connections
closed before the first byte or in the midst of the request, bodies too large or not JSON, impossible targets. Every
text that was read to its end must be, to the character and in its number of tokens, what the same request gave alone
before; every part of one, its beginning. Afterwards nothing runs, no page is used, nothing was compiled, and the memory
of both processes is what it was when they had warmed up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks.server.http_load import (
    Connection,
    Served,
    adaserve,
    command_line,
    free_port,
    parse_samples,
    request,
    rss_mib,
    served,
)

CASES = 48
MAX_BODY = 65536
FEW_PAGES = 64
"""With `--elastic`; 16 requests of the cases' length need about 150."""
IN_TURNS = Path(__file__).with_name("in_turns.py")
"""Policy file that drafts for some steps and not for as many."""
SAMPLE_S = 1.0
IDLE_LIMIT_S = 30.0
HANG_LIMIT_S = 120.0
MAX_DRIFT = 0.02
"""Share of a process's memory, once warm; more is a leak."""
SCHEMA = {
    "type": "object", "required": ["name", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
}  # fmt: skip
EXTRAS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {"100": 2.0, "200": -100}},
    {"logprobs": 2}, {"bad_words": ["the", "return"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "tagged", "schema": SCHEMA}}},
)  # fmt: skip
"""What else the cases ask for, in turn."""
USED = 'adaserve_kv_pages{slab="base",state="used"}'
PROMPTS = ("def add(a, b):\n", "Tom has 3 apples and eats one.", "import os\n\nclass Reader:\n", "for line in lines:\n")


@dataclass(frozen=True)
class Case:
    """A request that is sent again and again, and what it gives alone."""

    body: dict[str, Any]
    text: str
    tokens: int


@dataclass
class Soak:
    """What the clients share: what they ask, whether to go on, and what they found."""

    port: int
    cases: list[Case]
    draws: random.Random
    end_s: float
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def case(self) -> tuple[Case, dict[str, Any]]:
        """One of them, with targets that change nothing of its text."""
        case = self.draws.choice(self.cases)
        slo = self.draws.choice(({}, {"slo_tpot_ms": 5}, {"slo_tpot_ms": 50, "slo_ttft_ms": 2000}, {"slo_relative": 3}))
        return case, case.body | slo

    def expect(self, ok: bool, what: str) -> None:
        if not ok:
            self.counts["failures"] += 1
            self.failures = [*self.failures, what][:20]

    async def client(self) -> None:
        actions, weights = zip(*((action, weight) for action, weight in ACTIONS.items()), strict=True)
        while time.monotonic() < self.end_s:
            (action,) = self.draws.choices(actions, weights)
            self.counts[action.__name__] += 1
            try:
                await asyncio.wait_for(action(self), HANG_LIMIT_S)
            except Exception as error:  # whatever came back is a finding, not the end of the run
                self.expect(False, f"{action.__name__}: {type(error).__name__} {error}")


async def stream(soak: Soak) -> None:
    await whole(soak, {"stream": True, "stream_options": {"include_usage": True}})


async def body(soak: Soak) -> None:
    await whole(soak, {})


async def whole(soak: Soak, how: dict[str, Any]) -> None:
    """An answer that is read to its end is what the request gave alone."""
    case, asked = soak.case()
    answer = await request(soak.port, asked | how)
    if answer.status == 429:
        soak.counts["refused"] += 1
        soak.expect("retry-after" in answer.headers, "429 without Retry-After")
        await asyncio.sleep(0.2)
        return
    soak.expect(answer.status == 200 and answer.error is None, f"status {answer.status} {answer.error}")
    last = answer.events[-1][1] if answer.events else answer.body
    soak.expect(answer.text == case.text, f"expected {case.text!r}, got {answer.text!r}")
    soak.expect(last.get("usage", {}).get("completion_tokens") == case.tokens, f"expected {case.tokens} tokens, {last}")
    soak.expect(answer.done or not how, "a stream without [DONE]")
    soak.counts["tokens compared"] += case.tokens


async def leave_midway(soak: Soak) -> None:
    """What had come by then is the beginning of the text."""
    case, asked = soak.case()
    connection = await Connection.open(soak.port)
    connection.send("POST", "/v1/completions", json.dumps(asked | {"stream": True}).encode())
    answer = await connection.read(await connection.head(time.monotonic()), soak.draws.randint(1, 12))
    connection.close()
    if answer.status == 200:
        soak.expect(case.text.startswith(answer.text), f"expected the begin of {case.text!r}, got {answer.text!r}")


async def leave_before_the_first_byte(soak: Soak) -> None:
    connection = await Connection.open(soak.port)
    asked = soak.case()[1] | {"stream": soak.draws.random() < 0.5}
    connection.send("POST", "/v1/completions", json.dumps(asked).encode())
    await asyncio.sleep(soak.draws.choice((0.0, 0.005, 0.05)))
    connection.close()


async def leave_in_the_request(soak: Soak) -> None:
    connection = await Connection.open(soak.port)
    connection.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    await asyncio.sleep(soak.draws.choice((0.0, 0.02)))
    connection.close()


async def refused(soak: Soak, content: bytes, status: int, code: str) -> None:
    connection = await Connection.open(soak.port)
    connection.send("POST", "/v1/completions", content)
    answer = await connection.read(await connection.head(time.monotonic()))
    connection.close()
    soak.expect((answer.status, answer.error) == (status, code), f"expected {code}, got {answer.status} {answer.error}")


async def too_large(soak: Soak) -> None:
    await refused(soak, json.dumps({"prompt": "x" * MAX_BODY}).encode(), 413, "request_too_large")


async def not_json(soak: Soak) -> None:
    await refused(soak, soak.draws.choice((b"{", b"\xff\xfe", b'{"prompt": }', b"[" * 50)), 400, "invalid_json")


async def bad_target(soak: Soak) -> None:
    target = soak.draws.choice((-1, 0, "5", 1e400))
    await refused(soak, json.dumps(soak.case()[1] | {"slo_tpot_ms": target}).encode(), 400, "invalid_slo")


ACTIONS: dict[Callable[[Soak], Awaitable[None]], int] = {
    stream: 50, body: 10, leave_midway: 15, leave_before_the_first_byte: 8, leave_in_the_request: 4, too_large: 4,
    not_json: 4, bad_target: 5,
}  # fmt: skip
"""What a client does next, and how often of a hundred times."""


async def alone(port: int, draws: random.Random) -> list[Case]:
    """The cases, each with what it gives while nothing else runs."""
    cases = []
    for seed in range(CASES):
        asked: dict[str, Any] = {
            "prompt": PROMPTS[seed % len(PROMPTS)] * draws.randint(1, 8), "max_tokens": draws.randint(4, 96),
            "temperature": draws.choice((0, 0.7, 1.0)), "seed": seed, "ignore_eos": seed % 3 > 0,
            **EXTRAS[seed % len(EXTRAS)],
        }  # fmt: skip
        answer = await request(port, asked)
        cases.append(Case(asked, answer.text, answer.body["usage"]["completion_tokens"]))
    return cases


class MortalService:
    """`adaserve draft` at one address, which is killed and started again."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process = self._start()
        assert self._process.stdout is not None
        if not self._process.stdout.readline():  # it says that it is ready
            raise SystemExit("error: the draft service did not start")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "adaserve_jax.cli", "draft", "--model", "demo", "--listen", self.address,
            "--max-depth", "4", "--max-width", "3", "--max-context", "512", "--http", "",
        ]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def kill_and_start(self) -> None:
        self.kill()
        self._process = self._start()


async def run(
    server: Served, streams: int, minutes: float, seed: int, service: MortalService | None, kill_every_s: float
) -> tuple[Soak, list[tuple[float, float]]]:
    """Return the soak, and the memory of both processes, MiB, at each sample."""
    draws = random.Random(seed)
    cases = await alone(server.port, draws)
    soak = Soak(server.port, cases, draws, time.monotonic() + 60 * minutes)
    memory: list[tuple[float, float]] = []
    pids = server.process.pid, server.engine_pid

    async def watch() -> None:
        while time.monotonic() < soak.end_s:
            try:
                memory.append((rss_mib(pids[0]), rss_mib(pids[1])))
            except OSError:
                soak.expect(False, f"the server or its engine ended, process {pids[0]} or {pids[1]}")
                return
            await asyncio.sleep(SAMPLE_S)

    async def kill(service: MortalService) -> None:
        while time.monotonic() + kill_every_s < soak.end_s:
            await asyncio.sleep(kill_every_s)
            service.kill_and_start()
            soak.counts["service killed"] += 1

    killing = [] if service is None else [kill(service)]
    await asyncio.gather(watch(), *killing, *(soak.client() for _ in range(streams)))
    return soak, memory


async def settle(port: int) -> dict[str, float]:
    """The metrics once nothing runs, or after IDLE_LIMIT_S."""
    end = time.monotonic() + IDLE_LIMIT_S
    while True:
        found = parse_samples((await request(port, path="/metrics")).body)
        busy = found["adaserve_requests_running"] + found["adaserve_requests_waiting"] + found[USED]
        if not busy or time.monotonic() > end:
            return found
        await asyncio.sleep(0.2)


def drift(memory: list[float]) -> tuple[float, float]:
    """MiB when warm, a quarter of the time after the begin, and at the end: medians over an eighth of the time."""
    part = max(len(memory) // 8, 1)
    return median(memory[2 * part : 3 * part] or memory), median(memory[-part:])


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    minutes: Annotated[float, typer.Option(help="how long the clients go on")] = 10.0,
    streams: Annotated[int, typer.Option(help="clients at once")] = 64,
    slots: Annotated[int, typer.Option(help="requests that run at once")] = 16,
    seed: Annotated[int, typer.Option(help="of what the clients do")] = 0,
    elastic: Annotated[bool, typer.Option("--elastic", help="with few pages, so that memory is exchanged")] = False,
    kill_service_s: Annotated[
        float, typer.Option(help="seconds between two kills of the draft service; 0: no draft service")
    ] = 0.0,
) -> None:
    """Soak a server, and fail when anything was lost or leaked."""
    if elastic and kill_service_s:
        raise typer.BadParameter("give --elastic or --kill-service-s: with a service no draft here has memory to give")
    commit = source_commit()  # of what is measured, however long that takes
    options: dict[str, Any] = {
        "deterministic": True, "max_requests": slots, "max_batch_tokens": 64, "max_body_bytes": MAX_BODY,
        "max_queue_wait": 0.0,  # so that all of them are served, however slow the machine
    }  # fmt: skip
    risen: list[str] = []  # counters that must be above 0 at the end
    if elastic:
        options |= {"num_pages": FEW_PAGES, "elastic": "on", "policy": str(IN_TURNS)}
        risen += [f'adaserve_swaps_total{{kind="{kind}"}}' for kind in ("expand", "contract")]
    with contextlib.ExitStack() as held:
        service = None
        if kill_service_s:
            service = MortalService()
            held.callback(service.kill)
            options |= {"drafter": f"grpc://{service.address}", "policy": "spec:3"}
            risen += ["adaserve_drafter_trees_total", "adaserve_drafter_lost_total"]
        server = held.enter_context(served(adaserve(**options)))
        soak, memory = asyncio.run(run(server, streams, minutes, seed, service, kill_service_s))
        last: dict[str, float] = {}
        health = None
        try:
            last = asyncio.run(settle(server.port))
            health = asyncio.run(request(server.port, path="/health")).body["status"]
        except (OSError, asyncio.IncompleteReadError) as error:
            soak.expect(False, f"the server does not answer at the end: {error}")
    names = ("server", "engine")
    drifts = {name: drift([sample[i] for sample in memory]) for i, name in enumerate(names)}
    for name, (warm, end) in drifts.items():
        soak.expect(end - warm <= MAX_DRIFT * warm, f"{name}: {warm:.0f} MiB when warm, {end:.0f} MiB at the end")
    for name in ("adaserve_requests_running", "adaserve_requests_waiting", USED, "adaserve_compiles_after_ready_total",
                 "adaserve_engine_restarts_total"):  # fmt: skip
        soak.expect(last.get(name) == 0, f"{name} is {last.get(name)} at the end")
    for name in risen:
        soak.expect(last.get(name, 0) > 0, f"{name} is 0 at the end")
    soak.expect(health == "ok", f"/health says {health}")
    report = {
        "commit": commit,
        "machine": machine_name(),
        "command": command_line(out),
        "minutes": minutes,
        "streams": streams,
        "did": dict(soak.counts),
        "memory_mib": {name: {"warm": warm, "end": end} for name, (warm, end) in drifts.items()},
        "counters": {name: last.get(name, 0.0) for name in risen},
        "engine_steps": last.get("adaserve_steps_total"),
        "compiles_after_ready": last.get("adaserve_compiles_after_ready_total"),
        "failures": soak.failures,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    Console().print_json(data=report)
    if soak.failures:
        raise SystemExit("error: " + "; ".join(soak.failures[:3]))


if __name__ == "__main__":
    typer.run(main)
