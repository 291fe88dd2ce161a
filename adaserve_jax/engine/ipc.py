"""The messages between the front end and the engine process, and their bytes: msgpack of typed structs, never pickle.

Front end to engine: `Start` (once, on the child's standard input), then `Submit` and `Abort` on a socket.
Engine to front end: `Loading`, then `Ready` or `Failed`, then `Step` after every step and `Refused` for a request that
the engine would not take. Bytes that do not fit these types raise msgspec.ValidationError. Knows no sockets, no jax.
"""

from __future__ import annotations

import builtins
import shutil
import tempfile

import msgspec
import zmq

from adaserve_jax import errors
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineInfo, EngineStats, GenerateRequest, OutputChunk
from adaserve_jax.errors import AdaServeError, EngineDeadError, RequestError


class Start(msgspec.Struct, tag=True, frozen=True):
    """Build an engine by `factory` ("module:callable", called with config and progress) and serve it."""

    config: EngineConfig
    factory: str


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress of loading and compiling: `done` of `total` parts of `what`."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Fault(msgspec.Struct, frozen=True):
    """An exception as data. kind: the class name; param and code: of an AdaServeError."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Loading raised; the engine process ends."""

    fault: Fault


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`submit` raised in the engine process; no chunk of this request follows."""

    request_id: str
    fault: Fault


class Step(msgspec.Struct, tag=True, frozen=True):
    """Everything that became ready together; also sent without chunks, as a sign of life.

    received: how many choices of `Submit` messages the engine has taken in so far; `stats` was read after them.
    """

    chunks: list[OutputChunk]
    stats: EngineStats
    received: int


ToEngine = Submit | Abort
FromEngine = Loading | Ready | Failed | Refused | Step

SAVE_LIMIT_S = 60.0
"""Seconds that an engine which writes down what its drafts learned gets beyond what others get to end."""


def save_limit_s(config: EngineConfig) -> float:
    """Seconds that an engine of this configuration may take to write at its end; both sides wait for it."""
    return 0.0 if config.learning is None or config.learning.learn_folder is None else SAVE_LIMIT_S


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def to_fault(error: BaseException) -> Fault:
    """Describe an exception so that `to_error` can build the same one on the other side."""
    param, code = (error.param, error.code) if isinstance(error, AdaServeError) else (None, None)
    return Fault(type(error).__name__, str(error), param, code)


def to_error(fault: Fault) -> Exception:
    """Rebuild an exception: one of adaserve_jax.errors or of Python's own by name, else EngineDeadError naming it."""
    if fault.kind == RequestError.__name__:
        return RequestError(fault.message, param=fault.param, code=fault.code or "invalid_request")
    kind = getattr(errors, fault.kind, None) or getattr(builtins, fault.kind, None)
    known = (AdaServeError, OSError, ValueError, RuntimeError, TypeError)
    if isinstance(kind, type) and issubclass(kind, known) and not issubclass(kind, UnicodeError):
        return kind(fault.message)
    return EngineDeadError(f"the engine failed with {fault.kind}: {fault.message}")


# The sockets between a front end and its engine process: two pipes in a folder that only this user can enter.
#
# Every function makes one end of one of them. Nothing has a limit, so that sending never waits. Knows no
# message.

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
