"""Splits a stream of bytes into server-sent events, however the bytes come. Knows nothing of JSON."""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 2**22
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLarge(ValueError):
    """One event has more bytes than any server of tokens sends."""


class EventReader:
    """The `data` of each event, as the HTML standard defines event streams: lines end with LF, CR or CRLF, also in
    turns; lines of one event are joined; comments and other fields are left out. Bytes that begin a character whose
    rest comes later wait for it, as does half a line."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, part: bytes) -> list[bytes]:
        """Events that `part` completes. Raises EventTooLarge."""
        if not part:
            return []
        if self._after_cr and part[:1] == b"\n":
            part = part[1:]
        self._after_cr = part.endswith(b"\r")
        self._size += len(part)
        if b"\n" not in part and b"\r" not in part:
            self._rest.append(part)
            self._check()
            return []
        *lines, rest = _LINE_END.split(b"".join((*self._rest, part)))
        self._rest = [rest] if rest else []
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._size = len(rest) + sum(map(len, self._data))
        self._check()
        return events

    def close(self) -> list[bytes]:
        """The event that was not ended when the stream was: some servers leave out the last empty line."""
        self._line(b"".join(self._rest))
        left, self._data, self._rest = self._data, [], []
        return [b"\n".join(left)] if left else []

    def _line(self, line: bytes) -> bytes | None:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data.clear()
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None

    def _check(self) -> None:
        if self._size > MAX_EVENT_BYTES:
            raise EventTooLarge(f"one event of the stream has more than {MAX_EVENT_BYTES} bytes")
