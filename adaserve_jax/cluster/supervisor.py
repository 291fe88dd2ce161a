"""Supervisor of one process: start it, check its health, restart it when it dies or hangs, stop it cleanly.

Drafts, targets and the router are all supervised this way. The local orchestrator has a supervisor per member; on Ray
each actor has one. A supervisor runs on one event loop, and its child ends with the process of the supervisor
(`child_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adaserve_jax.cluster import child_process
from adaserve_jax.cluster.router_client import NoAnswer, request_json
from adaserve_jax.errors import ERROR_PREFIX, AdaServeError

Phase = Literal["waiting", "starting", "ready", "failing", "backoff", "stopping", "stopped"]
MAX_LOG_BYTES = 2**24
"""A longer log is renamed to NAME.1 when its process starts, replacing the previous NAME.1."""
USAGE_STATUS = 2
"""Exit status of a command with wrong arguments; another start would fail the same way."""
RECOVERING = "restarting"
"""Health status of a server that replaces its engine; the server has its own time limits for that."""
FIRST_STARTS = 3
"""Number of starts that may fail before a process has ever been ready."""
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 2**16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisorTiming:
    """Intervals and limits of a supervisor, in seconds."""

    probe_interval_s: float = 0.5
    probe_timeout_s: float = 5.0
    start_timeout_s: float = 900.0
    """Limit from a start until the process must be ready."""
    unhealthy_timeout_s: float = 30.0
    """Limit of unhealthy time before a restart; time in which a server replaces its engine does not count."""
    termination_grace_s: float = 45.0
    """Time from SIGTERM to SIGKILL."""
    grace_margin_s: float = 10.0
    """Added to a process's own shutdown limits to get its termination grace."""
    first_backoff_s: float = 0.5
    """Wait before the first restart; it doubles with each further one."""
    max_backoff_s: float = 30.0
    backoff_reset_s: float = 60.0
    """After so long ready, the next wait is the first one again."""


@dataclass(frozen=True)
class Member:
    """One process of a cluster.

    health_url: the process is ready when its JSON `status` there is one of `ready_states`, or when it answers 200
    without a status; "" means ready as soon as it runs. log: file to which its output is appended. kind: target, draft
    or router. address: URL of a target's or the router's API, or a draft's address for --drafter. pass_fds: file
    descriptors that it inherits.
    """

    name: str
    argv: tuple[str, ...]
    health_url: str
    log: Path
    kind: str = ""
    address: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    ready_states: tuple[str, ...] = ("ok",)
    timing: SupervisorTiming = SupervisorTiming()


class MemberFailed(AdaServeError):
    """A process of the cluster could not be started."""


class RestartBackoff:
    """Exponential backoff between restarts."""

    def __init__(self, timing: SupervisorTiming):
        self._timing = timing
        self._next_s = timing.first_backoff_s

    def after(self, ready_s: float) -> float:
        """Return the wait before the next start, given how long the ended process had been ready."""
        if ready_s >= self._timing.backoff_reset_s:
            self._next_s = self._timing.first_backoff_s
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._timing.max_backoff_s)
        return wait_s


