"""Two processes hold one target: the text is that of one device; what cannot work is said at once, in both."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from threading import Thread

import jax
import numpy as np
import pytest

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, EngineDeadError
from adaserve_jax.runtime import multihost as hosts
from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.multihost import follow
from adaserve_jax.runtime.step_layout import PackedStep
from tests.conftest import ROOT
from tests.engines import NARROW
from tests.star.service_process import MAIN

LIMIT_S = 200


def free_port() -> int:
    """A port whose successor is free too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = first.getsockname()[1]
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def config_of(port: int, **options: object) -> EngineConfig:
    return EngineConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, tp=2, **options)  # type: ignore[arg-type]


def step_of(tokens: int) -> PackedStep:
    return PackedStep(Bucket(tokens, 1, tokens), np.arange(3 * tokens, dtype=np.int32))


def in_thread(results: list[object], function, *arguments: object) -> Thread:
    def run() -> None:
        try:
            results.append(function(*arguments))
        except Exception as error:
            results.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread


def connected(config: EngineConfig, **own: str) -> tuple[hosts.Followers, hosts.Leader]:
    """Both ends of a connection; own: fields in which process 1 differs."""
    made: list[object] = []
    thread = in_thread(made, hosts.Followers, config)
    leader = hosts.Leader(replace(config, process_id=1, **own))  # type: ignore[arg-type]
    thread.join()
    (followers,) = made
    assert isinstance(followers, hosts.Followers)
    return followers, leader


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_steps_arrive_in_order_and_the_end_is_told(host: str) -> None:
    config = replace(config_of(free_port()), coordinator=f"{host}:{free_port()}")
    followers, leader = connected(config, compile_cache="elsewhere")
    followers.send_config(replace(config, num_pages=77, token_edges=(4, 8)))
    told = leader.config()
    assert (told.num_pages, told.token_edges, told.process_id, told.compile_cache) == (77, (4, 8), 1, "elsewhere")
    for tokens in (4, 8):
        followers.send_step(step_of(tokens))
    for tokens in (4, 8):
        step = leader.next_step()
        assert step is not None
        assert step.bucket == Bucket(tokens, 1, tokens)
        np.testing.assert_array_equal(step.packed, step_of(tokens).packed)
    followers.close()
    assert leader.next_step() is None
    leader.close()


def test_a_leader_that_stops_before_it_serves_says_where_to_look() -> None:
    followers, leader = connected(config_of(free_port()))
    followers.close()
    with pytest.raises(EngineDeadError, match="process 0 stopped before it served; its own message says why"):
        leader.config()
    leader.close()


def test_a_process_that_is_gone_is_named() -> None:
    config = config_of(free_port())
    followers, leader = connected(config)
    leader.close()
    with pytest.raises(EngineDeadError, match=r"process 1 is gone \(.*\); restart all processes"):
        for _ in range(100):
            followers.send_step(step_of(1024))
    followers.close()


def test_a_leader_that_is_gone_is_an_error() -> None:
    config = config_of(free_port())
    followers, leader = connected(config)
    for connection in followers._connections.values():
        connection.close()
    with pytest.raises(EngineDeadError, match="the other process is gone"):
        leader.next_step()
    leader.close()


def test_other_options_are_refused_in_both_processes() -> None:
    config = config_of(free_port(), max_depth=3)
    made: list[object] = []
    thread = in_thread(made, hosts.Followers, config)
    with pytest.raises(ConfigError, match="process 0 was started with other options: max_depth is 2 there and 3 in"):
        hosts.Leader(replace(config, process_id=1, max_depth=2))
    thread.join()
    (error,) = made
    assert isinstance(error, ConfigError)
    assert str(error) == "process 1 was started with other options: max_depth is 2 there and 3 in process 0"


OTHER_HELLO = b'{"process_id": 1, "config": []}'


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\x04\0\0\0null", b"\x02\0\0\0{]",
        len(OTHER_HELLO).to_bytes(4, "little") + OTHER_HELLO,
    ],
)  # fmt: skip
def test_a_connection_that_is_no_process_is_closed(sent: bytes) -> None:
    config = config_of(free_port())
    made: list[object] = []
    thread = in_thread(made, hosts.Followers, config)
    with hosts._connect(hosts._address(config)) as probe:
        probe.sendall(sent)
    leader = hosts.Leader(replace(config, process_id=1))
    thread.join()
    (followers,) = made
    assert isinstance(followers, hosts.Followers), followers
    followers.close()
    assert leader.next_step() is None
    leader.close()


def test_processes_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "JOIN_LIMIT_S", 0.2)
    with pytest.raises(ConfigError, match="1 of 2 processes did not connect: timed out"):
        hosts.Followers(config_of(free_port()))
    with pytest.raises(ConfigError, match=r"process 0 does not listen at 127\.0\.0\.1:\d+"):
        hosts.Leader(config_of(free_port(), process_id=1))


def test_an_address_that_is_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = rf"process 0 cannot listen at 127\.0\.0\.1:{port}, the port after the coordinator's: "
        with pytest.raises(ConfigError, match=told):
            hosts.Followers(config_of(port - 1))


def test_a_process_whose_devices_are_in_use_cannot_join() -> None:
    jax.devices()
    before = jax.config.jax_enable_preemption_service
    try:
        with pytest.raises(ConfigError, match=r"process 0 of 2 could not join at 127\.0\.0\.1:\d+: .*before"):
            hosts.join(config_of(free_port()))
    finally:
        jax.config.update("jax_enable_preemption_service", before)


def test_a_message_that_nobody_sends_is_not_waited_for() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(struct.pack("<I", 2**26 + 1))
        with pytest.raises(EngineDeadError, match="a message of 67108865 bytes came, at most 67108864 are expected"):
            hosts._receive(one)


def test_each_process_has_its_command() -> None:
    with pytest.raises(ConfigError, match="process 1 has no engine of its own; run `adaserve follow` there"):
        load_executor(config_of(free_port(), process_id=1))
    with pytest.raises(ConfigError, match="process 0 serves; `adaserve follow` is for the others"):
        follow(config_of(free_port()))


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("draft", ["demo", "demo-head"])
def test_two_processes_give_the_text_of_one(deterministic: LLM, draft: str) -> None:
    options = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in NARROW.items()]
    together = [
        *options,
        "--draft",
        draft,
        "--tp",
        "2",
        "--num-processes",
        "2",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
    ]
    prompt = ["def add(a, b):\n", "--max-tokens", "32", "--temperature", "0.8", "--seed", "3"]

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        )  # fmt: skip

    follower = start("follow", *together, "--process-id", "1")
    leader = start("generate", *prompt, *together)
    ours, notes = leader.communicate(timeout=LIMIT_S)
    _, ended = follower.communicate(timeout=LIMIT_S)
    assert leader.returncode == follower.returncode == 0, notes + ended
    assert "process 0 stopped after" in ended
    (alone,) = deterministic.generate([prompt[0]], SamplingParams(max_tokens=32, temperature=0.8, seed=3))
    spoken = [line for line in ours.splitlines(keepends=True) if not line.startswith("[Gloo]")]  # XLA's own, CPU only
    assert "".join(spoken) == f"{alone.text}\n"
    assert len(alone.text) > 32
