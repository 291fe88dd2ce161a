"""Keeps one process running: starts it, asks it how it is, starts it again when it died or hangs, stops it cleanly.

The same for drafts, targets and the router, and for both orchestrators: the local one has a keeper per member, an actor
of Ray has one. Runs on one event loop, in a thread that lives as long as the keeper (the kernel ties a child to the
thread that started it).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from adaserve_jax.cluster import tied
from adaserve_jax.errors import AdaServeError

# One process of a cluster: its command, how patient one is with it, how it is started, and how it ended.

MOST_LOG_BYTES = 2**24
"""A log that is longer when its process starts is put aside, in the place of the one that was put aside before."""


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


# One small HTTP request to a process of the cluster, in a thread: health, and orders to the router.


def _opener(certificate: str | None) -> urllib.request.OpenerDirector:
    """Never through a proxy: members are called by their own addresses. The certificate may name the cluster's public
    host only, and is known by itself: it must be the one in that file, or signed by it. None: whoever answers will do,
    who is told nothing. Raises OSError."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    if certificate is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_ANYBODY = _opener(None)


class NoAnswer(AdaServeError):
    """A process of the cluster did not answer."""


def ask_now(
    url: str, *, body: Any = None, token: str = "", certificate: str | None = None, timeout_s: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """Status and JSON object, {} where the answer is none; POST with a body, else GET. certificate: file of the one
    that https is to be spoken with, without which no token is sent over it. Raises NoAnswer."""
    if token and certificate is None and url.startswith("https:"):
        raise NoAnswer(f"{url} is not asked: whose certificate it has is not known, and a token would be told")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {**headers, "content-type": "application/json"})
    try:
        opener = _ANYBODY if certificate is None else _opener(certificate)  # anew: the file may be replaced
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, _object(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read())
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


async def ask(
    url: str, *, body: Any = None, token: str = "", certificate: str | None = None, timeout_s: float = 5.0
) -> tuple[int, dict[str, Any]]:
    """`ask_now` beside the event loop."""
    return await asyncio.to_thread(ask_now, url, body=body, token=token, certificate=certificate, timeout_s=timeout_s)


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


Phase = Literal["waiting", "starting", "ready", "failing", "backoff", "stopping", "stopped"]
USAGE_STATUS = 2
"""With which a command ends that was called wrongly: another start would end the same way."""
RECOVERING = "restarting"
"""What a server says while it replaces its engine, for which it has limits of its own."""
FIRST_STARTS = 3
"""Starts that may end before the first that became ready."""
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 2**16
_log = logging.getLogger(__name__)


class MemberFailed(AdaServeError):
    """A process of the cluster could not be started at all."""


class Backoff:
    """Seconds to wait before the next start."""

    def __init__(self, patience: Patience):
        self._patience = patience
        self._next_s = patience.first_wait

    def after(self, ready_s: float) -> float:
        """ready_s: how long the process that ended had been ready."""
        if ready_s >= self._patience.well:
            self._next_s = self._patience.first_wait
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._patience.most_wait)
        return wait_s


