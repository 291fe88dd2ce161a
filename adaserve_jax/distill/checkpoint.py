"""What a draft has learned, in a folder: orbax checkpoints, each whole or not there, the last KEPT of them.

Files hold arrays and JSON only; nothing of them is run. Orbax is imported on use, since that takes seconds.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError

KEPT = 2
"""Checkpoints of a folder."""
_FORMAT = 1
_LEVEL = "-"  # orbax takes dots for levels, and files slashes
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A trainer's state on the host, to be written by any thread while training goes on.

    draft: of the weights that training began with, as a checksum; rank: learn_lora_rank; arrays: by name. target: a
    fingerprint of the target that was learned from, "": not known, and not compared.
    """

    draft: int
    rank: int
    arrays: dict[str, np.ndarray]
    target: str = ""

    def save(self, folder: Path, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint, then remove all but the last KEPT.

        step: its number, raised above those there are. meta: JSON that `read` gives back. Raises CheckpointError: it
        cannot be written; what was there before still is.
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
            raise CheckpointError(f"{folder}: cannot write a checkpoint ({error}); check learn_folder") from error


def read(folder: Path, like: Snapshot) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """(arrays, meta) of the latest checkpoint that can be read; None: there is none.

    like: of a trainer that takes them: same draft, target, rank, names and shapes. Raises CheckpointError: they differ,
    or there are checkpoints and none can be read.
    """
    if not folder.is_dir():
        return None
    with _manager(folder, create=False) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for step in steps:
            try:
                about = manager.restore(step, args=_json())["about"]
                _check_about(folder, about, like)
                arrays = _arrays(folder / str(step) / "state", list(like.arrays))
            except CheckpointError:
                raise
            except Exception as error:  # whatever a broken file makes of orbax
                _log.warning("%s: checkpoint %s cannot be read and is left out: %s", folder, step, error)
                continue
            _check_arrays(folder, arrays, like)
            if checksum(arrays) == about["content"]:
                return arrays, about["meta"]
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


def _json() -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.Composite(about=ocp.args.JsonRestore())


def _arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Through tensorstore, on which orbax stands: orbax answers a broken file from threads that it has left behind."""
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
    """Of names and values."""
    value = 0
    for name in sorted(arrays):
        content: Any = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        value = zlib.crc32(content, zlib.crc32(name.encode(), value))
    return value


def short(fingerprint: str) -> str:
    """As much of it as a message needs to tell it from another."""
    return fingerprint[:12]


def _check_about(folder: Path, about: dict[str, Any], like: Snapshot) -> None:
    """Before any array is read: another rank has others."""
    if about.get("format") != _FORMAT:
        raise CheckpointError(f"{folder}: expected format {_FORMAT}, got {about.get('format')!r}; take another folder")
    if about["draft"] != like.draft:
        raise CheckpointError(
            f"{folder}: what is in it was learned from other draft weights than those given; give the draft that it "
            "began with, or take another learn_folder"
        )
    target = about.get("target", "")
    if target and like.target and target != like.target:
        raise CheckpointError(
            f"{folder}: what is in it was learned from another target (fingerprint {short(target)}) than the one given "
            f"({short(like.target)}); give the target that it was learned from, or take another learn_folder"
        )
    if about["rank"] != like.rank:
        raise CheckpointError(
            f"{folder}: it was written with learn_lora_rank {about['rank']}, which is now {like.rank}; set it back, "
            "or take another learn_folder"
        )


def _check_arrays(folder: Path, arrays: dict[str, np.ndarray], like: Snapshot) -> None:
    for name, array in like.arrays.items():
        found = arrays[name]
        if found.shape != array.shape:
            raise CheckpointError(
                f"{folder}: array {name} is of shape {list(found.shape)}, expected {list(array.shape)}; take another "
                "learn_folder"
            )
        if not np.isfinite(found).all():
            raise CheckpointError(f"{folder}: array {name} holds values that are not finite; take another learn_folder")
