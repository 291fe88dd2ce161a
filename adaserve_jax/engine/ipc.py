"""Messages and sockets between the front end and the engine process.

Front end to engine: `Start` (once, on the child's standard input), then `Submit`, `Abort`, `LoadAdapter` and
`UnloadAdapter` on a socket. Engine to front end: `Loading`, then `Ready` or `Failed`, then `Step` after every step,
`Refused` for a request that the engine refused, and `AdapterReply` for each call about adapters. Messages are msgpack
of typed structs, never pickle; bytes that do not fit these types raise msgspec.DecodeError. The sockets are two ZeroMQ
pipes in a folder that only this user can enter; they have no size limit, so that sending never waits.
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
from adaserve_jax.errors import AdaServeError, RequestError


class Start(msgspec.Struct, tag=True, frozen=True):
    """Build and serve an engine: `LocalEngine`, or `factory` ("module:callable", called with config and progress).

    warm_folder: as in `LocalEngine`; no other factory gets it.
    """

    config: EngineConfig
    factory: str | None = None
    warm_folder: str | None = None


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Call of `EngineClient.load_adapter`. call: number that the `AdapterReply` repeats."""

    call: int
    name: str
    folder: str
    replace: bool


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Call of `EngineClient.unload_adapter`."""

    call: int
    name: str


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress of loading and compiling: `done` of `total` parts of `what`."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Fault(msgspec.Struct, frozen=True):
    """An exception as data. kind: class name; param and code: those of an AdaServeError."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Loading raised, and the engine process ends."""

    fault: Fault


DIED = "the engine died; its log says why"
"""Reason of a death that no request was told of."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`submit` raised in the engine process; no chunk of this request follows."""

    request_id: str
    fault: Fault


class AdapterReply(msgspec.Struct, tag=True, frozen=True):
    """End of a call about adapters. adapters: names of all that are loaded then. fault: None if nothing was raised."""

    call: int
    adapters: tuple[str, ...]
    fault: Fault | None


class Step(msgspec.Struct, tag=True, frozen=True):
    """Chunks that became ready together; also sent without chunks, as a heartbeat.

    received: number of choices that the engine has received so far; `stats` was read after them.
    """

    chunks: list[OutputChunk]
    stats: EngineStats
    received: int


ToEngine = Submit | Abort | LoadAdapter | UnloadAdapter
FromEngine = Loading | Ready | Failed | Refused | AdapterReply | Step

CLOSE_LIMIT_S = 15.0
"""Seconds that an engine process has to end after `close`, before it is killed."""
SAVE_LIMIT_S = 60.0
"""Seconds that an engine may take at its end to save learned drafts."""
MAX_PATH = 100
"""Longest path of a Unix socket, with a margin (the system's limit is 108)."""
TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"
"""Names of the two sockets."""

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def save_limit_s(config: EngineConfig) -> float:
    """Return the seconds that the engine may take to save at its end; both sides wait for it."""
    return 0.0 if config.learning is None or config.learning.learn_folder is None else SAVE_LIMIT_S


def to_fault(error: BaseException) -> Fault:
    """Describe an exception so that `to_error` can build the same one on the other side."""
    param, code = (error.param, error.code) if isinstance(error, AdaServeError) else (None, None)
    return Fault(type(error).__name__, str(error), param, code)


def to_error(fault: Fault) -> Exception:
    """Rebuild an exception of adaserve_jax.errors or of Python by its name; any other becomes an AdaServeError."""
    if fault.kind == RequestError.__name__:
        return RequestError(fault.message, param=fault.param, code=fault.code or "invalid_request")
    kind = getattr(errors, fault.kind, None) or getattr(builtins, fault.kind, None)
    known = (AdaServeError, OSError, ValueError, RuntimeError, TypeError)
    if isinstance(kind, type) and issubclass(kind, known) and not issubclass(kind, UnicodeError):
        return kind(fault.message)
    return AdaServeError(f"the engine failed with {fault.kind}: {fault.message}")


def new_folder() -> str:
    """Make a folder whose path is short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="adaserve-")
    if len(folder) > MAX_PATH - len(f"/{FROM_ENGINE}"):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="adaserve-", dir="/tmp")
    return folder


def sender(context: zmq.Context, folder: str, name: str, linger_ms: int) -> zmq.Socket:
    """Open the sending end of TO_ENGINE or FROM_ENGINE; once closed, it has `linger_ms` to send its last messages.

    The sender connects and the receiver binds: a PUSH socket that binds has nowhere to put a message while nobody is
    connected.
    """
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.connect(f"ipc://{folder}/{name}")
    return socket


def receiver(context: zmq.Context, folder: str, name: str) -> zmq.Socket:
    """Open the receiving end of TO_ENGINE or FROM_ENGINE."""
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{folder}/{name}")
    return socket
