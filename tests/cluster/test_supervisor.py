"""One process that is kept running: restarts and their waits, hangs, wrong use, clean ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax.cluster import child_process
from adaserve_jax.cluster.plan import free_ports
from adaserve_jax.cluster.router_client import NoAnswer, request_json
from adaserve_jax.cluster.supervisor import Member, MemberFailed, RestartBackoff, Supervisor, SupervisorTiming
from tests.conftest import ROOT
from tests.waiting import is_alive, wait_until

MEMBER = str(Path(__file__).parent / "member.py")
FAST = SupervisorTiming(
    probe_interval_s=0.02, termination_grace_s=20.0, first_backoff_s=0.02, max_backoff_s=0.1, unhealthy_timeout_s=0.2
)


def member(tmp_path: Path, *options: str, timing: SupervisorTiming = FAST) -> Member:
    (port,) = free_ports(1, "127.0.0.1")
    command = (sys.executable, "-S", MEMBER, str(port), *options)
    return Member("m", command, f"http://127.0.0.1:{port}/health", tmp_path / "m.log", timing=timing)


@contextlib.asynccontextmanager
async def supervised(member: Member, **options: Any) -> AsyncIterator[Supervisor]:
    """A supervisor whose process is ready; it is stopped at the end."""
    supervisor = Supervisor(member, **options)
    supervisor.start()
    await supervisor.ready()
    yield supervisor
    await supervisor.stop()


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_waits_double_up_to_the_longest_and_begin_anew_after_a_long_life():
    backoff = RestartBackoff(SupervisorTiming(first_backoff_s=0.5, max_backoff_s=3.0, backoff_reset_s=60.0))
    assert [backoff.after(ready_s) for ready_s in (0, 1, 59.9, 0, 0, 60, 0)] == [0.5, 1.0, 2.0, 3.0, 3.0, 0.5, 1.0]


def test_what_dies_or_says_that_it_is_dead_is_started_again(tmp_path):
    state = tmp_path / "state"

    async def go() -> None:
        async with supervised(member(tmp_path, f"--state={state}")) as supervisor:
            first = supervisor.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1 and supervisor.phase == "ready")
            second = supervisor.pid
            state.write_text("restarting")  # has limits of its own
            await until(lambda: supervisor.phase == "failing")
            assert supervisor.pid == second and supervisor.detail == "restarting"
            state.write_text("dead")
            await until(lambda: not is_alive(second))
            state.write_text("ok")
            await until(lambda: supervisor.restarts == 2 and supervisor.phase == "ready")
            assert len({first, second, supervisor.pid}) == 3
        assert supervisor.phase == "stopped" and supervisor.pid is None

    asyncio.run(go())


def test_the_time_in_which_a_server_replaces_its_engine_is_not_held_against_it(tmp_path):
    """The clock goes on while it says `restarting`; what it says then has the whole limit again."""
    state, now = tmp_path / "state", [0.0]

    async def go() -> None:
        async with supervised(member(tmp_path, f"--state={state}"), clock=lambda: now[0]) as supervisor:
            first = supervisor.pid
            state.write_text("restarting")
            await until(lambda: supervisor.detail == "restarting")
            now[0] += 100.0
            state.write_text("stalled")
            await until(lambda: supervisor.detail == "stalled")
            state.write_text("ok")
            await until(lambda: supervisor.phase == "ready")
            assert (supervisor.pid, supervisor.restarts) == (first, 0)

    asyncio.run(go())


def test_one_that_is_unwell_for_long_is_replaced(tmp_path):
    state = tmp_path / "state"

    async def go() -> None:
        async with supervised(member(tmp_path, f"--state={state}")) as supervisor:
            state.write_text("stalled")
            await until(lambda: supervisor.restarts == 1)
            state.unlink()
            await until(lambda: supervisor.phase == "ready")

    asyncio.run(go())


def test_an_answer_that_is_cut_counts_as_none():
    """Its body is shorter than its head says, and it is an error: the answer of a server that is being killed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10.0)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100\r\n\r\n{")

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)
            with pytest.raises(NoAnswer, match="does not answer"):
                request_json(f"http://127.0.0.1:{listening.getsockname()[1]}/health")
            answered.result()


