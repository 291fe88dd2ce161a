"""Compares this package's server with its peers on one machine, in turns: the same checkpoints, requests and client.

    python -m benchmarks.peers.compare --out peers.json --target FOLDER --draft FOLDER

Every server is started and stays up; all but the one that is measured are stopped (SIGSTOP), so that each has the whole
machine. A round measures each load with one server after another, the first one rotating. Loads:

* closed loops of 1, 4 and 16 requests: each that ends is replaced by the next;
* open loops: Poisson arrivals at 0.5, 1 and 1.5 times the capacity of the best peer, which is what it reached in its
  first closed loop of 16.

Prompts are sent as token ids, and a request generates exactly as many tokens as it asks for, so that tokenizers and
ends of texts play no part. No request profits from an earlier one: prefix caches are off, and a salt of each request's
own keeps this package from drafting from the texts of others. Requests have two classes of TPOT targets in turns,
multiples of the time per token of the fastest server without a draft, alone; all servers are held to the same
milliseconds. This package is told the targets; peers have no field for them. Each peer runs with a draft and without
one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from adaserve_jax import __version__
from adaserve_jax.bench.http_probe import USAGE_LADDER, event_of
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.whole_file import SHARED, write_whole
from benchmarks.engine.throughput_prompts import Prompts
from benchmarks.peers import adaserve, common, llama_cpp, transformers_serve, vllm
from benchmarks.server.http_load import Answer, Connection

OURS = "adaserve_jax"
TIGHT, RELAXED = "tight", "relaxed"
SCALES = {TIGHT: 1.5, RELAXED: 4.0}
"""TPOT targets, in times per token alone."""
TTFT_S = 2.0
"""TTFT target of all requests; with the TPOT target it is the joint one."""
PATIENT = ("--max-queue-wait", "0")
"""No request is refused for the wait that is predicted for it, since no peer refuses any."""
CLOSED, OPEN = (1, 4, 16), (0.5, 1.0, 1.5)
TEXTS = {1: 6, 4: 8, 16: 16}
"""By requests at once: those that end while a closed loop is measured."""
NEW_TOKENS = (48, 144)
LEAST_MS = 0.1
"""No server decodes a token in less."""
ANSWER_LIMIT_S = 600.0
"""Seconds after which a request without a limit of its own is cut off."""


@dataclass(frozen=True)
class Server:
    """A server to start. body: further fields of each request. told: whether it is told the targets, and a salt."""

    name: str
    command: tuple[str, ...]
    ready: str
    version: str
    draft: bool
    body: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    told: bool = False

    @property
    def system(self) -> str:
        return self.name.partition(",")[0]


@dataclass(frozen=True)
class Asked:
    """A request. due_s: since the start of an open loop."""

    prompt: list[int]
    new_tokens: int
    seed: int
    slo_class: str
    due_s: float = 0.0


@dataclass
class Heard:
    """What a client saw of a request; times are time.monotonic. at_s: of each token."""

    asked: Asked
    sent_s: float
    at_s: list[float] = field(default_factory=list)
    error: str | None = None
    text: str = ""

    @property
    def whole(self) -> bool:
        return len(self.at_s) == self.asked.new_tokens

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.at_s[-1] - self.at_s[0]) / (len(self.at_s) - 1)


@dataclass(frozen=True)
class Measured:
    """One load on one server. tokens_per_s: all that came; goodput: those of requests that met both targets.
    attained, joint: shares of the requests that met the TPOT target, and both; a request that did not end met none.
    ttft_*, tpot_*: percentiles in ms, of the requests that finished only."""

    server: str
    load: str
    round: int
    requests: int
    failed: int
    tokens_per_s: float
    goodput: float
    attained: float
    joint: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


# ---- one request ----


async def ask(
    server: Server, port: int, asked: Asked, temperature: float, targets_ms: dict[str, float],
    limit_s: float = ANSWER_LIMIT_S,
) -> Heard:  # fmt: skip
    """Send a request and read its stream, at most for limit_s. An error is noted, not raised."""
    body: dict[str, Any] = {
        "prompt": asked.prompt, "stream": True, **USAGE_LADDER[0], "max_tokens": asked.new_tokens,
        "temperature": temperature, "top_p": 1.0, "seed": asked.seed, "ignore_eos": True, **server.body,
    }  # fmt: skip
    if server.told:
        body["cache_salt"] = secrets.token_hex(8)
        if targets_ms:
            body |= {"slo_tpot_ms": targets_ms[asked.slo_class], "slo_ttft_ms": 1e3 * TTFT_S}
    heard = Heard(asked, time.monotonic())
    try:
        async with asyncio.timeout(limit_s):
            connection = await Connection.open(port)
            try:
                connection.send("POST", "/v1/completions", json.dumps(body).encode())
                answer = await connection.head(heard.sent_s)
                if answer.status != 200:
                    heard.error = f"status {answer.status}: {(await connection.read(answer)).body}"[:300]
                else:
                    await _listen(connection, answer, heard)
            finally:
                connection.close()
    except TimeoutError:
        heard.error = "cut off"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    if heard.error is None and not heard.whole:
        heard.error = f"{len(heard.at_s)} tokens of {asked.new_tokens}"
    return heard


async def _listen(connection: Connection, answer: Answer, heard: Heard) -> None:
    """Note a time for each token by the count so far, which every server here gives in its events."""
    rest = b""
    async for part in connection.parts(answer):
        now = time.monotonic()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = event_of(json.loads(data))
                heard.text += event.text
                heard.at_s += [now] * ((event.count or 0) - len(heard.at_s))


# ---- loads ----


@dataclass(frozen=True)
class Drive:
    """Loads on one server."""

    server: Server
    port: int
    temperature: float
    targets_ms: dict[str, float]

    async def closed(self, asked: Sequence[Asked], at_once: int) -> tuple[list[Heard], float, float]:
        """Return the requests that began, and from when to when the loop is measured: from the end of as many requests
        as run at once to the first end that no other request replaces."""
        waiting = iter(asked)
        heard: list[Heard] = []
        marks: list[float] = []

        async def worker() -> None:
            for each in waiting:
                heard.append(await ask(self.server, self.port, each, self.temperature, self.targets_ms))
                if len(heard) == at_once:
                    marks.append(time.monotonic())
            marks.append(time.monotonic())

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return heard, marks[0], marks[1]

    async def open(self, asked: Sequence[Asked], drain_s: float) -> tuple[list[Heard], float, float]:
        """Send each request when it is due, and wait for the last ones; those that take longer are cut off."""
        start = time.monotonic()
        limit = start + max(each.due_s for each in asked) + drain_s
        tasks: list[asyncio.Task[Heard]] = []
        for each in asked:
            await asyncio.sleep(max(0.0, start + each.due_s - time.monotonic()))
            left_s = limit - time.monotonic()
            one = ask(self.server, self.port, each, self.temperature, self.targets_ms, left_s)
            tasks.append(asyncio.create_task(one))
        return await asyncio.gather(*tasks), start, time.monotonic()


def figures(
    server: str, load: str, number: int, heard: Sequence[Heard], start: float, end: float, targets_ms: dict[str, float]
) -> Measured:
    """Judge a load by what came between two times; requests count whose last token came then, or none at all."""
    ended = [each for each in heard if each.error is not None or start <= each.at_s[-1] <= end]
    whole = [each for each in ended if each.error is None]
    met = [each for each in whole if 1e3 * each.tpot_s <= targets_ms[each.asked.slo_class]]
    joint = [each for each in met if each.ttft_s <= TTFT_S]
    seconds = end - start
    ttft, tpot = ([getattr(each, name) * 1e3 for each in whole] or [0.0] for name in ("ttft_s", "tpot_s"))
    return Measured(
        server, load, number, len(ended), len(ended) - len(whole),
        tokens_per_s=sum(start <= at <= end for each in heard for at in each.at_s) / seconds,
        goodput=sum(len(each.at_s) for each in joint) / seconds,
        attained=len(met) / max(1, len(ended)),
        joint=len(joint) / max(1, len(ended)),
        ttft_p50=float(np.percentile(ttft, 50)), ttft_p99=float(np.percentile(ttft, 99)),
        tpot_p50=float(np.percentile(tpot, 50)), tpot_p99=float(np.percentile(tpot, 99)),
    )  # fmt: skip


class Requests:
    """The requests of every load: the same for all servers."""

    def __init__(self, target: str):
        self._prompts = Prompts(held_out_code(), Tokenizer.from_folder(resolve_folder(target, "target")).encode)

    def cut(self, count: int, seed: Sequence[int]) -> list[Asked]:
        lengths = np.random.default_rng(seed).integers(NEW_TOKENS[0], NEW_TOKENS[1] + 1, count).tolist()
        classes = [(TIGHT, RELAXED)[index % 2] for index in range(count)]
        prompts = self._prompts.cut(count, seed)
        return [
            Asked(prompt, length, seed[-1] * 1000 + index, slo_class)
            for index, (prompt, length, slo_class) in enumerate(zip(prompts, lengths, classes, strict=True))
        ]

    def arriving(self, rate: float, seconds: float, seed: Sequence[int]) -> list[Asked]:
        """Return Poisson arrivals at so many requests per second; none may fall into a short time."""
        if not rate:
            return []
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / rate, int(2 * rate * seconds) + 10))
        times = times[times < seconds]
        asked = self.cut(len(times), seed)
        return [replace(each, due_s=float(at)) for each, at in zip(asked, times, strict=True)]


# ---- servers ----


@dataclass
class Running:
    """A server that is up. Stopped while another one is measured."""

    server: Server
    port: int
    group: int
    ready_s: float

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.group, number)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


@contextlib.contextmanager
def up(servers: Sequence[Server], logs: Path) -> Iterator[list[Running]]:
    """Start all servers, one after another, and stop each when it is ready. Ends them all."""
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for server in servers:
            port, log = common.free_port(), logs / f"{server.name.replace(', ', '-').replace(' ', '-')}.log"
            began = time.monotonic()
            process = stack.enter_context(
                common.running([*server.command, "--port", str(port)], log, os.environ | server.environment)
            )
            common.wait_ready(process, f"http://{common.HOST}:{port}{server.ready}", log)
            one = Running(server, port, process.pid, time.monotonic() - began)
            stack.callback(one.signal, signal.SIGCONT)  # a stopped process does not end
            asyncio.run(warm(one))
            one.signal(signal.SIGSTOP)
            running.append(one)
            print(f"{server.name}: ready after {one.ready_s:.0f} s", file=sys.stderr)
        yield running


async def warm(running: Running) -> None:
    """Raise SystemExit unless the server answers as it is asked to."""
    asked = Asked(list(range(300, 340)), 16, 0, RELAXED)
    for temperature in (0.0, 0.8):
        _check(running, await ask(running.server, running.port, asked, temperature, {}))


def _check(one: Running, heard: Heard) -> None:
    if heard.error is not None:
        raise common.stop(f"{one.server.name} does not answer as it must: {heard.error}")


def servers_of(options: argparse.Namespace) -> list[Server]:
    """Return this package's server and, of each peer that is named, one with a draft and one without."""
    greedy_extras = {"top_k": 0, "min_p": 0.0}
    made = {
        OURS: lambda o: Server(
            f"{OURS}, adaserve", (*adaserve.command(o), *PATIENT), "/ready", __version__, True, greedy_extras, told=True
        ),
        "llama.cpp": lambda o: Server(
            _named("llama.cpp", o), tuple(_llama(o)), "/health", _version(o.llama_server), common.drafted(o),
            llama_cpp.COUNTS,
        ),
        "vLLM": lambda o: Server(
            _named("vLLM", o), tuple(vllm.command(o.vllm, o)), "/health", _version(o.vllm), common.drafted(o),
            {"model": Path(o.target).name}, vllm.environment(o.vllm),
        ),
        "transformers": lambda o: Server(
            "transformers, assisted", tuple(transformers_serve.command(o)), "/health", _transformers(), True
        ),
    }  # fmt: skip
    found = [made[OURS](options)]
    for name in options.peers.split(","):
        if name not in made or name == OURS:
            raise common.stop(f"--peers must name some of llama.cpp, vLLM, transformers, got {name!r}")
        if name == "llama.cpp":
            options.llama_server = common.program(options.llama_server, llama_cpp.HOW)
        elif name == "vLLM":
            options.vllm = common.program(options.vllm, vllm.HOW)
        else:
            transformers_serve.check_installed(transformers_serve.NEEDED)
        ways = (False,) if name == "transformers" else (False, True)
        for no_draft in ways:
            given = argparse.Namespace(**vars(options) | {"no_draft": no_draft, "server_args": ""})
            if name == "vLLM":
                given.server_args = options.vllm_args
            found.append(made[name](given))
    if all(server.draft for server in found):
        raise common.stop("--peers must name llama.cpp or vLLM too, whose speed without a draft sets the targets")
    return found


