"""What a draft has learned, in a folder: orbax checkpoints, each whole or not there, the last KEPT of them.

Files hold arrays and JSON only; nothing of them is run. Orbax is imported on use, since that takes seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError

KEPT = 2
"""Checkpoints of a folder."""
_FORMAT = 1
_LEVEL = "-"  # orbax takes dots for levels
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A trainer's state on the host, to be written by any thread while training goes on.

    draft: of the weights that training began with, as a checksum; rank: learn_lora_rank; arrays: by name.
    """

    draft: int
    rank: int
    arrays: dict[str, np.ndarray]

    def save(self, folder: Path, step: int, meta: dict[str, Any]) -> None:
        """Write a checkpoint, then remove all but the last KEPT.

        step: its number, raised above those there are. meta: JSON that `read` gives back. Raises CheckpointError: it
        cannot be written; what was there before still is.
        """
        import orbax.checkpoint as ocp

        about = {"format": _FORMAT, "draft": self.draft, "rank": self.rank, "meta": meta}
        arrays = {name.replace(".", _LEVEL): array for name, array in self.arrays.items()}
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

    like: of a trainer that takes them: same draft, rank, names and shapes. Raises CheckpointError: they differ, or
    there are checkpoints and none can be read.
    """
    if not folder.is_dir():
        return None
    with _manager(folder, create=False) as manager:
        steps = sorted(manager.all_steps(), reverse=True)
        for step in steps:
            found = _read(manager, step, folder)
            if found is not None:
                arrays, about = found
                _check(folder, arrays, about, like)
                return {name: arrays[name.replace(".", _LEVEL)] for name in like.arrays}, about["meta"]
    if steps:
        raise CheckpointError(f"{folder}: none of its {len(steps)} checkpoints can be read; move it away to begin anew")
    return None


def _manager(folder: Path, *, create: bool) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=create, enable_async_checkpointing=False)
    return ocp.CheckpointManager(
        folder.absolute(),
        options=options,
        item_handlers={"state": ocp.PyTreeCheckpointHandler(), "about": ocp.JsonCheckpointHandler()},
    )


def _read(manager: Any, step: int, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    import orbax.checkpoint as ocp

    try:
        about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        names = manager.item_metadata(step)["state"].tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=as_numpy)))[
            "state"
        ]
        return {name: np.asarray(array) for name, array in state.items()}, about
    except Exception as error:  # whatever a broken file makes of orbax
        _log.warning("%s: checkpoint %s cannot be read and is left out: %s", folder, step, error)
        return None


def _check(folder: Path, arrays: dict[str, np.ndarray], about: dict[str, Any], like: Snapshot) -> None:
    if about.get("format") != _FORMAT:
        raise CheckpointError(f"{folder}: expected format {_FORMAT}, got {about.get('format')!r}; take another folder")
    if about["draft"] != like.draft:
        raise CheckpointError(
            f"{folder}: what is in it was learned from other draft weights than those given; give the draft that it "
            "began with, or take another learn_folder"
        )
    if about["rank"] != like.rank:
        raise CheckpointError(
            f"{folder}: it was written with learn_lora_rank {about['rank']}, which is now {like.rank}; set it back, "
            "or take another learn_folder"
        )
    for name, array in like.arrays.items():
        found = arrays.get(name.replace(".", _LEVEL))
        if found is None or found.shape != array.shape:
            what = "missing" if found is None else f"of shape {list(found.shape)}"
            raise CheckpointError(f"{folder}: array {name} is {what}, expected {list(array.shape)}")
        if not np.isfinite(found).all():
            raise CheckpointError(f"{folder}: array {name} holds values that are not finite; take another learn_folder")