class Supervisor:
    """Supervisor of one member. on_change: called after each change of phase."""

    def __init__(
        self, member: Member, on_change: Callable[[], None] = lambda: None,
        *, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.member = member
        self.phase: Phase = "waiting"
        self.detail = ""
        self.restarts = 0
        """Number of starts after the process died or was killed because it hung."""
        self.replacements = 0
        """Number of starts requested by `replace`."""
        self._on_change = on_change
        self._clock = clock
        self._child: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._end_requested = asyncio.Event()
        self._ready = asyncio.Event()
        self._ever_ready = False
        self._start_timed_out = False
        self._ready_since: float | None = None
        """Time when the current process became ready; None: not yet."""
        self._failed_starts = 0
        """Processes that ended without being ready, since the first start or the last replacement."""
        self._log_begin = 0
        """Size of the log then; what earlier processes wrote tells nothing about these."""
        self._replacement: asyncio.Future[None] | None = None
        """Done once the requested new process is ready, or given up."""

    @property
    def pid(self) -> int | None:
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    def start(self) -> None:
        """Begin to supervise; return at once."""
        self._log_begin = self._log_size()
        self._task = asyncio.ensure_future(self._supervise())

    async def ready(self) -> None:
        """Wait until the process is ready. Raises MemberFailed if it never will be."""
        assert self._task is not None, "a supervisor is started before it is waited for"
        waiting = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._ready.is_set():
            self._task.result()
            raise MemberFailed(f"{self.member.name} was stopped before it was ready")

    async def replace(self) -> None:
        """End the process cleanly, start a new one and wait until it is ready.

        Raises MemberFailed if the new process does not become ready; it is then restarted like one that died.
        """
        assert self._task is not None, "a supervisor is started before its process is replaced"
        self._ready.clear()
        self._failed_starts, self._log_begin = 0, self._log_size()
        if self._replacement is None or self._replacement.done():
            self._replacement = asyncio.get_running_loop().create_future()
        self._end_requested.set()
        await asyncio.wait({self._replacement, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not self._replacement.done():
            raise MemberFailed(f"{self.member.name} was stopped before it was ready")
        self._replacement.result()

    async def stop(self) -> None:
        """End the process for good: SIGTERM, then SIGKILL to its whole group after the grace."""
        self._stopping = True
        self._end_requested.set()
        if self._task is not None:
            with contextlib.suppress(MemberFailed):
                await self._task
        self._set_phase("stopped")

    def kill(self) -> None:
        """Kill the process group at once."""
        if self.pid is not None:
            _signal_group(self.pid, signal.SIGKILL)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.member.name, "kind": self.member.kind, "address": self.member.address, "pid": self.pid,
            "phase": self.phase, "detail": self.detail, "restarts": self.restarts, "replacements": self.replacements,
            "log": str(self.member.log),
        }  # fmt: skip

    def _log_size(self) -> int:
        try:
            return self.member.log.stat().st_size
        except OSError:
            return 0

    def log_tail(self) -> str:
        """Return the last lines that its processes wrote since the first start or the last replacement."""
        size = self._log_size()
        begin = self._log_begin if self._log_begin <= size else 0  # a large log was renamed
        try:
            with self.member.log.open("rb") as log:
                log.seek(max(size - LOG_TAIL_BYTES, begin))
                lines = log.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _failure(self) -> MemberFailed:
        """Return the error of a start that failed: the process's own last line if that says why, else its log's end."""
        tail = self.log_tail()
        last = tail.rpartition("\n")[2]
        is_told = last.startswith(ERROR_PREFIX)
        quoted = f"; its log ends with:\n{tail}" if tail else f"; it wrote nothing to {self.member.log}"
        why = f": {last.removeprefix(ERROR_PREFIX)}" if is_told else quoted
        return MemberFailed(f"{self.member.name} {self.detail}{why}")

    async def _supervise(self) -> None:
        """Run one process after another until `stop`. Raises MemberFailed when the first start fails for good."""
        backoff = RestartBackoff(self.member.timing)
        while not self._stopping:
            self._end_requested.clear()
            requested = await self._run_once()
            if self._stopping:
                return
            if requested:
                self.replacements += 1
                continue
            if self._ready_since is None:
                self._failed_starts += 1
                self._check_failed_start()
            self.restarts += 1
            self._ready.clear()
            wait_s = backoff.after(0.0 if self._ready_since is None else self._clock() - self._ready_since)
            _log.warning("%s %s; it is started again in %.1f s", self.member.name, self.detail, wait_s)
            self._set_phase("backoff", self.detail)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end_requested.wait(), wait_s)

    def _check_failed_start(self) -> None:
        """Fail a pending replacement when another start is not worth it; raise MemberFailed if never ready so far."""
        wrong_usage = self._child is not None and self._child.returncode == USAGE_STATUS
        if not wrong_usage and self._failed_starts < FIRST_STARTS and not self._start_timed_out:
            return
        failed = self._failure()
        if not self._ever_ready:
            self._set_phase("stopped", self.detail)
            raise failed
        if self._replacement is not None and not self._replacement.done():
            self._replacement.set_exception(failed)
            self._replacement.exception()  # mark it as retrieved: the caller of `replace` may be gone

    async def _run_once(self) -> bool:
        """Run one process to its end. Return whether the end was requested."""
        self._set_phase("starting")
        self._ready_since, self._start_timed_out = None, False
        try:
            child = self._child = await _launch(self.member)
        except OSError as error:
            self._child = None
            self.detail = f"could not be started: {error}"
            return False
        probing = asyncio.ensure_future(self._probe_until_failed())
        requested = asyncio.ensure_future(self._end_requested.wait())
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({probing, requested, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self.detail = _exit_reason(child.returncode)
                _signal_group(child.pid, signal.SIGKILL)  # what it left; a server's engine has a session of its own
                return False
            if not requested.done():
                self.detail = probing.result()
            await self._terminate(child)
            return requested.done()
        finally:
            for task in (probing, requested, ended):
                task.cancel()
            await asyncio.gather(probing, requested, ended, return_exceptions=True)

    async def _terminate(self, child: Process) -> None:
        """Send SIGTERM to the process only, as it ends its own children; SIGKILL to the group after the grace."""
        self._set_phase("stopping", self.detail)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        grace_s = self.member.timing.termination_grace_s
        try:
            await asyncio.wait_for(child.wait(), grace_s)
        except TimeoutError:
            _log.warning("%s did not end within %g s and is killed", self.member.name, grace_s)
        _signal_group(child.pid, signal.SIGKILL)
        await child.wait()

    async def _probe_until_failed(self) -> str:
        """Check health periodically; return the reason why the process must be restarted."""
        timing, began = self.member.timing, self._clock()
        unhealthy_since: float | None = None
        while True:
            healthy, state = await self._probe()
            now = self._clock()
            is_ending = self._end_requested.is_set()  # then the next process is the one that is waited for, if any
            if healthy:
                unhealthy_since = None
                if self._ready_since is None:
                    self._ever_ready, self._ready_since, self._failed_starts = True, now, 0
                if not is_ending:
                    self._set_phase("ready")
                    self._ready.set()
                    if self._replacement is not None and not self._replacement.done():
                        self._replacement.set_result(None)
            elif self._ready_since is None:
                if now - began > timing.start_timeout_s:
                    self._start_timed_out = True
                    return f"was not ready within {timing.start_timeout_s:g} s ({state})"
            else:
                if not is_ending:
                    self._set_phase("failing", state)
                unhealthy_since = now if unhealthy_since is None else unhealthy_since
                if state == RECOVERING:
                    unhealthy_since = None
                elif state == "dead" or now - unhealthy_since > timing.unhealthy_timeout_s:
                    return f"was unwell for {now - unhealthy_since:.0f} s ({state})"
            await asyncio.sleep(timing.probe_interval_s)

    async def _probe(self) -> tuple[bool, str]:
        """Return whether the process is healthy, and the state it reports."""
        if not self.member.health_url:
            return True, ""
        try:
            status, body = await asyncio.to_thread(
                request_json, self.member.health_url, timeout_s=self.member.timing.probe_timeout_s
            )
        except NoAnswer as error:
            return False, str(error)
        state = str(body.get("status", f"status {status}"))
        return status == 200 and state in (*self.member.ready_states, "status 200"), state

    def _set_phase(self, phase: Phase, detail: str = "") -> None:
        if (phase, detail) != (self.phase, self.detail):
            self.phase, self.detail = phase, detail
            self._on_change()


async def _launch(member: Member) -> Process:
    """Start the member in a session of its own, bound to the life of this process. Raises OSError."""
    wrapper = (sys.executable, "-I", "-S", child_process.__file__)
    descriptor = _open_log(member.log)
    try:
        return await asyncio.create_subprocess_exec(
            *wrapper, str(os.getpid()), str(member.timing.termination_grace_s), *member.argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=descriptor, stderr=descriptor,
            env={**os.environ, **member.environment}, start_new_session=True, pass_fds=member.pass_fds,
        )  # fmt: skip
    finally:
        os.close(descriptor)


def _open_log(path: Path) -> int:
    """Open the log for appending; if that fails, log a warning and discard the process's output."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        _log.warning("%s cannot be written: %s", path, error.strerror)
        return os.open(os.devnull, os.O_WRONLY)


def _signal_group(leader: int, number: int) -> None:
    """Send a signal to a process and its descendants, if they still exist."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _exit_reason(status: int | None) -> str:
    """Describe an exit status, to be written after the process's name."""
    if status is not None and status < 0:
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        return f"was ended by {names.get(-status, f'signal {-status}')}"
    return f"ended with status {status}"
