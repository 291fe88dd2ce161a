"""Folder of a running cluster: its state, its router's token, its logs, its lock, and the socket that takes orders.

state.json is replaced atomically and readable by its owner only, as the token is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.results.whole_file import PRIVATE, write_whole
from adaserve_jax.user_folders import state_folder

TOKEN_BYTES = 32
MAX_SOCKET_PATH = 100
LOCK_TRIES = 10
LOCK_RETRY_S = 0.05
RESTART_SCOPES = ("targets", "drafts", "all")
ORDERS = (*(f"restart {scope}" for scope in RESTART_SCOPES), "down")
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Return this user's folder on this machine, which outlives a login.

    It is $XDG_STATE_HOME/adaserve/HOST, else ~/.local/state/adaserve/HOST, else a temporary folder.
    """
    return state_folder() / os.uname().nodename


class ClusterFolder:
    """Files of one cluster."""

    def __init__(self, path: Path):
        self.path = path
        self.state_file = path / "state.json"
        self.token_file = path / "token"
        self.logs = path / "logs"
        self._lock: int | None = None
        self._write_failed = False

    def make(self) -> None:
        """Create the folder for this user only, with one for logs. Raises ConfigError, also if it is another user's."""
        try:
            self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.lstat().st_uid != os.getuid():
                raise ConfigError(f"run_folder must be your own, got {self.path}, which is another user's")
            self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"run_folder {self.path} cannot be used: {error.strerror}") from error

    def open(self) -> None:
        """Lock the folder for a cluster that starts now and write a new token.

        Raises ConfigError if another cluster runs in it.
        """
        self.make()
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _locked(descriptor):
            os.close(descriptor)
            raise ConfigError(
                f"a cluster runs in {self.path} already; stop it with 'adaserve cluster down', or give another "
                "--run-folder"
            )
        self._lock = descriptor
        self.state_file.unlink(missing_ok=True)
        write_whole(self.token_file, secrets.token_urlsafe(TOKEN_BYTES), mode=PRIVATE)

    @property
    def socket(self) -> Path:
        """Path of the socket that takes orders. Raises ConfigError if it is too long for a socket."""
        path = self.path / "control"
        if len(str(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"run_folder must have a path of less than {MAX_SOCKET_PATH - len('/control')} characters, which a "
                f"socket in it needs, got {self.path}"
            )
        return path

    @property
    def token(self) -> str:
        """The router's token. Raises ConfigError if no cluster runs here."""
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise _no_cluster(self.path) from error

    def write(self, state: dict[str, Any]) -> None:
        """Write state.json. A failure is logged once, until a write succeeds again, and does not stop the cluster."""
        try:
            write_whole(self.state_file, json.dumps(state, indent=1), mode=PRIVATE)
        except OSError as error:
            if not self._write_failed:
                _log.warning("%s cannot be written, and is as it was: %s", self.state_file, error.strerror)
            self._write_failed = True
        else:
            self._write_failed = False

    def read(self) -> dict[str, Any]:
        """Return the last written state. Raises ConfigError if no cluster runs here, or has written none yet."""
        if not self.is_held:
            raise _no_cluster(self.path)
        try:
            return json.loads(self.state_file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the cluster in {self.path} has no readable state: it is starting or ending, or its folder was "
                "changed; ask again in a moment"
            ) from error

    @property
    def is_held(self) -> bool:
        """True while a cluster runs in the folder."""
        try:
            with (self.path / "lock").open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def close(self) -> None:
        """Remove state, token and socket, and release the lock; logs stay."""
        for path in (self.state_file, self.token_file, self.path / "control"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _no_cluster(folder: Path) -> ConfigError:
    return ConfigError(f"no cluster runs in {folder}; start one with 'adaserve cluster up', or give its --run-folder")


def _locked(descriptor: int) -> bool:
    """Try to take the lock, several times: `is_held` takes it for a moment."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(LOCK_RETRY_S)
        else:
            return True
    return False


class OrderServer:
    """Async context that takes orders on the folder's socket: one line asks, JSON lines answer.

    restart: called with one of RESTART_SCOPES, yields progress lines. stop: set by the order `down`.
    """

    def __init__(self, path: Path, restart: Callable[[str], AsyncIterator[str]], stop: asyncio.Event):
        self._path = path
        self._restart = restart
        self._stop = stop
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> OrderServer:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer((await reader.readline()).decode(errors="replace").strip(), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client is gone, or the cluster ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, order: str, writer: asyncio.StreamWriter) -> None:
        """Carry out an order to its end, even if the client goes away: half a restart is worse."""
        try:
            if order == "down":
                self._stop.set()
            elif order in ORDERS:
                async for line in self._restart(order.partition(" ")[2]):
                    writer.write(json.dumps({"line": line}).encode() + b"\n")
            else:
                raise ConfigError(f"an order must be one of {', '.join(ORDERS)}, got {order[:40]!r}")
            writer.write(b'{"done": true}\n')
        except Exception as error:
            if not isinstance(error, AdaServeError):
                _log.exception("the order %r failed", order)
            writer.write(json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n")


def give_order(path: Path, order: str) -> Iterator[str]:
    """Send an order to the cluster at a socket and yield its progress lines.

    Raises ConfigError if no cluster listens there, AdaServeError if it could not carry out the order.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except FileNotFoundError as error:
            if not ClusterFolder(path.parent).is_held:
                raise _no_cluster(path.parent) from error
            raise ConfigError(
                f"the cluster in {path.parent} takes no orders yet: it is starting or ending; ask again in a moment"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the cluster in {path.parent} takes no orders ({error.strerror}): it is stopping, or was killed"
            ) from error
        connection.sendall(order.encode() + b"\n")
        for line in connection.makefile("rb"):
            answer = json.loads(line)
            if "error" in answer:
                raise AdaServeError(answer["error"])
            if "done" in answer:
                return
            yield answer["line"]
    raise AdaServeError("the cluster ended before the order was carried out")
