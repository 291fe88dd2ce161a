"""Files that are there whole or not at all, whenever a reader looks and whatever stops the writer. Knows no format."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""Only the owner may read it."""
SHARED = 0o666
"""Whoever the umask lets may read it."""


@contextmanager
def whole_file(path: Path, *, mode: int) -> Generator[BinaryIO, None, None]:
    """A file to write, which takes the place of `path` once the block ends, and is on the disk by then. Where the block
    raises, what was at `path` stays, and nothing is left beside it. mode: PRIVATE or SHARED. Raises OSError."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, mode: int) -> None:
    """The same of what is at hand; a text in UTF-8."""
    with whole_file(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
