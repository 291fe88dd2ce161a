"""Atomic writes: a reader finds the whole old file or the whole new one, whatever stops the writer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PRIVATE = 0o600
"""Mode of a file that only its owner may read."""
SHARED = 0o666
"""Mode of a file that everyone may read whom the umask allows."""


@contextmanager
def whole_file(path: Path, *, mode: int) -> Generator[BinaryIO, None, None]:
    """Yield a file that replaces `path` when the block ends. Its bytes are on the disk by then; where the power fails
    soon after, `path` may be the old file still.

    If the block raises, the old file stays, and nothing is left beside it. mode: PRIVATE or SHARED.

    Raises:
        OSError: the file cannot be written.
    """
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
    """Write content as `whole_file` does; a text in UTF-8."""
    with whole_file(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
