"""Checkpoints in the engine's own layout: fused weights in an orbax checkpoint beside the usual configuration files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import CheckpointError

WEIGHTS_FOLDER = "weights"
GROUP_BYTES = 64 << 20
_LEVEL = "-"
_MARKER = "_METADATA"  # orbax writes it into every checkpoint


def is_converted(folder: Path) -> bool:
    """Whether `adaserve convert` wrote this folder."""
    return (folder / WEIGHTS_FOLDER / _MARKER).is_file()


def read_converted(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Any, on_host: Collection[str] = ()
) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    """All weights by name: cast to dtype on this process's first device, or as they are stored, on the host.

    Raises CheckpointError: a weight is missing, not asked for, or of another shape than config.json says.
    """
    import orbax.checkpoint as ocp  # seconds of import time, which safetensors folders should not pay

    path = (folder / WEIGHTS_FOLDER).absolute()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    as_stored = ocp.RestoreArgs(restore_type=np.ndarray)
    on_device = ocp.ArrayRestoreArgs(dtype=jnp.dtype(dtype), sharding=sharding)
    with ocp.Checkpointer(_handler()) as checkpointer:
        _check(folder, checkpointer.metadata(path).item_metadata.tree, shapes)
        for names in _groups(shapes, 4 if on_host else jnp.dtype(dtype).itemsize):
            wanted = {_stored(name): jax.ShapeDtypeStruct(shapes[name], dtype, sharding=sharding) for name in names}
            options = {_stored(name): as_stored if name in on_host else on_device for name in names}
            arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=options, partial_restore=True)
            read = jax.block_until_ready(checkpointer.restore(path, args=arguments))
            for name in names:
                yield name, read.pop(_stored(name))


def _groups(shapes: Mapping[str, tuple[int, ...]], item_bytes: int) -> list[list[str]]:
    """Weights to read together: orbax holds a second copy of all that one call reads."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * item_bytes
        if groups[-1] and held + size > GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def write_converted(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Write the weights of `load_params` into a folder that has none."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(
            (folder / WEIGHTS_FOLDER).absolute(),
            args=ocp.args.PyTreeSave({_stored(name): weight for name, weight in params.items()}),
        )


def _stored(name: str) -> str:
    """The name of a weight in the files: orbax takes dots for levels, and a weight cannot stand above its bias."""
    return name.replace(".", _LEVEL)


def _handler() -> Any:
    """Weights hardly compress, and unpacking costs more than reading."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)


def _check(folder: Path, found: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {stored.replace(_LEVEL, "."): weight for stored, weight in found.items()}
    differing = [
        f"weight {name} has shape {list(found[name].shape)}, expected {list(shape)} by config.json"
        if name in found
        else f"weight {name} is missing, expected with shape {list(shape)}"
        for name, shape in shapes.items()
        if name not in found or tuple(found[name].shape) != tuple(shape)
    ]
    differing += [f"weight {name} is not part of a model with this config.json" for name in found if name not in shapes]
    if differing:
        raise CheckpointError(f"{folder}: {differing[0]}; convert the checkpoint again")
