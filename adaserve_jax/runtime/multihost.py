"""Several processes, usually one per host, that hold one target: process 0 schedules, the others mirror its programs.

All processes must run the same programs in the same order, each on its own shards. So process 0 sends every packed
step to the others over TCP just before it runs it: one small array per step, no logits, no weights. The network must be
private, as for `jax.distributed` itself: nothing here is encrypted or signed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import time
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError, EngineDeadError
from adaserve_jax.runtime.compile import Bucket, compile_all, use_compile_cache
from adaserve_jax.runtime.loading import declare_target, find_pair, load_target
from adaserve_jax.runtime.sizing import resolve, workspace_of
from adaserve_jax.runtime.step_layout import PackedStep
from adaserve_jax.types import Progress

JOIN_LIMIT_S = 300.0
HELLO_LIMIT_S = 10.0
"""Time in which a connection must say who it is: others wait behind it."""
LEAVE_LIMIT_S = 10
RETRY_S = 0.1
_MAX_MESSAGE_BYTES = 1 << 26
_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_END = b""
_OWN = ("process_id", "profile", "calibration", "compile_cache")
"""Options in which processes may differ."""


def join(config: EngineConfig) -> None:
    """Join the processes of `config`; return when all devices are known. Call it before anything touches a device.

    Raises ConfigError: the others did not join in time, or the coordinator's address cannot be used.
    """
    # The handler of this service would take the SIGTERM that drains the server.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=int(JOIN_LIMIT_S),
            shutdown_timeout_seconds=LEAVE_LIMIT_S,
        )
        jax.devices()
    except RuntimeError as error:
        raise ConfigError(
            f"process {config.process_id} of {config.num_processes} could not join at {config.coordinator}: {error}"
        ) from error


def leave() -> None:
    """Leave what `join` joined, all processes together. Waits LEAVE_LIMIT_S for a process that is gone."""
    with contextlib.suppress(RuntimeError):  # the others are gone, or this process never joined
        jax.distributed.shutdown()


def follow(config: EngineConfig, progress: Progress | None = None) -> int:
    """Run this process's part of every step of process 0 until it stops; return the number of steps.

    Raises ConfigError: this is process 0, or its options differ; CheckpointError: the target cannot be loaded here;
    EngineDeadError: process 0 is gone.
    """
    if not config.process_id:
        raise ConfigError("process 0 serves; `adaserve follow` is for the others: give --process-id 1, 2, ...")
    use_compile_cache(config.compile_cache)
    leader = Leader(config)
    steps = 0
    try:
        join(config)
        pair = find_pair(config)
        resolved = resolve(leader.config(), pair.target, pair.draft)
        resolved = replace(resolved, sizes=resolved.sizes.without_draft().without("texts"))  # process 0's
        resolved.check_memory()
        target = load_target(pair, resolved, progress)
        target.compiled = compile_all(declare_target(target, resolved.limits), progress)
        resolved.check_memory(workspace_of(target.compiled))
        while (step := leader.next_step()) is not None:
            target.run(step)
            steps += 1
        target.close()
    finally:
        leader.close()
        leave()
    return steps


class Followers:
    """Process 0's connections to the other processes.

    They are made before `join`, so that a process with other options is refused at once. Those that were admitted
    before it wait for JOIN_LIMIT_S.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Wait for every process. Raises ConfigError: one is late, or was started with other options.

        What connects and is no process of this engine, such as a probe of the port, is closed.
        """
        self._connections: dict[int, socket.socket] = {}
        try:
            with _listener(config) as listener:
                until = time.monotonic() + JOIN_LIMIT_S
                while len(self._connections) < config.num_processes - 1:
                    listener.settimeout(max(until - time.monotonic(), 1e-3))
                    connection = listener.accept()[0]
                    try:
                        self._admit(connection, config)
                    except (EngineDeadError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                        _log.warning("closed a connection that is no process of this engine: %r", error)
                        connection.close()
        except OSError as error:
            self.close()
            missing = config.num_processes - 1 - len(self._connections)
            raise ConfigError(f"{missing} of {config.num_processes} processes did not connect: {error}") from error
        except ConfigError:
            self.close()
            raise

    def _admit(self, connection: socket.socket, config: EngineConfig) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(HELLO_LIMIT_S)
        hello = json.loads(_receive(connection) or "null")
        connection.settimeout(JOIN_LIMIT_S)
        differing = _difference(_shared(config), hello["config"])
        if hello["process_id"] in self._connections:
            differing = f"process_id is {hello['process_id']} in two processes"
        _send(connection, json.dumps(differing).encode())
        if differing:
            connection.close()
            raise ConfigError(f"process {hello['process_id']} was started with other options: {differing}")
        self._connections[hello["process_id"]] = connection

    def send_config(self, resolved: EngineConfig) -> None:
        """Send the configuration without "auto", so that all build the same programs."""
        self._send_all(json.dumps(_shared(resolved)).encode())

    def send_step(self, step: PackedStep) -> None:
        """Send a step to every process. Raises EngineDeadError: a process is gone."""
        bucket = step.bucket
        head = (bucket.tokens, bucket.rows, bucket.sampled)
        self._send_all(np.concatenate([np.asarray(head, np.int32), step.packed]).tobytes())

    def _send_all(self, message: bytes) -> None:
        for process, connection in self._connections.items():
            try:
                _send(connection, message)
            except OSError as error:
                raise EngineDeadError(f"process {process} is gone ({error}); restart all processes") from error

    def close(self) -> None:
        """Let the processes end; safe to call twice."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # gone already
                _send(connection, _END)
            connection.close()
        self._connections.clear()


