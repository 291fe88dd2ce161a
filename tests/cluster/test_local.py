"""A cluster on this machine with stand-ins for its servers: what it survives, how it is replaced, and that it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from adaserve_jax.cluster.plan import (
    ClusterPlan,
    ReservedPort,
    place_draft,
    place_target,
    render_command,
    target_environment,
)
from adaserve_jax.cluster.run_folder import ClusterFolder, default_folder, give_order
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.server.serve import listen
from adaserve_jax.server.settings import ServerSettings
from tests.cluster.conftest import BODY
from tests.conftest import ROOT
from tests.program import run_program
from tests.waiting import is_alive, wait_until

UP = Path(__file__).parent / "up_members.py"


class Up:
    """A running cluster of stand-ins."""

    def __init__(self, folder: Path, targets: int, drafts: int, *options: str):
        self.folder = ClusterFolder(folder)
        self.process = subprocess.Popen(
            [sys.executable, UP, folder, str(targets), str(drafts), *options], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        wait_until(lambda: self.process.poll() is not None or self.state().get("phase") == "ready", every_s=0.02)
        assert self.process.poll() is None, self.process.stderr.read().decode()

    def state(self) -> dict:
        try:
            return self.folder.read()
        except ConfigError:
            return {}

    def member(self, name: str) -> dict:
        return next(each for each in self.state()["members"] if each["name"] == name)

    def other(self, name: str, before: dict, which: str = "pid") -> dict:
        """The member once it is ready with another process than before."""
        while True:
            now = self.member(name)
            if now["phase"] == "ready" and now[which] not in (None, before[which]):
                return now
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        return {each["name"]: each["pid"] for each in self.state()["members"]}

    def post(self) -> httpx.Response:
        return httpx.post(f"{self.state()['url']}/v1/completions", json=BODY, timeout=None)


@pytest.fixture(scope="module")
def started() -> Iterator[list[Up]]:
    """Collect the clusters that the tests share, and end them."""
    clusters: list[Up] = []
    yield clusters
    for up in clusters:
        up.process.kill()
        up.process.communicate()


@pytest.fixture
def cluster(started, tmp_path_factory) -> Up:
    """Return the running cluster of the tests before, or a new one if there is none or a test ended it."""
    if not started or started[-1].process.poll() is not None:
        started.append(Up(tmp_path_factory.mktemp("run"), 2, 1))
    return started[-1]


def test_state_and_token_are_for_their_owner_only(cluster):
    folder = cluster.folder
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for path in (folder.state_file, folder.token_file, *folder.logs.glob("*.log")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    state = cluster.state()
    assert folder.token not in json.dumps(state) and len(folder.token) >= 32
    assert [each["name"] for each in state["members"]] == ["router", "draft-0", "target-0", "target-1"]
    command = Path(f"/proc/{cluster.member('target-0')['pid']}/cmdline").read_text().split("\0")
    assert command[-3:-1] == ["--drafter", cluster.member("draft-0")["address"]]
    assert all(folder.token not in Path(f"/proc/{pid}/cmdline").read_text() for pid in cluster.pids().values())


def test_a_second_cluster_in_the_folder_is_refused(cluster):
    with pytest.raises(ConfigError, match=r"a cluster runs in .* already; stop it with 'adaserve cluster down'"):
        ClusterFolder(cluster.folder.path).open()


@pytest.mark.parametrize("name", ["router", "target-0", "draft-0"])
def test_the_death_of_a_member_is_survived(cluster, name):
    before = cluster.member(name)
    url = cluster.state()["url"]
    os.kill(before["pid"], signal.SIGKILL)
    assert cluster.post().status_code == 200  # of a router that is not there the socket is, and the request waits
    after = cluster.other(name, before)
    assert after["restarts"] == before["restarts"] + 1
    assert after["address"] == before["address"] and cluster.state()["url"] == url
    assert cluster.post().status_code == 200


def test_a_rolling_replacement_fails_no_request(cluster):
    before = cluster.pids()
    done, failed, answered = threading.Event(), [], 0

    def ask() -> None:
        nonlocal answered
        with httpx.Client(base_url=cluster.state()["url"], timeout=None) as http:
            while not done.is_set():
                if http.post("/v1/completions", json=BODY).status_code != 200:
                    failed.append(1)
                answered += 1

    asking = threading.Thread(target=ask)
    asking.start()
    lines = list(give_order(cluster.folder.socket, "restart targets"))
    done.set()
    asking.join()
    assert not failed and answered
    assert [line.rpartition(": ")[2] for line in lines if "left" not in line] == [
        "takes nothing new", "is replaced", "is used again", "takes nothing new", "is replaced", "is used again",
    ]  # fmt: skip
    after = cluster.pids()
    assert {name for name in before if before[name] != after[name]} == {"target-0", "target-1"}


def test_drafts_are_replaced_when_that_is_ordered(cluster):
    before = cluster.pids()
    lines = list(give_order(cluster.folder.socket, "restart drafts"))
    assert lines == ["draft-0: is replaced", "draft-0: is used again"]
    cluster.other("draft-0", {"pid": before["draft-0"]})
    after = cluster.pids()
    assert {name for name in before if before[name] != after[name]} == {"draft-0"}
    with pytest.raises(AdaServeError, match="an order must be one of restart targets, restart drafts, restart all"):
        list(give_order(cluster.folder.socket, "restart everything"))


def test_status_shows_every_process(cluster, capsys):
    assert run_program("cluster", "status", "--run-folder", str(cluster.folder.path)) == 0
    shown = capsys.readouterr().out
    assert all(f"pid {pid}" in shown for pid in cluster.pids().values()) and shown.count("up at the router") == 2


@pytest.mark.slow
def test_down_leaves_nothing(tmp_path):
    up = Up(tmp_path, 2, 1)
    pids = up.pids()
    assert run_program("cluster", "down", "--run-folder", str(up.folder.path)) == 0
    assert up.process.wait() == 0
    up.process.communicate()
    assert not any(map(is_alive, pids.values()))
    left = sorted(path.name for path in up.folder.path.iterdir())
    assert left == ["lock", "logs"]


def test_the_death_of_the_cluster_itself_leaves_no_orphan(cluster):
    """Kill it: it has said what it starts, when each is ready, and at last where it serves."""
    pids, url = cluster.pids(), cluster.state()["url"]
    assert len(pids) == 4 and all(map(is_alive, pids.values()))
    assert f"serves on {url} with 2 targets and 1 draft service after" in cluster.process.stdout.readline().decode()
    cluster.process.kill()
    _, said = cluster.process.communicate()
    wait_until(lambda: not any(map(is_alive, pids.values())), every_s=0.02)
    first, *others = said.decode().splitlines()
    assert first.startswith("adaserve cluster: starts 2 targets and 1 draft service; a first start")
    assert str(cluster.folder.logs) in first
    ready = [line.partition(" is ready after ")[0] for line in others if " is ready after " in line]
    assert sorted(ready[:4]) == sorted(f"adaserve cluster: {name}" for name in pids)


@pytest.mark.slow
def test_a_cluster_whose_folder_is_gone_serves_on_and_ends_cleanly(tmp_path):
    folder = tmp_path / "run"
    up = Up(folder, 1, 0)
    state, pids = up.state(), up.pids()
    folder.rename(tmp_path / "gone")  # at once: the cluster may be writing in it
    folder.touch()
    os.kill(pids["target-0"], signal.SIGKILL)  # a change that is to be written down
    wait_until(lambda: httpx.post(f"{state['url']}/v1/completions", json=BODY, timeout=None).status_code == 200)
    up.process.send_signal(signal.SIGTERM)
    _, said = up.process.communicate()
    assert up.process.returncode == 0 and not any(map(is_alive, pids.values()))
    assert said.decode().count("state.json cannot be written") == 1


def test_the_state_of_a_cluster_that_was_killed_is_not_shown(tmp_path):
    folder = ClusterFolder(tmp_path)
    folder.open()
    folder.write({"phase": "ready"})
    assert folder.read() == {"phase": "ready"}
    killed = ClusterFolder(tmp_path / "killed")  # nobody holds its lock
    killed.make()
    killed.write({"phase": "ready"})
    with pytest.raises(ConfigError, match="no cluster runs in"):
        killed.read()


def test_a_cluster_that_begins_to_start_is_not_taken_for_none(tmp_path, capsys):
    folder = ClusterFolder(tmp_path)
    folder.open()
    with pytest.raises(ConfigError, match="it is starting or ending, or its folder was changed; ask again"):
        folder.read()
    folder.write({
        "orchestrator": "ray", "pid": 7, "phase": "starting", "url": "", "tls_cert": None,
        "members": [{"name": "draft-0", "phase": "starting", "detail": "", "pid": None, "address": "", "restarts": 0}],
    })  # fmt: skip
    assert run_program("cluster", "status", "--run-folder", str(tmp_path)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "no address yet  starting, ray, pid 7" and second.startswith("  draft-0    starting, pid None")
    folder.close()


def test_the_usual_folder_outlives_a_login(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "adaserve" / os.uname().nodename
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local" / "state" / "adaserve" / os.uname().nodename


def test_orders_to_no_cluster_say_so(tmp_path, capsys):
    for order in ("status", "down", "restart"):
        assert run_program("cluster", order, "--run-folder", str(tmp_path)) == 2
        assert "no cluster" in capsys.readouterr().err


@pytest.mark.parametrize("wrong, said", [
    ({"targets": 0}, "targets must be from 1 to 256, got 0"),
    ({"drafts": -1}, "drafts must be from 0 to 256, got -1"),
    ({"router": RouterSettings(tls_cert="c", tls_key="k", tls_client_ca="a")}, "tls_client_ca cannot be given"),
    ({"serve_options": ("--port=1",)}, "--port is given to each server by the cluster itself; leave it out"),
    ({"draft_options": ("--listen", "x")}, "--listen is given to each server"),
])  # fmt: skip
def test_wrong_plans_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        ClusterPlan(**({"targets": 1, "drafts": 0, "router": RouterSettings()} | wrong))


@pytest.mark.parametrize("wrong, said", [
    ({"targets": ("http://x/v1",)}, "targets must be host:port or URLs like .* without a path, got 'http://x/v1'"),
    ({"targets": ("a:1", "http://a:1")}, "targets must be different ones, got 'http://a:1' twice"),
    ({"router": "best"}, "unknown router 'best'; known routers are"),
    ({"poll_every": 0.0}, "poll_every must be a finite number of seconds above 0, got 0.0"),
    ({"port": 70000}, "port must be an integer from 0 to 65535"),
])  # fmt: skip
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        RouterSettings(**wrong)


def test_members_speak_no_tls_whatever_the_environment_says(tmp_path):
    """A draft with TLS would be asked without, and every target would decode without drafts."""
    plan = ClusterPlan(1, 1, RouterSettings())
    target = place_target(plan, 0, "127.0.0.1", 1, ["grpc://127.0.0.1:2"], tmp_path)
    for placed in (target, place_draft(plan, 0, "127.0.0.1", 2, 3, tmp_path)):
        assert {placed.environment[f"ADASERVE_TLS_{name}"] for name in ("CERT", "KEY", "CLIENT_CA")} == {"none"}


def test_a_target_asks_for_the_routers_keys_which_are_in_no_command():
    plan = ClusterPlan(1, 0, RouterSettings(api_key="sk-1,sk-2"))
    assert target_environment(plan)["ADASERVE_API_KEY"] == "sk-1,sk-2"
    assert "sk-1" not in repr(RouterSettings(api_key="sk-1"))
    assert render_command(("{python}", "{drafter}", "{port}"), port=7, drafts="") == (sys.executable, "7")


@pytest.mark.parametrize("options, shutdown_s", [
    ((), 70.0), (("--shutdown-timeout", "100"), 100.0), (("--shutdown-timeout=5", "--x"), 5.0),
    (("--shutdown-timeout", "1", "--shutdown-timeout=2"), 2.0), (("--shutdown-timeout",), 70.0),
])  # fmt: skip
def test_nothing_is_killed_before_its_own_limit(options, shutdown_s, tmp_path):
    """Two seconds to end what was aborted, fifteen for the engine to end, and ten beyond that."""
    plan = ClusterPlan(1, 0, RouterSettings(shutdown_timeout=70.0), serve_options=options)
    placed = place_target(plan, 0, "127.0.0.1", 1, [], tmp_path)
    assert placed.timing.termination_grace_s == shutdown_s + 27.0 and plan.router_grace_s == 82.0
    assert float(placed.environment["ADASERVE_SHUTDOWN_TIMEOUT"]) == shutdown_s
    assert place_draft(plan, 0, "127.0.0.1", 1, 2, tmp_path).timing == plan.timing
    learns = replace(plan, serve_options=(*options, "--learn-folder", str(tmp_path)))
    assert learns.target_grace_s == shutdown_s + 87.0, "a minute to save what was learned"


def test_targets_keep_to_their_configuration_file(tmp_path):
    file = tmp_path / "adaserve.toml"
    file.write_text('[server]\nshutdown_timeout = 120.0\n[learn]\nlearn = true\nlearn_folder = "learned"\n')
    given = ("--config", str(file))
    placed = place_target(ClusterPlan(1, 0, RouterSettings(), serve_options=given), 0, "127.0.0.1", 1, [], tmp_path)
    assert placed.environment["ADASERVE_SHUTDOWN_TIMEOUT"] == "120"
    assert placed.argv[-2:] == given

    plan = ClusterPlan(2, 0, RouterSettings(), serve_options=(*given, "--shutdown-timeout=5"))
    placed = place_target(plan, 1, "127.0.0.1", 1, [], tmp_path)
    assert placed.environment["ADASERVE_SHUTDOWN_TIMEOUT"] == "5"
    assert placed.argv[-2:] == ("--learn-folder", "learned/target-1"), "servers must not share one"
    plan = ClusterPlan(2, 0, RouterSettings(), serve_options=(*given, "--learn-folder", "none"))
    assert place_target(plan, 1, "127.0.0.1", 1, [], tmp_path).argv[-2:] == ("--learn-folder", "none")

    file.write_text('[server]\ntls_cert = "c.pem"\ntls_key = "k.pem"\n')
    with pytest.raises(ConfigError, match="file sets tls_cert, but in a cluster only the router has TLS: leave it out"):
        ClusterPlan(1, 0, RouterSettings(), serve_options=given)


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")
def test_a_port_is_kept_for_the_server_that_it_was_chosen_for():
    held = ReservedPort("127.0.0.1")
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", held.number))
    for _ in range(2):  # a server may come again
        with listen(ServerSettings(port=held.number)) as server, pytest.raises(OSError):
            socket.create_connection(server.getsockname()).close()
            ReservedPort("127.0.0.1", held.number)
    held.close()
