"""Count the values of JSON on its bytes, before it is parsed."""

from __future__ import annotations

import numpy as np

_STRUCTURE = b',:[{"'
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))


def excess(body: bytes, most: int, most_parts: int) -> str:
    """Return what JSON holds too many of: more than `most` values, or so many lists, objects and named members; "" if
    it is within both. body: UTF-8 without a NUL byte.
    """
    if sum(map(body.count, (b",", b"[", b"{", b":"))) < min(most, most_parts):
        return ""
    # Each value but the first follows a comma or an opening bracket; those inside of strings do not count.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(body.translate(None, _NOT_STRUCTURE), np.uint8)
    is_outside = np.cumsum(marks == ord('"'), dtype=np.uint8) % 2 == 0
    counts = np.bincount(marks[is_outside], minlength=256)
    containers = counts[ord("[")] + counts[ord("{")]
    if containers + counts[ord(":")] >= most_parts:
        return f"{most_parts} lists, objects and named members"
    return f"{most} JSON values" if containers + counts[ord(",")] >= most else ""