class Leader:
    """Connection of another process to process 0, made before `join`."""

    def __init__(self, config: EngineConfig) -> None:
        """Connect and compare options. Raises ConfigError: process 0 refuses, or is not there in time."""
        self._own = {name: getattr(config, name) for name in _OWN}
        self._connection = _connect(_address(config))
        hello = {"process_id": config.process_id, "config": _shared(config)}
        _send(self._connection, json.dumps(hello).encode())
        refusal = json.loads(_receive(self._connection))
        if refusal:
            self.close()
            raise ConfigError(f"process 0 was started with other options: {refusal}")
        self._connection.settimeout(None)

    def config(self) -> EngineConfig:
        """Wait for process 0's configuration without "auto", and return it with this process's own options.

        Raises EngineDeadError: process 0 stopped before it had one.
        """
        message = _receive(self._connection)
        if message == _END:
            raise EngineDeadError("process 0 stopped before it served; its own message says why")
        return EngineConfig(**json.loads(message) | self._own)

    def next_step(self) -> PackedStep | None:
        """Wait for the next step; None once process 0 has stopped. Raises EngineDeadError: it is gone."""
        message = _receive(self._connection)
        if message == _END:
            return None
        values = np.frombuffer(message, np.int32)
        tokens, rows, sampled = (int(value) for value in values[:3])
        return PackedStep(Bucket(tokens, rows, sampled), values[3:])

    def close(self) -> None:
        self._connection.close()


def _address(config: EngineConfig) -> tuple[str, int]:
    """Return the coordinator's host (IPv6 in brackets) and the port after its port."""
    host, _, port = str(config.coordinator).rpartition(":")
    return host.strip("[]"), int(port) + 1


def _listener(config: EngineConfig) -> socket.socket:
    """Listen for the other processes. Raises ConfigError: this host has no such address, or the port is in use."""
    host, port = _address(config)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=config.num_processes)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at {host}:{port}, the port after the coordinator's: {error}"
        ) from error


def _shared(config: EngineConfig) -> dict[str, Any]:
    values = json.loads(json.dumps(asdict(config)))
    return {name: value for name, value in values.items() if name not in _OWN}


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Describe the first option that differs; "" if none does."""
    names = [name for name in ours if ours[name] != theirs.get(name)]
    return f"{names[0]} is {theirs.get(names[0])!r} there and {ours[names[0]]!r} in process 0" if names else ""


def _connect(address: tuple[str, int]) -> socket.socket:
    """Connect to process 0, which may start later than this process."""
    give_up_s = time.monotonic() + JOIN_LIMIT_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=JOIN_LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            if time.monotonic() > give_up_s:
                raise ConfigError(f"process 0 does not listen at {address[0]}:{address[1]}: {error}") from error
            time.sleep(RETRY_S)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > _MAX_MESSAGE_BYTES:
        raise EngineDeadError(f"a message of {size} bytes came, at most {_MAX_MESSAGE_BYTES} are expected")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError as error:
            raise EngineDeadError(f"the other process is gone: {error}") from error
        if not part:
            raise EngineDeadError("the other process is gone: it closed the connection")
        data += part
    return bytes(data)
