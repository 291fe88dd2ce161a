"""Files of learned state: checkpoints of drafts, records of texts, and JSON state.

Checkpoints are orbax folders, each whole or absent, the last KEPT of them. Files hold arrays and JSON only; nothing in
them is executed. Orbax is imported on use, since that takes seconds.
"""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.distill.records import Record
from adaserve_jax.distill.routing import DraftRouter
from adaserve_jax.errors import CheckpointError
from adaserve_jax.results.whole_file import PRIVATE, whole_file, write_whole

KEPT = 2
"""Checkpoints of a folder."""
VERSION = 1
_FORMAT = 1
_LEVEL = "-"  # orbax reads a dot as a level, and files a slash
_TYPES = {
    "tokens": np.int32,
    "position": np.int32,
    "ids": np.int32,
    "log_p": np.float32,
    "num_tokens": np.int64,
    "num_rows": np.int64,
    "held_out": np.bool_,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Trainer's state on the host, which any thread may write while training goes on.

    draft: checksum of the weights that training began with. rank: of low-rank updates, or 0. target: fingerprint of the
    target that was learned from; "": unknown, matches any.
    """

    draft: int
    rank: int
    arrays: dict[str, np.ndarray]
    target: str = ""

    def save(self, folder: Path, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint, then remove all but the last KEPT.

        step: its number, raised above existing ones. meta: JSON that `read` returns. Raises CheckpointError if it
        cannot be written; older checkpoints are still there then.
        """
        import orbax.checkpoint as ocp

        about = {"format": _FORMAT, "draft": self.draft, "rank": self.rank, "target": self.target, "meta": meta}
        about["content"] = checksum(self.arrays)
        arrays = {_stored(name): array for name, array in self.arrays.items()}
        try:
            with _manager(folder, create=True) as manager:
                step = max(step, (manager.latest_step() or 0) + 1)
                manager.save(
                    step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(about))
                )
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder}: cannot write a checkpoint ({error}); check that folder") from error


def read(folder: Path, like: Snapshot) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return (arrays, meta) of the latest readable checkpoint; None if there is none.

    Raises CheckpointError unless draft, target, rank, names and shapes equal those of `like`, and if checkpoints exist
    but none can be read.
    """
    if not folder.is_dir():
        return None
    import orbax.checkpoint as ocp

    with _manager(folder, create=False) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for step in steps:
            try:
                about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
                _check_about(folder, about, like)
                arrays = _arrays(folder / str(step) / "state", list(like.arrays))
                content, meta = about["content"], about["meta"]
            except CheckpointError:
                raise
            except Exception as error:  # orbax raises errors of any kind for a broken file
                _log.warning("%s: checkpoint %s cannot be read and is left out: %s", folder, step, error)
                continue
            if checksum(arrays) == content:
                _check_arrays(folder, arrays, like)
                return arrays, meta
            _log.warning("%s: checkpoint %s was changed since it was written and is left out", folder, step)
    if steps:
        raise CheckpointError(f"{folder}: none of its {len(steps)} checkpoints can be read; move it away to begin anew")
    return None


def _manager(folder: Path, *, create: bool) -> Any:
    import orbax.checkpoint as ocp

    state = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=create, enable_async_checkpointing=False)
    return ocp.CheckpointManager(
        folder.absolute(),
        options=options,
        item_handlers={"state": state, "about": ocp.JsonCheckpointHandler()},
    )


def _arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Read arrays with tensorstore, since orbax reports a broken file from threads that it left behind."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    found = {}
    for name in names:
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{_stored(name)}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        found[name] = ts.open(spec, open=True).result().read().result()
    return found


def _stored(name: str) -> str:
    return name.replace(".", _LEVEL).replace("/", _LEVEL)


def checksum(arrays: Mapping[str, Any]) -> int:
    """Return the CRC-32 of names and values."""
    value = 0
    for name in sorted(arrays):
        content: Any = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return value


def short(fingerprint: str) -> str:
    """Shorten a fingerprint for a message."""
    return fingerprint[:12]


def _check_about(folder: Path, about: dict[str, Any], like: Snapshot) -> None:
    """Check a checkpoint's head before its arrays are read, since another rank has other arrays."""
    if about.get("format") != _FORMAT:
        raise CheckpointError(f"{folder}: expected format {_FORMAT}, got {about.get('format')!r}; take another folder")
    if about["draft"] != like.draft:
        raise CheckpointError(
            f"{folder}: what is in it was learned from other draft weights than those given; give the draft that it "
            "began with, in the same type (dtype), or take another folder"
        )
    target = about.get("target", "")
    if target and like.target and target != like.target:
        raise CheckpointError(
            f"{folder}: what is in it was learned from another target (fingerprint {short(target)}) than the one given "
            f"({short(like.target)}); give the target that it was learned from, or take another folder"
        )
    if about["rank"] != like.rank:
        raise CheckpointError(
            f"{folder}: it was learned with low-rank updates of rank {about['rank']} (0: none), and the rank given is "
            f"{like.rank}; give that rank, or take another folder"
        )


