"""The folder of a running cluster: what it consists of now, the token of its router, its logs, its lock.

state.json is written whole or not at all, and readable for its owner only, as the token is.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from adaserve_jax.errors import ConfigError

TOKEN_BYTES = 32
MOST_SOCKET_PATH = 100


def default_folder() -> Path:
    """$XDG_RUNTIME_DIR/adaserve, else a folder of this user among the temporary ones."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "adaserve" if runtime else Path(tempfile.gettempdir()) / f"adaserve-{os.getuid()}"


class RunFolder:
    """One cluster's files. Raises ConfigError where the folder cannot be used or is another user's."""

    def __init__(self, path: Path):
        self.path = path
        self.state_file = path / "state.json"
        self.token_file = path / "token"
        self.logs = path / "logs"
        self._lock: int | None = None

    def make(self) -> None:
        """The folder, for this user only, with room for logs. Raises ConfigError."""
        try:
            self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.lstat().st_uid != os.getuid():
                raise ConfigError(f"run_folder must be your own, got {self.path}, which is another user's")
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"run_folder {self.path} cannot be used: {error.strerror}") from error

    def open(self) -> None:
        """Make it what a cluster that starts now needs, with a token of its own. Raises ConfigError: another cluster
        runs in it."""
        self.make()
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise ConfigError(
                f"a cluster runs in {self.path} already; stop it with 'adaserve cluster down', or give another "
                "--run-folder"
            ) from None
        self.state_file.unlink(missing_ok=True)
        self._write(self.token_file, secrets.token_urlsafe(TOKEN_BYTES))

    @property
    def socket(self) -> Path:
        """Where orders are taken. Raises ConfigError when the path is too long for a socket."""
        path = self.path / "control"
        if len(str(path)) > MOST_SOCKET_PATH:
            raise ConfigError(
                f"run_folder must have a path of less than {MOST_SOCKET_PATH - len('/control')} characters, which a "
                f"socket in it needs, got {self.path}"
            )
        return path

    @property
    def token(self) -> str:
        """Raises ConfigError: no cluster runs in it."""
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise self._none() from error

    def write(self, state: dict[str, Any]) -> None:
        self._write(self.state_file, json.dumps(state, indent=1))

    def read(self) -> dict[str, Any]:
        """The state as it was last written. Raises ConfigError: no cluster runs in it."""
        try:
            return json.loads(self.state_file.read_text())
        except (OSError, ValueError) as error:
            raise self._none() from error

    @property
    def is_held(self) -> bool:
        """Whether a cluster runs in it."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def close(self) -> None:
        """Forget the cluster; logs stay."""
        for path in (self.state_file, self.token_file, self.path / "control"):
            path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, path: Path, text: str) -> None:
        new = path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        new.replace(path)

    def _none(self) -> ConfigError:
        return ConfigError(
            f"no cluster runs in {self.path}; start one with 'adaserve cluster up', or give its --run-folder"
        )
