"""A way over a network of its own, which loses and delays packets; where that is permitted.

Two TUN devices, one of them in a network namespace, and a thread for each direction that passes packets on: what the
kernel's netem does, by a seed, and also on kernels without it. TCP above is the kernel's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LOOK_S = 0.1


class Network:
    """listening: a socket at the far end, which this process accepts at. loss: share of packets that are lost, and
    delay_s of those that are not, each way, from now on. passed, lost: packets."""

    def __init__(self, listening: socket.socket, near: int, far: int) -> None:
        self.listening = listening
        self.loss = 0.0
        self.delay_s = 0.0
        self.passed = self.lost = 0
        self._ended = threading.Event()
        ways = ((near, far), (far, near))
        self._threads = [threading.Thread(target=self._pass, args=(seed, *way)) for seed, way in enumerate(ways)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _pass(self, seed: int, come: int, go: int) -> None:
        draw, waiting = random.Random(seed), deque[tuple[float, bytes]]()
        while not self._ended.is_set():
            next_s = waiting[0][0] - time.monotonic() if waiting else _LOOK_S
            if select.select([come], [], [], min(max(next_s, 0.0), _LOOK_S))[0]:
                packet = os.read(come, 65536)
                if draw.random() < self.loss:
                    self.lost += 1
                else:
                    waiting.append((time.monotonic() + self.delay_s, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(go, waiting.popleft()[1])
                self.passed += 1


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Both ends and the way between them. Skips the test where they cannot be made."""
    number = os.getpid() % 2**15
    name, near, far = (f"{kind}{number}" for kind in ("star", "starn", "starf"))
    here, there = (f"198.{18 + number // 2**14}.{number // 64 % 256}.{4 * (number % 64) + at}" for at in (1, 2))
    with contextlib.ExitStack() as held:
        try:
            _ip("netns", "add", name)
            held.callback(_ip, "netns", "del", name)
            ends = [_tun(held, device) for device in (near, far)]
            _ip("link", "set", far, "netns", name)
            for at, device, address in (((), near, here), (("-n", name), far, there)):
                _ip(*at, "addr", "add", f"{address}/30", "dev", device)
                _ip(*at, "link", "set", device, "up")
            listening = held.enter_context(contextlib.closing(_listen(name, there)))
        except (subprocess.CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"network namespaces and TUN devices are not to be had here: {said.strip()[:200]}")
        yield held.enter_context(contextlib.closing(Network(listening, *ends)))


def _tun(held: contextlib.ExitStack, name: str) -> int:
    """A new device: what is read are packets sent to it. It ends with its descriptor."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    held.callback(os.close, end)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _listen(name: str, address: str) -> socket.socket:
    """A socket in that namespace: made by a thread that goes there, and used from anywhere."""
    made: list[socket.socket | OSError] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                made.append(OSError(ctypes.get_errno(), "setns"))
                return
        try:
            made.append(socket.create_server((address, 0)))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)
