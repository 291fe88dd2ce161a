"""The folder of a running cluster: what it consists of now, the token of its router, its logs, its lock.

state.json is written whole or not at all, and readable for its owner only, as the token is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from adaserve_jax.errors import AdaServeError, ConfigError

TOKEN_BYTES = 32
MOST_SOCKET_PATH = 100
LOCK_TRIES = 10
LOCK_TRY_S = 0.05
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """One of this user and this machine that outlives a login: $XDG_STATE_HOME/adaserve/HOST, else
    ~/.local/state/adaserve/HOST, else one among the temporary ones."""
    state = os.environ.get("XDG_STATE_HOME")
    try:
        folder = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"adaserve-{os.getuid()}"
    return folder / "adaserve" / os.uname().nodename


class RunFolder:
    """One cluster's files. Raises ConfigError where the folder cannot be used or is another user's."""

    def __init__(self, path: Path):
        self.path = path
        self.state_file = path / "state.json"
        self.token_file = path / "token"
        self.logs = path / "logs"
        self._lock: int | None = None
        self._written = True

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
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _locked(descriptor):
            os.close(descriptor)
            raise ConfigError(
                f"a cluster runs in {self.path} already; stop it with 'adaserve cluster down', or give another "
                "--run-folder"
            )
        self._lock = descriptor
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
        """Nobody stops serving for a file that cannot be written: that is logged once, until it can be again."""
        try:
            self._write(self.state_file, json.dumps(state, indent=1))
        except OSError as error:
            if self._written:
                _log.warning("%s cannot be written, and is as it was: %s", self.state_file, error.strerror)
            self._written = False
        else:
            self._written = True

    def read(self) -> dict[str, Any]:
        """The state as it was last written. Raises ConfigError: no cluster runs in it, or none does any more."""
        if not self.is_held:
            raise self._none()
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
            with contextlib.suppress(OSError):
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


def _locked(descriptor: int) -> bool:
    """Take the lock. Whoever asks whether it is held has it for a moment."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(LOCK_TRY_S)
        else:
            return True
    return False


# Orders to a running cluster, through a socket in its folder: one line asks, lines answer, the last one says
# how it went.

Restarting = Callable[[str], AsyncIterator[str]]
REPLACED = ("targets", "drafts", "all")
ORDERS = (*(f"restart {what}" for what in REPLACED), "down")


class OrderServer:
    """Takes orders while it is entered. down: sets `stop`; restart: `restarting(one of REPLACED)` yields what is
    done."""

    def __init__(self, path: Path, restarting: Restarting, stop: asyncio.Event):
        self._path = path
        self._restarting = restarting
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
            pass  # whoever asked is gone, or the cluster ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, order: str, writer: asyncio.StreamWriter) -> None:
        """An order goes on when whoever asked goes away: half a replacement is worse."""
        try:
            if order == "down":
                self._stop.set()
            elif order in ORDERS:
                async for line in self._restarting(order.partition(" ")[2]):
                    writer.write(json.dumps({"line": line}).encode() + b"\n")
            else:
                raise ConfigError(f"an order must be one of {', '.join(ORDERS)}, got {order[:40]!r}")
            writer.write(b'{"done": true}\n')
        except Exception as error:
            if not isinstance(error, AdaServeError):
                _log.exception("the order %r failed", order)
            writer.write(json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n")


def give_order(path: Path, order: str) -> Iterator[str]:
    """What the cluster says while it carries out the order. Raises ConfigError when none runs there, AdaServeError when
    it cannot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise ConfigError(f"no cluster takes orders at {path}: {error.strerror}") from error
        connection.sendall(order.encode() + b"\n")
        for line in connection.makefile("rb"):
            answer = json.loads(line)
            if "error" in answer:
                raise AdaServeError(answer["error"])
            if "done" in answer:
                return
            yield answer["line"]
    raise AdaServeError("the cluster ended before the order was carried out")


# The signals that end a cluster.


def stop_on_signals(kill: Callable[[], object]) -> asyncio.Event:
    """Set by the first SIGINT, SIGTERM or SIGHUP; each one after that calls `kill`. In the main thread, on its loop."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
