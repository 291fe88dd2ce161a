"""The Python that the embedded pair was trained on, and the part of it that was held out. Imports no jax.

The text is the running interpreter's own standard library: whoever runs this has it, and nothing needs to be shipped.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "idlelib", "turtledemo", "pydoc_data", "encodings", "lib2to3"}
MAX_FILE_CHARS = 400_000


def is_held_out(key: str) -> bool:
    """Whether the document of this key (a path, a question) is held out: decided by its hash alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 100 < HELD_OUT_PERCENT


def library_files() -> Iterator[tuple[tuple[str, ...], str]]:
    """Each file of the standard library that counts as text: the parts of its path below the library, and its text."""
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
    """Whether a file of the standard library is one of its tests."""
    return bool({"test", "tests"}.intersection(parts))


def held_out_code() -> list[str]:
    """The held-out files of the library proper, which the pair never saw. None where Python has no source files."""
    return [text for parts, text in library_files() if is_held_out("/".join(parts)) and not is_test(parts)]
