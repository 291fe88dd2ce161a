"""The sockets between a front end and its engine process: two pipes in a folder that only this user can enter.

Every function makes one end of one of them. Nothing has a limit, so that sending never waits. Knows no message.
"""

from __future__ import annotations

import shutil
import tempfile

import zmq

MAX_PATH = 100
LAST_WORDS_MS = 1000
"""How long what an engine said last may take to get out after its end is closed."""
_TO_ENGINE, _FROM_ENGINE = "to_engine", "from_engine"


def new_folder() -> str:
    """A fresh folder, with a path short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="adaserve-")
    if len(folder) > MAX_PATH - len(f"/{_FROM_ENGINE}"):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="adaserve-", dir="/tmp")
    return folder


def requests_out(context: zmq.Context, folder: str) -> zmq.Socket:
    """The front end's. It connects, and the engine binds: a socket that binds has nowhere to put a message while nobody
    is connected."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(_address(folder, _TO_ENGINE))
    return socket


def requests_in(context: zmq.Context, folder: str) -> zmq.Socket:
    """The engine's."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(_address(folder, _TO_ENGINE))
    return socket


def replies_out(context: zmq.Context, folder: str) -> zmq.Socket:
    """The engine's."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.connect(_address(folder, _FROM_ENGINE))
    return socket


def replies_in(context: zmq.Context, folder: str) -> zmq.Socket:
    """The front end's."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(_address(folder, _FROM_ENGINE))
    return socket


def _address(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"
