"""A server started as a program, and a lean HTTP client, for the benchmarks of the front end. Reads and writes sockets
itself, so that the client costs little of the cores that it shares with the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
READY_LIMIT_S = 600.0
BLANK = b"\r\n\r\n"
FEW_PROGRAMS = {"max_context": 512, "page_size": 16, "max_depth": 4, "max_width": 3, "max_tree_tokens": 64}
"""The least of compiling that still drafts trees: fields of EngineConfig."""


@dataclass
class Answer:
    """What came back. sent_s, head_s, end_s: when the request was sent, the status came, and all was read; events: of a
    stream, decoded, without its last line, and when each came."""

    status: int
    headers: dict[str, str]
    sent_s: float
    head_s: float
    end_s: float = 0.0
    body: Any = None
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    done: bool = False

    @property
    def error(self) -> str | None:
        """The code of its error, in a body or a stream."""
        found = self.body if isinstance(self.body, dict) else self.events[-1][1] if self.events else {}
        return found.get("error", {}).get("code")

    @property
    def text(self) -> str:
        """Of the first choice."""
        if self.events:
            return "".join(c["text"] for _, event in self.events for c in event.get("choices", ()) if c["index"] == 0)
        return self.body["choices"][0]["text"] if isinstance(self.body, dict) and "choices" in self.body else ""


class Connection:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
        return cls(reader, writer)

    def send(self, method: str, path: str, content: bytes = b"", kind: str = "application/json") -> None:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)

    async def head(self, sent_s: float) -> Answer:
        """The status and the headers. Raises OSError or IncompleteReadError when the server goes away."""
        lines = (await self.reader.readuntil(BLANK)).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        return Answer(int(lines[0].split(" ")[1]), headers, sent_s, time.monotonic())

    async def parts(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises OSError or IncompleteReadError when the server goes away."""
        if answer.headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(answer.headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]

    async def read(self, answer: Answer, most_events: int | None = None) -> Answer:
        """All that follows the head, or so many events of it."""
        stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        rest = b""
        async for part in self.parts(answer):
            rest += part
            if not stream:
                continue
            *whole, rest = rest.split(b"\n\n")
            now = time.monotonic()
            for event in whole:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    answer.done = True
                else:
                    answer.events.append((now, json.loads(data)))
            if most_events is not None and len(answer.events) >= most_events:
                return answer
        answer.end_s = time.monotonic()
        if not stream:
            answer.body = json.loads(rest) if answer.headers.get("content-type", "") == "application/json" else rest
        return answer

    def close(self) -> None:
        """At once, whatever is under way."""
        self.writer.transport.abort()


async def request(port: int, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> Answer:
    """One request from its begin to its end; GET where there is no body. Raises OSError, IncompleteReadError."""
    sent_s = time.monotonic()
    connection = await Connection.open(port)
    try:
        connection.send("POST" if body is not None else "GET", path, b"" if body is None else json.dumps(body).encode())
        return await connection.read(await connection.head(sent_s))
    finally:
        connection.close()


def get(port: int, path: str) -> Answer:
    return asyncio.run(request(port, path=path))


def sample(port: int, name: str) -> float:
    """One sample of the metrics by its full name, labels included."""
    return parse_samples(get(port, "/metrics").body)[name]


def parse_samples(text: bytes) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


@dataclass(frozen=True)
class Served:
    """A server that runs as a program."""

    process: subprocess.Popen[bytes]
    port: int
    start_s: float

    @property
    def engine_pid(self) -> int:
        """The process that the server runs its engine in."""
        (child,) = children(self.process.pid)
        return child


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[Served]:
    """Run a command that serves on the port appended to it, and wait until it is ready. It is ended with SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the server ends too
    port = free_port()
    began = time.monotonic()
    process = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL)
    try:
        wait_ready(process, port)
        yield Served(process, port, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises SystemExit when the program ends, or takes too long."""
    end = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"error: the server ended with status {process.returncode} before it was ready")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if get(port, "/ready").status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"error: the server was not ready after {READY_LIMIT_S:g} s")


def adaserve(**options: Any) -> list[str]:
    """The command of a server on the embedded pair, with few programs, but for its port. options: by field name."""
    flags: list[str] = []
    for name, value in (FEW_PROGRAMS | options).items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return [sys.executable, "-m", "adaserve_jax.cli", "serve", *flags, "--port"]


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process. Raises OSError when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")  # and is not yet waited for


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that is no smaller than `share` of them."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def command_line(out: Path) -> str:
    """Return how this run was started, its output file without a folder."""
    script = Path(sys.argv[0])
    module = f"benchmarks.{script.parent.name}.{script.stem}"
    return shlex.join(["python", "-m", module, *(word.replace(str(out), out.name) for word in sys.argv[1:])])
