"""One process of a cluster: its command, how patient one is with it, how it is started, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adaserve_jax.cluster import tied

MOST_LOG_BYTES = 2**24
"""A log that is longer when its process starts is put aside, in the place of the one that was put aside before."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Seconds. every: between two looks. start: from a start until it must be ready; unwell: that a process may be
    unwell until it is replaced; grace: from SIGTERM to SIGKILL; margin: of what a
    grace is beyond the limits that a process has itself. first_wait, most_wait: before another start, doubled
    each time; well: after so many seconds ready, the next wait is the first one again. ask: for one look."""

    every: float = 0.5
    start: float = 900.0
    unwell: float = 30.0
    grace: float = 45.0
    margin: float = 10.0
    first_wait: float = 0.5
    most_wait: float = 30.0
    well: float = 60.0
    ask: float = 5.0


@dataclass(frozen=True)
class Member:
    """One process. argv: the command. health_url: what it says of itself there, one of `well`, makes it ready; without
    a status, 200 does; "": ready once it runs. log: file that its output is appended to. pass_fds: file descriptors
    that it inherits."""

    name: str
    argv: tuple[str, ...]
    health_url: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    well: tuple[str, ...] = ("ok",)
    patience: Patience = Patience()


class Child(Protocol):
    """The part of asyncio's Process that is used."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


async def launch(member: Member) -> Child:
    """Start it in a session of its own, tied to this process. Raises OSError."""
    command = (sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), str(member.patience.grace), *member.argv)
    descriptor = _open_log(member.log)
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=descriptor, stderr=descriptor,
            env={**os.environ, **member.environment}, start_new_session=True, pass_fds=member.pass_fds,
        )  # fmt: skip
    finally:
        os.close(descriptor)


def _open_log(path: Path) -> int:
    """A descriptor to append to it; where it cannot be written, what a process says is lost, and it runs all the
    same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MOST_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        _log.warning("%s cannot be written: %s", path, error.strerror)
        return os.open(os.devnull, os.O_WRONLY)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process and all that it started, as far as they are still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def how_it_ended(status: int | None) -> str:
    """In words, behind the name of a process."""
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
