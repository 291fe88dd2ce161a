"""Checkpoints in the engine's own layout: fused weights in an orbax checkpoint beside the usual configuration files.

Imports no jax, and orbax only to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.tensors import Rows

WEIGHTS_FOLDER = "weights"
CHUNK_BYTES = 1 << 20
_LEVEL = "-"
_MARKER = "_METADATA"  # orbax writes it into every checkpoint
_ARRAY = "zarr.json"


def is_converted(folder: Path) -> bool:
    """Whether `adaserve convert` wrote this folder."""
    return (folder / WEIGHTS_FOLDER / _MARKER).is_file()


class ConvertedFiles:
    """The weights of a converted folder. Construction reads their headers only.

    Read through tensorstore, on which orbax stands: a part of a weight at a time, where orbax reads and copies whole
    ones, and is slow to import.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]):
        """Raises CheckpointError: a weight is missing, not asked for, or of another shape than config.json says."""
        import tensorstore as ts

        paths = sorted(path.parent for path in (folder / WEIGHTS_FOLDER).absolute().glob(f"*/{_ARRAY}"))
        specs = {
            path.name.replace(_LEVEL, "."): {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
            for path in paths
        }
        self._stores: dict[str, Any] = {name: ts.open(spec, open=True).result() for name, spec in specs.items()}
        self._check(folder, shapes)

    def _check(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found = self._stores
        differing = [
            f"weight {name} has shape {list(found[name].shape)}, expected {list(shape)} by config.json"
            if name in found
            else f"weight {name} is missing, expected with shape {list(shape)}"
            for name, shape in shapes.items()
            if name not in found or tuple(found[name].shape) != tuple(shape)
        ]
        differing += [
            f"weight {name} is not part of a model with this config.json" for name in found if name not in shapes
        ]
        if differing:
            raise CheckpointError(f"{folder}: {differing[0]}; convert the checkpoint again")

    def read_rows(self, name: str, rows: tuple[int, int], columns: slice, out: Rows) -> None:
        """Write rows [start, stop) of a weight into `out`, cast to its type: chunks in parallel into an array, else
        chunk by chunk of rows."""
        import tensorstore as ts

        first, last = rows
        store = self._stores[name]
        part = store[first:last] if store.ndim == 1 else store[first:last, columns]
        if isinstance(out, np.ndarray):
            target = ts.array(out)
            target.write(ts.cast(part[ts.d[:].translate_to[0]], target.dtype)).result()
            return
        step = store.chunk_layout.read_chunk.shape[0]
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            out[slice(start, stop)] = part[first + start : first + stop].read().result()


def write_converted(folder: Path, params: Mapping[str, Any]) -> None:
    """Write the weights of `load_params` into a folder that has none."""
    import orbax.checkpoint as ocp

    weights = {_stored(name): weight for name, weight in params.items()}
    chunks = {stored: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for stored in weights}
    # Weights hardly compress, and unpacking costs more than reading.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        path = (folder / WEIGHTS_FOLDER).absolute()
        checkpointer.save(path, args=ocp.args.PyTreeSave(weights, save_args=chunks))


def _stored(name: str) -> str:
    """The name of a weight in the files: orbax takes dots for levels, and a weight cannot stand above its bias."""
    return name.replace(".", _LEVEL)