def _check_arrays(folder: Path, arrays: dict[str, np.ndarray], like: Snapshot) -> None:
    for name, array in like.arrays.items():
        found = arrays[name]
        if found.shape != array.shape:
            raise CheckpointError(
                f"{folder}: array {name} is of shape {list(found.shape)}, expected {list(array.shape)}; take another "
                "folder"
            )
        if not np.isfinite(found).all():
            raise CheckpointError(f"{folder}: array {name} holds values that are not finite; take another folder")


@dataclass(frozen=True)
class RecordFormat:
    """Format of files of records: npz with a JSON head and arrays end to end, no pickle.

    top_k: tokens per row; longer rows are cut when they are loaded. vocab_size: token ids that records may have.
    target: fingerprint of the target that scored the rows; "" matches any. temperature: of the scores; None: any.
    """

    top_k: int
    vocab_size: int
    target: str = ""
    temperature: float | None = None

    def save(self, path: Path, records: Iterable[Record]) -> None:
        """Write records atomically, with mode 0600, since they hold texts of requests. Raises OSError."""
        kept = list(records)
        head = json.dumps({
            "version": VERSION, "top_k": self.top_k, "target": self.target, "temperature": self.temperature,
            "tenants": [record.tenant for record in kept],
        })  # fmt: skip
        arrays = {
            "head": np.frombuffer(head.encode(), np.uint8),
            "num_tokens": np.array([len(record.tokens) for record in kept], np.int64),
            "num_rows": np.array([len(record.position) for record in kept], np.int64),
            "held_out": np.array([record.held_out for record in kept], bool),
        }
        for name in ("tokens", "position", "ids", "log_p"):
            shape = (0, self.top_k) if name in ("ids", "log_p") else (0,)
            arrays[name] = np.concatenate([np.zeros(shape, _TYPES[name]), *(getattr(record, name) for record in kept)])
        with whole_file(path, mode=PRIVATE) as file:
            np.savez(file, **arrays)

    def load(self, path: Path, draft: int = 0) -> list[Record]:
        """Read what `save` wrote, as records of `draft`.

        Each record has its own memory, so that keeping one does not keep all. Raises CheckpointError if the file is
        invalid or of another source.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("head", *_TYPES)}
            head = json.loads(arrays.pop("head").tobytes())
        except (OSError, ValueError, TypeError, KeyError, EOFError, RecursionError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path}: cannot read the kept records ({error}); delete it to go on without"
            ) from error
        _require(path, isinstance(head, dict) and head.get("version") == VERSION, f"records of version {VERSION}")
        for name in ("target", "temperature"):
            kept, given = head.get(name), getattr(self, name)
            if given and kept and given != kept:
                kept, given = (short(each) if isinstance(each, str) else each for each in (kept, given))
                raise CheckpointError(
                    f"{path}: the kept records are of {name} {kept}, which is now {given}; they are left out"
                )
        for name, dtype in _TYPES.items():
            _require(path, arrays[name].dtype == dtype, f"{name} of type {np.dtype(dtype)}, got {arrays[name].dtype}")
        _check(path, head, arrays, self.vocab_size)
        top_k, stored = self.top_k, arrays["ids"].shape[1]
        _require(path, stored >= top_k, f"{top_k} tokens per row (learn_top_k), got {stored}")
        ends = {name: np.cumsum(arrays[name])[:-1] for name in ("num_tokens", "num_rows")}
        texts = np.split(arrays["tokens"], ends["num_tokens"])  # one empty text if there are no records
        rows = [np.split(arrays[name], ends["num_rows"]) for name in ("position", "ids", "log_p")]
        every = zip(texts, *rows, head["tenants"], arrays["held_out"].tolist(), strict=False)
        try:
            return [
                Record(tokens.copy(), position.copy(), ids[:, :top_k].copy(), log_p[:, :top_k].copy(), draft, *about)
                for tokens, position, ids, log_p, *about in every
            ]
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; delete it to go on without") from error


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


class TopicsFile:
    """JSON file of a router's topics. A failing read or write is logged, and topics are learned anew."""

    def __init__(self, path: Path, router: DraftRouter):
        self._path = path
        self._router = router
        self._written: dict[str, Any] = {}

    def load(self) -> None:
        """Restore the file's state if there is one and it fits."""
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            self._router.from_state(state)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            _log.error("%s cannot be read, and what it held is learned anew: %s", self._path, error)
        else:
            self._written = state

    def save(self) -> None:
        """Write a changed state, atomically and with mode 0600."""
        state = self._router.to_state()
        if state == self._written:
            return
        try:
            write_whole(self._path, json.dumps(state), mode=PRIVATE)
        except OSError as error:
            _log.error("%s could not be written: %s", self._path, error)
        else:
            self._written = state
