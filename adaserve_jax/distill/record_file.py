"""Buffered records on disk, where `learn_keep_records` asks for it. The file holds texts of requests: only its
owner may read it. Imports no jax.

A file is an npz without pickled objects: a JSON head, and the records' arrays end to end.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.distill.checkpoint import short
from adaserve_jax.distill.records import Record
from adaserve_jax.errors import CheckpointError
from adaserve_jax.results.whole_file import PRIVATE, whole_file

VERSION = 1
_TYPES = {
    "tokens": np.int32,
    "position": np.int32,
    "ids": np.int32,
    "log_p": np.float32,
    "num_tokens": np.int64,
    "num_rows": np.int64,
    "held_out": np.bool_,
}


@dataclass(frozen=True)
class Source:
    """What the rows of records are of. target: a fingerprint of the model that gave the scores; temperature: at which.
    "" and None: not known, and not compared."""

    target: str = ""
    temperature: float | None = None


def save_records(path: Path, records: Iterable[Record], *, top_k: int, source: Source = Source()) -> None:
    """Write the records, in order, with mode 0600 and atomically: a reader sees the old file or the new one. Raises
    OSError."""
    kept = list(records)
    tenants = [record.tenant for record in kept]
    head = json.dumps({"version": VERSION, "top_k": top_k, **asdict(source), "tenants": tenants})
    arrays = {
        "head": np.frombuffer(head.encode(), np.uint8),
        "num_tokens": np.array([len(record.tokens) for record in kept], np.int64),
        "num_rows": np.array([len(record.position) for record in kept], np.int64),
        "held_out": np.array([record.held_out for record in kept], bool),
    }
    for name in ("tokens", "position", "ids", "log_p"):
        shape = (0, top_k) if name in ("ids", "log_p") else (0,)
        arrays[name] = np.concatenate([np.zeros(shape, _TYPES[name]), *(getattr(record, name) for record in kept)])
    with whole_file(path, mode=PRIVATE) as file:
        np.savez(file, **arrays)


def load_records(
    path: Path, *, top_k: int, vocab_size: int, draft: int = 0, source: Source = Source()
) -> list[Record]:  # fmt: skip
    """Read what `save_records` wrote, as records of `draft`, with memory of their own: one that stays keeps nothing of
    the others. A file with more than top_k tokens per row is read up to them. Raises CheckpointError saying what is
    wrong with the file, or that it is of another source."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("head", *_TYPES)}
        head = json.loads(arrays.pop("head").tobytes())
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot read the kept records ({error}); delete it to go on without") from error
    _require(path, isinstance(head, dict) and head.get("version") == VERSION, f"records of version {VERSION}")
    _check_source(path, head, source)
    for name, dtype in _TYPES.items():
        _require(path, arrays[name].dtype == dtype, f"{name} of type {np.dtype(dtype)}, got {arrays[name].dtype}")
    _check(path, head, arrays, vocab_size)
    stored = arrays["ids"].shape[1]
    _require(path, stored >= top_k, f"{top_k} tokens per row (learn_top_k), got {stored}")
    ends = {name: np.cumsum(arrays[name])[:-1] for name in ("num_tokens", "num_rows")}
    texts = np.split(arrays["tokens"], ends["num_tokens"])
    rows = [np.split(arrays[name], ends["num_rows"]) for name in ("position", "ids", "log_p")]
    try:
        return [
            Record(
                tokens.copy(), position.copy(), ids[:, :top_k].copy(), log_p[:, :top_k].copy(), draft, tenant,
                bool(held_out),
            )
            for tokens, position, ids, log_p, tenant, held_out in zip(
                texts, *rows, head["tenants"], arrays["held_out"], strict=True
            )
        ] if len(arrays["num_rows"]) else []  # fmt: skip
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; delete it to go on without") from error


def _check_source(path: Path, head: dict[str, Any], source: Source) -> None:
    for name, given in asdict(source).items():
        kept = head.get(name)
        if given and kept and given != kept:
            kept, given = (short(each) if isinstance(each, str) else each for each in (kept, given))
            raise CheckpointError(
                f"{path}: the kept records are of {name} {kept}, which is now {given}; they are left out"
            )


def _check(path: Path, head: dict[str, Any], arrays: dict[str, np.ndarray], vocab_size: int) -> None:
    tenants = head.get("tenants")
    texts, rows = arrays["num_tokens"], arrays["num_rows"]
    named = len(tenants) if isinstance(tenants, list) and all(isinstance(tenant, str) for tenant in tenants) else -1
    one_each = texts.shape == rows.shape == arrays["held_out"].shape == (named,)
    _require(path, one_each, "a length, a number of rows, a side and a tenant of each record")
    whole = bool((texts >= 0).all() and (rows >= 0).all()) and arrays["tokens"].shape == (texts.sum(),)
    of_rows = all(len(arrays[name]) == rows.sum() for name in ("position", "ids", "log_p"))
    _require(path, whole and of_rows, "as many tokens and rows as its records have")
    _require(path, arrays["ids"].ndim == 2 and arrays["ids"].shape == arrays["log_p"].shape, "ids and log_p [m, K]")
    inside = all(((arrays[name] >= 0) & (arrays[name] < vocab_size)).all() for name in ("tokens", "ids"))
    _require(path, inside, f"token ids below {vocab_size}, the size of the vocabulary")
    log_p = arrays["log_p"]
    _require(path, bool(np.isfinite(log_p).all() and (log_p <= 1e-3).all()), "finite logs of probabilities")


def _require(path: Path, ok: bool, expected: str) -> None:
    if not ok:
        raise CheckpointError(f"{path}: kept records must have {expected}; delete the file to go on without")
