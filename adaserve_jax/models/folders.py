"""Where a checkpoint lies: the embedded pair by name, anything else by path. Imports no jax."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from adaserve_jax.errors import CheckpointError

DEMO_FOLDER = Path(__file__).parent / "demo"


def resolve_folder(name_or_path: str | Path, role: Literal["target", "draft"]) -> Path:
    """The checkpoint folder behind a name: "demo" is the embedded pair's, anything else a path.

    Raises CheckpointError: there is no such folder.
    """
    folder = DEMO_FOLDER / role if name_or_path == "demo" else Path(name_or_path).expanduser()
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"{role} checkpoint {str(name_or_path)!r}: expected a folder at {folder}, found {found}; "
            "give the path of a Hugging Face checkpoint folder, or 'demo'"
        )
    return folder
