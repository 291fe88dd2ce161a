"""Python text of the standard library that the embedded pair was trained on, and the part that was held out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "idlelib", "turtledemo", "pydoc_data", "encodings", "lib2to3"}
MAX_FILE_CHARS = 400_000


def is_held_out(key: str) -> bool:
    """Return True if the document of this key (a path, a question) is held out; its hash alone decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 100 < HELD_OUT_PERCENT


def library_files() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the files of the standard library that the embedded pair was trained on or that were held out.

    Yields the parts of the path below the library, and the text. Every interpreter has these files, so none is shipped.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and len(text) <= MAX_FILE_CHARS and "\0" not in text:
            yield parts, text


def is_test(parts: tuple[str, ...]) -> bool:
    """Return True for a test of the standard library."""
    return bool({"test", "tests"}.intersection(parts))


def held_out_code() -> list[str]:
    """Return the held-out files of the library without its tests; empty where Python has no source files."""
    return [text for parts, text in library_files() if is_held_out("/".join(parts)) and not is_test(parts)]
