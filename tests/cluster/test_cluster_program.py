"""`adaserve cluster up` with real servers of the embedded pair, and a draft service: every
process in turn is killed under requests, targets are replaced under requests, and all ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from adaserve_jax.cluster.run_folder import give_order
from tests.cluster.test_local import Up
from tests.conftest import ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SERVE = ("--max-requests", "8", "--token-edges", "16,64", "--row-edges", "8")
BODY = {"prompt": "def add(a, b):", "max_tokens": 48, "seed": 7, "temperature": 1.0, "ignore_eos": True}
NAMES = ["router", "target-0", "engine of target-1", "draft-0"]


class Program(Up):
    """The command itself, detached."""

    def __init__(self, folder: Path):
        from adaserve_jax.cluster.run_folder import ClusterFolder

        self.folder = ClusterFolder(folder)
        command = [
            sys.executable, "-m", "adaserve_jax.cli", "cluster", "up", "--targets", "2", "--port", "0",
            "--drafts", "1", "--draft-options", "--max-batch 8", "--run-folder", str(folder), "--detach", "--", *SERVE,
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
        assert "router is ready after" in done.stdout and "in the background; its log is" in done.stdout
        print(f"served after {time.monotonic() - began:.1f} s")

    def ask(self, **more) -> httpx.Response:
        return httpx.post(f"{self.state()['url']}/v1/completions", json=BODY | more, timeout=600)

    def text(self) -> str:
        return self.ask().json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Program]:
    running = Program(tmp_path_factory.mktemp("run"))
    yield running
    if running.state():
        os.kill(running.state()["pid"], signal.SIGTERM)
        wait_until(lambda: not running.folder.is_held)


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(found) for found in listed.stdout.split()]


@pytest.mark.parametrize("what", NAMES)
def test_the_death_of_any_process_costs_no_answer(cluster, what):
    text, name = cluster.text(), what.rpartition(" ")[2]
    before = cluster.member(name)
    pid = children(before["pid"])[0] if what.startswith("engine") else before["pid"]
    os.kill(pid, signal.SIGKILL)
    assert [cluster.text() for _ in range(6)] == [text] * 6
    if what.startswith("engine"):
        wait_until(lambda: cluster.member(name)["phase"] == "ready" and children(before["pid"]) not in ([], [pid]))
    else:
        cluster.other(name, before)
    assert cluster.text() == text


def test_targets_are_replaced_while_requests_are_answered(cluster):
    done, answers = threading.Event(), []

    def ask() -> None:
        while not done.is_set():
            streamed = cluster.ask(stream=True)
            answers.append(streamed.status_code == 200 and '"error"' not in streamed.text)

    asking = threading.Thread(target=ask)
    asking.start()
    lines = list(give_order(cluster.folder.socket, "restart targets"))
    done.set()
    asking.join()
    assert sum(line.endswith("is used again") for line in lines) == 2 and answers and all(answers)
