"""Ahead-of-time compilation: the buckets that steps run in, and their programs, compiled before the engine is ready.

Every shape that compiles is enumerated by a `BucketSet`. Programs are compiled in threads and cached on disk;
`CompileCounter` counts compilations after that, which are bugs.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.program_cache import ProgramCache
from adaserve_jax.types import Progress
from adaserve_jax.user_folders import cache_folder

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
MAX_BLOCK = 16


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape of a step. tokens: packed length T; rows: R; sampled: N, positions whose logits are computed."""

    tokens: int
    rows: int
    sampled: int

    @property
    def block_size(self) -> int:
        """Query tokens per attention block: about the mean per row, so that few queries of a block are empty."""
        mean = max(1, self.tokens // self.rows)
        return min(MAX_BLOCK, 1 << (mean.bit_length() - 1))

    @property
    def num_blocks(self) -> int:
        """Most attention blocks that any split of the tokens over the rows needs."""
        rows = min(self.rows, self.tokens)
        return rows + (self.tokens - rows) // self.block_size


@dataclass(frozen=True)
class BucketSet:
    """All buckets of one program. Edges increase. max_sampled: most positions whose logits are computed; None: one
    per row."""

    token_edges: tuple[int, ...]
    row_edges: tuple[int, ...]
    max_sampled: int | None

    def pick(self, tokens: int, rows: int) -> Bucket:
        """Return the smallest bucket that holds both. Raises ValueError: none does."""
        for token_edge in self.token_edges:
            if token_edge >= tokens:
                for row_edge in self._rows_of(token_edge):
                    if row_edge >= rows:
                        return self._bucket(token_edge, row_edge)
        raise ValueError(f"no bucket holds {tokens} tokens in {rows} rows (edges {self.token_edges}, {self.row_edges})")

    def all(self) -> list[Bucket]:
        """Return every bucket, in increasing order."""
        return [self._bucket(tokens, rows) for tokens in self.token_edges for rows in self._rows_of(tokens)]

    def _bucket(self, tokens: int, rows: int) -> Bucket:
        return Bucket(tokens, rows, rows if self.max_sampled is None else min(tokens, self.max_sampled))

    def _rows_of(self, tokens: int) -> tuple[int, ...]:
        """Return the row edges that a step of this many tokens can need: every row has at least one token."""
        return self.row_edges[: bisect.bisect_left(self.row_edges, tokens) + 1]


@dataclass(frozen=True)
class Declared:
    """A program to compile: `function` (jitted) for arguments of these shapes, kept under `key`."""

    key: tuple[Any, ...]
    function: Any
    arguments: tuple[Any, ...]


def compile_all(programs: Sequence[Declared], progress: Progress | None = None) -> dict[tuple[Any, ...], Callable]:
    """Compile in as many threads as there are cores; XLA releases the interpreter lock while it works.

    Returns the executables by key. The first error of a program ends the compilation and is raised.
    """
    done: dict[tuple[Any, ...], Callable] = {}
    jax_folder = jax.config.values["jax_compilation_cache_dir"]
    folder = None if jax_folder is None else Path(jax_folder) / "programs"
    with ProgramCache(folder) as cache, ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        pending = {threads.submit(cache.executable, each.key, each.function, each.arguments): each for each in programs}
        try:
            for future in as_completed(pending):
                done[pending[future].key] = future.result()
                if progress is not None:
                    progress("compiling", len(done), len(programs))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return done


def use_compile_cache(chosen: str | Path | None) -> None:
    """Keep every compiled program on disk, however small or quick to compile.

    The folder is the one chosen, else JAX's own setting, else one in the user's cache folder.
    Raises ConfigError: the folder cannot be created.
    """
    folder = Path(chosen or os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "compile")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"compile_cache: cannot create folder {folder} ({error.strerror}); choose another by compile_cache"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts compilations inside its `with` blocks, on the thread of the block: those of serving steps.

    Compilations of other engines in the process, and of other users of jax, are not counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self._here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def __enter__(self) -> None:
        self._here.counting = True

    def __exit__(self, *_: object) -> None:
        self._here.counting = False

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT and getattr(self._here, "counting", False):
            self.count += 1
