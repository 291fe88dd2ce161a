"""What is learned beside drafts, as what a router knows of topics, in a JSON file that only its owner may read.

A file that cannot be written or read is logged, and it is learned anew. Knows no drafts.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from adaserve_jax.errors import CheckpointError
from adaserve_jax.results.whole_file import PRIVATE, write_whole

_log = logging.getLogger(__name__)


class Kept(Protocol):
    """Safe from any thread. Raises CheckpointError, having changed nothing, on a state that it does not take."""

    def to_state(self) -> dict[str, Any]: ...
    def from_state(self, state: dict[str, Any]) -> None: ...


class KeptFile:
    """Of one `Kept`."""

    def __init__(self, path: Path, kept: Kept):
        self._path = path
        self._kept = kept
        self._written: dict[str, Any] = {}

    def load(self) -> None:
        """Go on from the file, where there is one that fits."""
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            self._kept.from_state(state)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            _log.error("%s cannot be read, and what it held is learned anew: %s", self._path, error)
        else:
            self._written = state

    def save(self) -> None:
        """Write what is new, whole or not at all, with mode 0600. Who keeps nothing now leaves what was kept before."""
        state = self._kept.to_state()
        if not state or state == self._written:
            return
        try:
            write_whole(self._path, json.dumps(state), mode=PRIVATE)
        except OSError as error:
            _log.error("%s could not be written: %s", self._path, error)
        else:
            self._written = state