class Keeper:
    """One member and its process. on_change: called after each change of phase."""

    def __init__(
        self, member: Member, on_change: Callable[[], None] = lambda: None,
        *, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.member = member
        self.phase: Phase = "waiting"
        self.detail = ""
        self.restarts = 0
        """Starts after one that ended by itself, or that was ended because it hung."""
        self.replacements = 0
        """Starts that were asked for."""
        self._on_change = on_change
        self._clock = clock
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._replacing = asyncio.Event()
        self._ready = asyncio.Event()
        self._ever_ready = False
        self._took_too_long = False
        self._ready_since: float | None = None
        """Of this life; None: it has not been ready yet."""
        self._failures = 0
        """Lives that ended without ever being ready, since the first start or the last replacement."""
        self._replacement: asyncio.Future[None] | None = None
        """Done once the process that was asked for is ready, or is given up."""

    @property
    def pid(self) -> int | None:
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    def start(self) -> None:
        """Begin to keep it; returns at once."""
        self._task = asyncio.ensure_future(self._keep())

    async def ready(self) -> None:
        """Wait until it is ready. Raises MemberFailed when it never will be."""
        assert self._task is not None, "a keeper is started before it is waited for"
        waiting = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._ready.is_set():
            self._task.result()
            raise MemberFailed(f"{self.member.name} was stopped before it was ready")

    async def replace(self) -> None:
        """End it cleanly and start it anew; returns when the new one is ready. Raises MemberFailed where that does not
        become ready; it is tried again all the same, like one that died."""
        self._ready.clear()
        self._failures = 0
        if self._replacement is None or self._replacement.done():
            self._replacement = asyncio.get_running_loop().create_future()
        self._replacing.set()
        assert self._task is not None, "a keeper is started before its process is replaced"
        await asyncio.wait({self._replacement, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not self._replacement.done():
            raise MemberFailed(f"{self.member.name} was stopped before it was ready")
        self._replacement.result()

    async def stop(self) -> None:
        """End it for good: SIGTERM, and SIGKILL to its whole group after the grace."""
        self._stopping = True
        self._replacing.set()
        if self._task is not None:
            with contextlib.suppress(MemberFailed):
                await self._task
        self._enter("stopped")

    def kill(self) -> None:
        """At once, without grace."""
        if self.pid is not None:
            signal_group(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines of its output."""
        try:
            with self.member.log.open("rb") as log:
                log.seek(max(os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES, 0))
                lines = log.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def _keep(self) -> None:
        """Until `stop`. Raises MemberFailed when it cannot be started the first time."""
        backoff = Backoff(self.member.patience)
        while not self._stopping:
            self._replacing.clear()
            asked_for = await self._live()
            if self._stopping:
                return
            if asked_for:
                self.replacements += 1
                continue
            if self._ready_since is None:
                self._failures += 1
                self._check_start()
            self.restarts += 1
            self._ready.clear()
            wait_s = backoff.after(0.0 if self._ready_since is None else self._clock() - self._ready_since)
            _log.warning("%s %s; it is started again in %.1f s", self.member.name, self.detail, wait_s)
            self._enter("backoff", self.detail)
            await self._pause(wait_s)

    def _check_start(self) -> None:
        """Raises MemberFailed: it has never been ready, and another start is not worth it. Who waits for a replacement
        is told."""
        wrong_use = self._child is not None and self._child.returncode == USAGE_STATUS
        if not wrong_use and self._failures < FIRST_STARTS and not self._took_too_long:
            return
        failed = MemberFailed(f"{self.member.name} {self.detail}; its log ends with:\n{self.log_tail()}")
        if not self._ever_ready:
            self._enter("stopped", self.detail)
            raise failed
        if self._replacement is not None and not self._replacement.done():
            self._replacement.set_exception(failed)
            self._replacement.exception()  # who waited may be gone

    async def _live(self) -> bool:
        """One life of the process, to its end. Returns whether its end was asked for."""
        self._enter("starting")
        self._ready_since, self._took_too_long = None, False
        try:
            child = self._child = await launch(self.member)
        except OSError as error:
            self._child = None
            self.detail = f"could not be started: {error}"
            return False
        watching = asyncio.ensure_future(self._watch())
        asked = asyncio.ensure_future(self._replacing.wait())
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({watching, asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.detail = how_it_ended(child.returncode)
                signal_group(child.pid, signal.SIGKILL)  # what it left behind
                return False
            if not asked.done():
                self.detail = watching.result()
            await self._end(child)
            return asked.done()
        finally:
            for task in (watching, asked, ended):
                task.cancel()
            await asyncio.gather(watching, asked, ended, return_exceptions=True)

    async def _end(self, child: Child) -> None:
        """SIGTERM to the process, which ends what it started itself; SIGKILL to all of them after the grace."""
        self._enter("stopping", self.detail)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(child.wait(), self.member.patience.grace)
        except TimeoutError:
            _log.warning("%s did not end within %g s and is killed", self.member.name, self.member.patience.grace)
        signal_group(child.pid, signal.SIGKILL)
        await child.wait()

    async def _watch(self) -> str:
        """Ask it how it is, again and again; returns why it must be replaced."""
        patience, began = self.member.patience, self._clock()
        unwell_since: float | None = None
        while True:
            well, said = await self._look()
            now = self._clock()
            if well:
                unwell_since = None
                if self._ready_since is None:
                    self._ever_ready, self._ready_since, self._failures = True, now, 0
                if not self._replacing.is_set():  # else it is about to end, and the next one is waited for
                    self._enter("ready")
                    self._ready.set()
                    if self._replacement is not None and not self._replacement.done():
                        self._replacement.set_result(None)
            elif self._ready_since is None:
                if now - began > patience.start:
                    self._took_too_long = True
                    return f"was not ready within {patience.start:g} s ({said})"
            else:
                unwell_since = now if unwell_since is None else unwell_since
                self._enter("failing", said)
                given_up = now - unwell_since > patience.unwell and said != RECOVERING
                if said == "dead" or given_up:
                    return f"was unwell for {now - unwell_since:.0f} s ({said})"
            await asyncio.sleep(patience.every)

    async def _look(self) -> tuple[bool, str]:
        """Whether it is well, and what it says of itself."""
        if not self.member.health_url:
            return True, ""
        try:
            status, body = await ask(self.member.health_url, timeout_s=self.member.patience.ask)
        except NoAnswer as error:
            return False, str(error)
        said = str(body.get("status", f"status {status}"))
        return status == 200 and said in (*self.member.well, "status 200"), said

    async def _pause(self, seconds: float) -> None:
        """Or until the end is asked for."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._replacing.wait(), seconds)

    def _enter(self, phase: Phase, detail: str = "") -> None:
        if (phase, detail) != (self.phase, self.detail):
            self.phase, self.detail = phase, detail
            self._on_change()