def _named(system: str, options: argparse.Namespace) -> str:
    return f"{system}, {common.policy_name(options)}"


def _llama(options: argparse.Namespace) -> list[str]:
    given = argparse.Namespace(**vars(options) | {"target": options.target_gguf, "draft": options.draft_gguf})
    for path in (given.target, given.draft):
        llama_cpp.check_gguf(path)
    return llama_cpp.command(options.llama_server, given, common.output(options.llama_server, "--help"))


def _version(program: str) -> str:
    said = common.output(program, "--version")
    found = re.search(r"version: (\S+)", said)
    return found[1] if found else said.split()[-1]


def _transformers() -> str:
    from importlib.metadata import version

    return f"transformers {version('transformers')}, torch {version('torch')}"


# ---- the comparison ----


def compare(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Start the servers and measure all loads in all rounds. save: takes the results so far, after each round."""
    servers = servers_of(options)
    requests = Requests(options.target)
    rows: list[Measured] = []
    with up(servers, options.out.with_suffix("")) as running:
        alone_ms = {one.server.name: alone(one, requests) for one in running}
        plain = min(alone_ms[one.server.name] for one in running if not one.server.draft)
        targets_ms = {name: scale * plain for name, scale in SCALES.items()}
        greedy = {one.server.name: greedy_text(one, requests) for one in running}
        about = [
            {"name": one.server.name, "version": one.server.version, "ready_s": one.ready_s,
             "command": shlex.join(_without_folders(one.server.command))}
            for one in running
        ]  # fmt: skip
        capacity = 0.0
        for number in range(options.rounds):
            turn = running[number % len(running) :] + running[: number % len(running)]
            for at_once in CLOSED:
                asked = requests.cut(2 * at_once + TEXTS[at_once] - 1, (options.seed, at_once, number))
                for one in turn:
                    drive = Drive(one.server, one.port, options.temperature, targets_ms)
                    rows.append(driven(one, f"closed {at_once}", number, targets_ms, drive.closed, asked, at_once))
            if not capacity:
                mean = fmean(NEW_TOKENS)
                capacity = max(
                    row.tokens_per_s / mean
                    for row in rows
                    if row.load == f"closed {CLOSED[-1]}" and not row.server.startswith(OURS)
                )
            for share in OPEN:
                asked = requests.arriving(share * capacity, options.duration, (options.seed, int(10 * share), number))
                if not asked:
                    print(f"{number} open {share:g}: no request arrives; raise --duration", file=sys.stderr)
                    continue
                for one in turn:
                    drive = Drive(one.server, one.port, options.temperature, targets_ms)
                    rows.append(driven(one, f"open {share:g}", number, targets_ms, drive.open, asked, options.drain))
            save({
                "commit": source_commit(), "machine": machine_name(), "servers": about,
                "temperature": options.temperature, "target": options.name or Path(options.target).name,
                "rounds": number + 1, "duration_s": options.duration, "drain_s": options.drain,
                "new_tokens": NEW_TOKENS, "alone_ms": alone_ms, "targets_ms": targets_ms, "ttft_ms": 1e3 * TTFT_S,
                "capacity_rps": capacity, "seed": options.seed,
                "same_greedy_text": {name: text == greedy[servers[0].name] for name, text in greedy.items()},
                "rows": [asdict(row) for row in rows],
            })  # fmt: skip


def driven(
    one: Running, load: str, number: int, targets_ms: dict[str, float],
    drive: Callable[..., Awaitable[tuple[list[Heard], float, float]]], *given: Any,
) -> Measured:  # fmt: skip
    """Wake a server, run one load on it, and judge it."""

    async def run() -> tuple[list[Heard], float, float]:
        return await drive(*given)

    with one.awake():
        heard, start, end = asyncio.run(run())
    row = figures(one.server.name, load, number, heard, start, end, targets_ms)
    errors = sorted({each.error for each in heard if each.error is not None})
    print(f"{number} {load:10} {one.server.name:24} {row.tokens_per_s:7.1f} tokens/s, goodput {row.goodput:7.1f}, "
          f"attained {row.attained:.2f}, joint {row.joint:.2f}, TPOT p50 {row.tpot_p50:.1f} ms {errors[:1] or ''}",
          file=sys.stderr)  # fmt: skip
    return row


def alone(one: Running, requests: Requests) -> float:
    """Return the median ms per token of greedy requests, each alone. Exits if tokens come all at once, as from a server
    that leaves no core to the thread that sends them: targets made of that would mean nothing."""

    async def run() -> list[Heard]:
        return [await ask(one.server, one.port, each, 0.0, {}) for each in requests.cut(3, (7, 7))]

    with one.awake():
        heard = asyncio.run(run())
    for each in heard:
        _check(one, each)
    found = median(1e3 * each.tpot_s for each in heard)
    if found < LEAST_MS:
        raise common.stop(
            f"{one.server.name} sends the tokens of a text all at once, so that its speed alone cannot be measured; "
            "leave it a core for sending, and run without a real-time priority"
        )
    return found


def greedy_text(one: Running, requests: Requests) -> str:
    """Return a greedy text, which tells whether a server has the same model."""
    asked = replace(requests.cut(1, (9, 9))[0], new_tokens=48)
    with one.awake():
        return asyncio.run(ask(one.server, one.port, asked, 0.0, {})).text


def _without_folders(command: Sequence[str]) -> list[str]:
    """Return a command without the folders of this machine."""
    return [word if "/" not in word or word.startswith("{") else Path(word).name for word in command]


def main(argv: list[str]) -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="JSON file; logs go to a folder of its name")
    made.add_argument("--target", default="demo", help="checkpoint folder, or demo")
    made.add_argument("--draft", default="demo", help="checkpoint folder, or demo")
    made.add_argument("--name", default="", help="what the target is called in the results")
    made.add_argument("--peers", default="llama.cpp,vLLM,transformers", help="peers, separated by commas")
    made.add_argument("--llama-server", default="llama-server", help="llama.cpp's server")
    made.add_argument("--target-gguf", default="target.gguf", help="the target for llama.cpp, by to_gguf.py")
    made.add_argument("--draft-gguf", default="draft.gguf", help="the draft for llama.cpp")
    made.add_argument("--vllm", default="vllm", help="vLLM's program, in an environment of its own")
    made.add_argument("--vllm-args", default="--dtype float32", help="further options of vLLM")
    made.add_argument("--draft-tokens", type=int, default=4)
    made.add_argument("--max-requests", type=int, default=16)
    made.add_argument("--max-context", type=int, default=512)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals of an open loop")
    made.add_argument("--drain", type=float, default=20.0, help="seconds that the last requests of an open loop get")
    made.add_argument("--seed", type=int, default=0)
    made.set_defaults(
        no_draft=False, server_args="", policy="adaserve", prefix_cache=False, dtype="float32", continuous_batching=True
    )
    options = made.parse_args(argv)
    command = f"python -m benchmarks.peers.compare {shlex.join(_without_folders(argv))}"

    def save(result: dict[str, Any]) -> None:
        write_whole(options.out, json.dumps(result | {"command": command}, indent=1) + "\n", mode=SHARED)

    compare(options, save)
    return 0


if __name__ == "__main__":
    common.run(main)