def test_the_end_by_a_signal_without_a_name_is_told_and_mended(tmp_path):
    async def go() -> None:
        async with supervised(member(tmp_path)) as supervisor:
            os.kill(supervisor.pid, signal.SIGRTMIN + 2)
            await until(lambda: supervisor.restarts == 1 and supervisor.phase == "ready")

    asyncio.run(go())


def test_a_replacement_is_another_process_and_counts_as_no_restart(tmp_path):
    async def go() -> None:
        async with supervised(member(tmp_path)) as supervisor:
            before = supervisor.pid
            await supervisor.replace()
            assert supervisor.pid not in (None, before) and not is_alive(before)
            assert (supervisor.restarts, supervisor.replacements) == (0, 1)

    asyncio.run(go())


def test_wrong_use_is_told_with_the_end_of_the_log_and_not_tried_again(tmp_path):
    async def go() -> None:
        supervisor = Supervisor(member(tmp_path, "--status=2"))
        supervisor.start()
        with pytest.raises(MemberFailed, match=r"m ended with status 2; its log ends with:(.|\n)*this option is wrong"):
            await supervisor.ready()
        assert supervisor.restarts == 0
        await supervisor.stop()

    asyncio.run(go())


def test_one_that_never_starts_is_given_up_after_a_few_times(tmp_path):
    async def go() -> None:
        supervisor = Supervisor(member(tmp_path, "--status=1"))
        supervisor.start()
        with pytest.raises(MemberFailed, match="ended with status 1"):
            await supervisor.ready()
        assert (tmp_path / "m.log").read_text().count("member begins") == 3

    asyncio.run(go())


def test_nothing_is_left_of_one_that_does_not_want_to_end(tmp_path):
    async def go() -> None:
        timing = SupervisorTiming(probe_interval_s=0.02, termination_grace_s=0.1)
        stubborn = member(tmp_path, "--stubborn", f"--child={tmp_path / 'child'}", timing=timing)
        async with supervised(stubborn) as supervisor:
            pid, child = supervisor.pid, int((tmp_path / "child").read_text())
            assert is_alive(pid) and is_alive(child)
        await until(lambda: not is_alive(pid) and not is_alive(child))

    asyncio.run(go())


@pytest.mark.parametrize("said", ["draining", "restarting"])
def test_what_a_process_says_while_it_is_stopped_is_no_failure(tmp_path, said):
    state = tmp_path / "state"
    timing = SupervisorTiming(probe_interval_s=0.02, termination_grace_s=0.5)
    stubborn = member(tmp_path, "--stubborn", f"--state={state}", timing=timing)
    phases: list[str] = []

    async def go() -> None:
        supervisor = Supervisor(stubborn, lambda: phases.append(supervisor.phase))
        supervisor.start()
        await supervisor.ready()
        stopping = asyncio.ensure_future(supervisor.stop())
        await until(lambda: supervisor.phase == "stopping")
        state.write_text(said)
        await stopping

    asyncio.run(go())
    assert phases[-2:] == ["stopping", "stopped"] and "failing" not in phases


def test_the_child_of_one_that_was_killed_is_not_left(tmp_path):
    async def go() -> None:
        async with supervised(member(tmp_path, f"--child={tmp_path / 'child'}")) as supervisor:
            child = int((tmp_path / "child").read_text())
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: not is_alive(child))

    asyncio.run(go())


def test_waits_grow_for_one_that_was_well_once_and_does_not_start_any_more(tmp_path, caplog):
    now, ends = [0.0], tmp_path / "ends"
    timing = SupervisorTiming(probe_interval_s=0.01, first_backoff_s=0.01, max_backoff_s=0.08, backoff_reset_s=60.0)

    async def go() -> None:
        async with supervised(member(tmp_path, f"--ends={ends}", timing=timing), clock=lambda: now[0]) as supervisor:
            now[0] = 1000.0  # a long good life
            ends.write_text("1")
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 5)

    asyncio.run(go())
    waits = [record.args[-1] for record in caplog.records if "started again" in record.msg]
    assert waits[:5] == [0.01, 0.02, 0.04, 0.08, 0.08]


