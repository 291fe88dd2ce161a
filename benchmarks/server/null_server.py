"""A server that computes nothing: what a client measures of it is the client's own cost and error.

    python -m benchmarks.server.null_server [--pace-ms 20] PORT

Speaks as much of OpenAI's API as `adaserve bench --url` asks for. Every completion gets its `max_tokens` tokens, with
the count so far in every event: all of them at once and in one write, or with --pace-ms one after another so far apart,
each with the time of its write as its text, by CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import time
from functools import cache
from typing import Annotated

import typer

HOST = "127.0.0.1"
MODEL = b'{"object":"list","data":[{"id":"null","object":"model","owned_by":"nobody"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_END_OF_HEAD = b"\r\n\r\n"


def event(text: str, count: int, finish: str) -> bytes:
    """One chunk that holds one token."""
    data = (
        f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{finish}}}],'
        f'"usage":{{"prompt_tokens":1,"completion_tokens":{count}}}}}\n\n'
    ).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def finish_of(count: int, tokens: int) -> str:
    return '"length"' if count == tokens else "null"


@cache
def at_once(tokens: int) -> bytes:
    return HEAD + b"".join(event("x", i, finish_of(i, tokens)) for i in range(1, tokens + 1)) + LAST


def body(content: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(content), content)


class NullServer(asyncio.Protocol):
    """One connection. pace_s: between two tokens; 0: all at once."""

    def __init__(self, pace_s: float):
        self._pace_s = pace_s
        self._loop = asyncio.get_running_loop()
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while _END_OF_HEAD in self._read:
            head, _, rest = self._read.partition(_END_OF_HEAD)
            found = _LENGTH.search(head)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            self._read = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, content: bytes) -> None:
        if head.startswith(b"GET"):
            self._transport.write(body(MODEL if b"/v1/models" in head else b"{}"))
            return
        found = _TOKENS.search(content)
        tokens = int(found[1]) if found else 16
        if self._pace_s:
            self._transport.write(HEAD)
            self._token(1, tokens, self._loop.time())
        else:
            self._transport.write(at_once(tokens))

    def _token(self, count: int, tokens: int, due_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(event(f"{time.monotonic():.6f} ", count, finish_of(count, tokens)))
        if count == tokens:
            self._transport.write(LAST)
        else:
            self._loop.call_at(due_s + self._pace_s, self._token, count + 1, tokens, due_s + self._pace_s)


async def serve(port: int, pace_s: float) -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: no Nagle, see `listen`
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, port))
    server = await asyncio.get_running_loop().create_server(lambda: NullServer(pace_s), sock=listener, backlog=1024)
    gc.freeze()
    gc.disable()
    await server.serve_forever()


def main(
    port: Annotated[int, typer.Argument(help="of 127.0.0.1")],
    pace_ms: Annotated[float, typer.Option(help="between two tokens of a stream; 0: all at once")] = 0.0,
) -> None:
    """Serve until it is ended."""
    asyncio.run(serve(port, pace_ms / 1e3))


if __name__ == "__main__":
    typer.run(main)
