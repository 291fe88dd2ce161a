"""Checkpoints of the demo pair, grown once to the sizes that benchmarks measure and kept in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, GrownShape, grow, grow_head
from adaserve_jax.user_folders import cache_folder

DRAFT = GrownShape(layers=6, hidden=384, heads=6, kv_heads=2, mlp=1024)
"""About a tenth of the 110M target."""


def shape_of(params: str) -> GrownShape:
    """Return the shape of a named size. Raises ConfigError for another name."""
    if params not in SHAPES:
        raise ConfigError(f"--params must be one of {', '.join(SHAPES)}, got {params!r}")
    return SHAPES[params]


def grown_target(params: str) -> Path:
    """Return the folder of the demo target in f32, grown to a named size."""
    return _grown("target", f"{params}-f32", shape_of(params))


def grown_draft() -> Path:
    """Return the folder of the demo draft in f32, grown to `DRAFT`."""
    return _grown("draft", "draft-10M-f32", DRAFT)


def grown_head(head: Path, params: str, out: Path) -> Path:
    """Write a head of the demo target for `grown_target(params)` to a folder, and return the folder."""
    grow_head(head, resolve_folder("demo", "target"), out, SHAPES[params].hidden)
    return out


def _grown(role: Literal["target", "draft"], name: str, shape: GrownShape) -> Path:
    folder = cache_folder() / "grown" / name
    if not folder.is_dir():
        scratch = folder.with_name(f"{name}.{os.getpid()}")
        grow(resolve_folder("demo", role), scratch, shape, dtype="f32")
        scratch.rename(folder)
    return folder
