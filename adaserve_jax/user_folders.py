"""Folders of the user who runs a process: for caches and state that outlive it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return where this package keeps what it can make again: below $XDG_CACHE_HOME, else ~/.cache."""
    return _below("XDG_CACHE_HOME", ".cache") / "adaserve_jax"


def state_folder() -> Path:
    """Return where this package keeps what outlives a login: below $XDG_STATE_HOME, else ~/.local/state."""
    return _below("XDG_STATE_HOME", ".local/state") / "adaserve"


def _below(variable: str, in_home: str) -> Path:
    """Return the folder that a variable names, else the one in the user's home; a temporary one where there is none."""
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home() / in_home
    except RuntimeError:  # as in a container that runs with a number in place of a user
        return Path(tempfile.gettempdir()) / f"adaserve-{os.getuid()}"