def test_an_error_of_ours_is_told_alone_and_not_that_of_an_earlier_start(tmp_path):
    (tmp_path / "m.log").write_text("adaserve: error: that of an hour ago\n")

    async def told(*options: str) -> str:
        supervisor = Supervisor(member(tmp_path, "--status=2", *options))
        supervisor.start()
        with pytest.raises(MemberFailed) as failed:
            await supervisor.ready()
        await supervisor.stop()
        return str(failed.value)

    error = "adaserve: error: unknown policy 'nope'"
    assert asyncio.run(told(f"--says={error}")) == "m ended with status 2: unknown policy 'nope'"
    assert asyncio.run(told()) == "m ended with status 2; its log ends with:\nmember begins\nthis option is wrong"


@pytest.mark.parametrize("status, starts", [("2", 1), ("1", 3)])
def test_a_replacement_that_does_not_start_is_told_and_tried_on(tmp_path, status, starts):
    ends = tmp_path / "ends"
    expected = rf"m ended with status {status}; its log ends with:(.|\n)*one too many"

    async def go() -> None:
        async with supervised(member(tmp_path, f"--ends={ends}")) as supervisor:
            ends.write_text(status)
            with pytest.raises(MemberFailed, match=expected) as told:
                await supervisor.replace()
            assert str(told.value).count("one too many") == starts
            ends.unlink()
            await until(lambda: supervisor.phase == "ready")
            await supervisor.replace()

    asyncio.run(go())


def test_a_replacement_that_never_gets_well_is_told_when_its_time_is_up(tmp_path):
    state = tmp_path / "state"
    timing = SupervisorTiming(
        probe_interval_s=0.01, first_backoff_s=0.01, start_timeout_s=0.05, unhealthy_timeout_s=600.0
    )

    async def go() -> None:
        quick = SupervisorTiming(probe_interval_s=0.01, first_backoff_s=0.01)
        async with supervised(member(tmp_path, f"--state={state}", timing=quick)) as supervisor:
            supervisor.member = member(tmp_path, f"--state={state}", timing=timing)
            state.write_text("starting")
            with pytest.raises(MemberFailed, match=r"m was not ready within 0.05 s"):
                await supervisor.replace()

    asyncio.run(go())


def test_a_long_log_is_put_aside_at_a_start_and_only_its_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("adaserve_jax.cluster.supervisor.MAX_LOG_BYTES", 100)
    monkeypatch.setattr("adaserve_jax.cluster.supervisor.LOG_TAIL_BYTES", 20)
    (tmp_path / "m.log").write_text("x" * 101)

    async def go() -> None:
        async with supervised(member(tmp_path)) as supervisor:
            assert supervisor.log_tail() == "member begins"

    asyncio.run(go())
    assert (tmp_path / "m.log.1").read_text() == "x" * 101


KEEPS = """
import asyncio, sys
from adaserve_jax.cluster.supervisor import Supervisor
from adaserve_jax.cluster.supervisor import Member, SupervisorTiming
async def go():
    supervisor = Supervisor(Member("m", tuple(sys.argv[2:]), sys.argv[1], __import__("pathlib").Path("m.log"),
                           timing=SupervisorTiming(probe_interval_s=0.02, termination_grace_s=0.2)))
    supervisor.start()
    await supervisor.ready()
    print(supervisor.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(go())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is noticed on Linux only")
def test_not_even_what_ignores_sigterm_outlives_the_keeper(tmp_path):
    stubborn = member(tmp_path, "--stubborn", f"--child={tmp_path / 'child'}")
    command = (sys.executable, "-c", KEEPS, stubborn.health_url, *stubborn.argv)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as keeps:
        pid = int(keeps.stdout.readline())
        child = int((tmp_path / "child").read_text())
        assert is_alive(pid) and is_alive(child)
        keeps.kill()
    wait_until(lambda: not is_alive(pid) and not is_alive(child))


COUNTS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], "a").write("TERM\\n"))
print("ready", flush=True)
time.sleep(30)
time.sleep(30)
"""
THREADS = """
import os, subprocess, sys, threading, time
for _ in range(8):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
wrapper = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "1"]
subprocess.run([*wrapper, sys.executable, "-c", *sys.argv[2:]], start_new_session=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is noticed on Linux only")
def test_the_death_of_a_parent_with_threads_is_told_once(tmp_path):
    """A server takes a second SIGTERM for an order to end at once."""
    told = tmp_path / "told"
    command = (sys.executable, "-c", THREADS, child_process.__file__, COUNTS, str(told))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b""  # until the child, which ignores SIGTERM, is killed after its grace
    assert told.read_text() == "TERM\n"
