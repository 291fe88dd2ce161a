"""Code prompts that the demo pair never saw: cut from standard-library files that its training held out.

Knows files and a tokenizer's `encode`; nothing of models.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

CORPUS = Path(__file__).resolve().parent.parent / "scripts" / "demo_pair" / "corpus.py"
MIN_TOKENS, MAX_TOKENS = 64, 128


def held_out_sources() -> list[str]:
    """The running interpreter's standard-library files, tests left out, that corpus.py keeps from training."""
    spec = importlib.util.spec_from_file_location("demo_pair_corpus", CORPUS)
    assert spec is not None and spec.loader is not None
    corpus = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = corpus  # dataclasses look their module up
    spec.loader.exec_module(corpus)
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {*corpus.SKIPPED_FOLDERS, "test", "tests"}
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not left_out.intersection(parts) and corpus.is_held_out("/".join(parts)):
            texts.append(path.read_text(encoding="utf-8"))
    return [text for text in texts if text.strip()]


class Prompts:
    """Cuts prompts of MIN_TOKENS to MAX_TOKENS tokens, each from the start of a line that is not empty."""

    def __init__(self, sources: Sequence[str], encode: Callable[[str], list[int]]):
        self._lines = [text.splitlines(keepends=True) for text in sources]
        self._starts = [
            (file, index)
            for file, lines in enumerate(self._lines)
            for index, line in enumerate(lines)
            if line.strip()
        ]  # fmt: skip
        self._encode = encode

    def cut(self, count: int, seed: Sequence[int]) -> list[list[int]]:
        """Token ids of `count` prompts, the same for the same seed."""
        rng = np.random.default_rng(seed)
        prompts: list[list[int]] = []
        while len(prompts) < count:
            file, line = self._starts[rng.integers(len(self._starts))]
            length = int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1))
            ids = self._encode("".join(self._lines[file][line : line + MAX_TOKENS]))[:length]
            if len(ids) == length:
                prompts.append(ids)
        return prompts
