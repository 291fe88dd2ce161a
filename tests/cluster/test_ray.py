"""A cluster of stand-ins on a Ray cluster of its own: what dies is started anew, at the same address, and all ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from adaserve_jax.cluster.run_folder import ClusterFolder, give_order
from adaserve_jax.errors import ConfigError
from tests.cluster.test_local import UP, Up
from tests.conftest import ROOT
from tests.program import run_program
from tests.waiting import is_alive, wait_until

pytest.importorskip("ray", reason="Ray is not installed; pip install 'adaserve-jax[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("ray"), 2, 1, "ray")
    yield up
    up.process.kill()
    up.process.communicate()


@pytest.mark.parametrize("name, which", [
    ("target-0", "actor_pid"), ("target-1", "pid"), ("draft-0", "actor_pid"),
    ("router", "pid"), ("router", "actor_pid"),
])  # fmt: skip
def test_the_death_of_a_process_or_of_its_actor_is_survived(cluster, name, which):
    before = cluster.member(name)
    os.kill(before[which], signal.SIGKILL)
    if name != "router":
        assert cluster.post().status_code == 200
    after = cluster.other(name, before, which)
    assert after["address"] == before["address"] and not is_alive(before["pid"])
    wait_until(lambda: cluster.post().status_code == 200)


def test_targets_are_replaced_in_turn(cluster):
    before = cluster.pids()
    lines = list(give_order(cluster.folder.socket, "restart targets"))
    assert [line.rpartition(": ")[2] for line in lines].count("is used again") == 2
    wait_until(lambda: all(cluster.member(f"target-{i}")["replacements"] >= 1 for i in range(2)))
    after = cluster.pids()
    assert {name for name in before if before[name] != after[name]} == {"target-0", "target-1"}


def test_down_leaves_no_process(cluster):
    pids = [pid for each in cluster.state()["members"] for pid in (each["pid"], each["actor_pid"])]
    list(give_order(cluster.folder.socket, "down"))
    assert cluster.process.wait() == 0
    wait_until(lambda: not any(map(is_alive, pids)))


def test_one_that_starts_is_shown_and_leaves_no_process_when_it_is_stopped(tmp_path, capsys):
    folder = ClusterFolder(tmp_path)
    (tmp_path / "said").write_text("starting")  # its targets never get further
    command = [sys.executable, UP, tmp_path, "2", "1", "ray"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as up:
        wait_until(lambda: up.poll() is not None or all(map(members(folder).get, ("draft-0", "router", "target-0"))))
        assert folder.read()["phase"] == "starting" and "target-1" not in members(folder)
        assert run_program("cluster", "status", "--run-folder", str(tmp_path)) == 0
        assert "  starting, ray, pid " in capsys.readouterr().out
        pids = [pid for each in members(folder).values() for pid in (each["pid"], each["actor_pid"]) if pid]
        up.send_signal(signal.SIGTERM)
        _, said = up.communicate()
    assert up.returncode == 0, said.decode()
    wait_until(lambda: not any(map(is_alive, pids)))


def members(folder: ClusterFolder) -> dict[str, dict]:
    """By name, of processes that run."""
    try:
        return {each["name"]: each for each in folder.read()["members"] if each["pid"]}
    except ConfigError:
        return {}
