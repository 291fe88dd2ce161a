"""A server on raw sockets that does to each request what a script says, down to the byte. Speaks HTTP only as far as
its scripts do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Act = bytes | float | str
"""Bytes are written, numbers are seconds to wait; "close", "reset" and "silence" end the script: the connection is
closed, reset, or left open without a byte more. After any other script it takes its next request."""

DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
BARE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
"""The head of a stream that lasts until the connection is closed."""
MODELS = {"object": "list", "data": [{"id": "fake-model", "object": "model", "owned_by": "somebody"}]}


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def token(text: str, *, count: int | None = None, finish: str | None = None) -> bytes:
    """An event of a completion. count: output tokens so far, where the server says so."""
    body: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    if count is not None:
        body["usage"] = {"prompt_tokens": 5, "completion_tokens": count}
    return event(body)


def usage(count: int) -> bytes:
    """The last event where the count is asked for: of all, and without choices."""
    return event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(*acts: Act, end: bool = True) -> list[Act]:
    """A whole answer: head, each piece of bytes as a chunk of its own, and the last chunk."""
    framed: list[Act] = [chunk(act) if isinstance(act, bytes) else act for act in acts]
    return [STREAM, *framed, *([b"0\r\n\r\n"] if end else [])]


def bytewise(acts: Sequence[Act]) -> list[Act]:
    """The same bytes in as many writes as there are of them."""
    return [bytes([byte]) for act in acts if isinstance(act, bytes) for byte in act]


def answer(status: str, body: bytes, kind: str = "application/json", *headers: str) -> list[Act]:
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers, "", ""]
    return ["\r\n".join(lines).encode() + body]


def plain(tokens: int = 3) -> list[Act]:
    """A server as most are: a token an event, the count at the end."""
    texts = [token("x", finish="length" if i == tokens - 1 else None) for i in range(tokens)]
    return stream(*texts, usage(tokens), DONE)


@dataclass(frozen=True)
class Asked:
    """One request as it came. connection: its number."""

    connection: int
    route: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """script(request): what to do to it. Runs in a thread of its own while it is entered."""

    script: Callable[[Asked], Sequence[Act]]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    closed_by_client: int = 0

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        started = asyncio.start_server(self._serve, sock=self._listener)
        self._server = self._loop.run_until_complete(started)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take no more connections, and reset those that there are."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def close_idle(self) -> None:
        """Close every connection, as servers do to those that are not used for a while; when the client has not seen
        it yet, its next request goes to nobody."""
        asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(10)

    async def _stop(self) -> None:
        self._loop.remove_reader(self._listener)  # asyncio loses a connection that it accepts while its server closes
        await self._turns()  # what was accepted just now is being served, and so known to be open
        self._server.close()
        await self._close_all()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._turns()  # of transports that end

    async def _turns(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def _close_all(self) -> None:
        """Abort every connection that there was: one that is being closed may still have something to send."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = self.connections
        try:
            while True:
                request = await _read(reader, number)
                self.asked.append(request)
                for act in self.script(request):
                    if isinstance(act, bytes):
                        writer.write(act)
                        await writer.drain()
                    elif isinstance(act, float):
                        await asyncio.sleep(act)
                    elif act == "silence":
                        await reader.read()
                        self.closed_by_client += 1
                        return
                    else:
                        if act == "reset":
                            linger = struct.pack("ii", 1, 0)
                            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return
        except (OSError, asyncio.IncompleteReadError):
            self.closed_by_client += 1
        except asyncio.CancelledError:
            pass  # the server stops; asyncio of Python 3.11 would tell of a cancelled task as of an error
        finally:
            with contextlib.suppress(OSError):
                writer.close()


async def _read(reader: asyncio.StreamReader, number: int) -> Asked:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(number, lines[0].split(" ")[1], headers, json.loads(content) if content else {})
