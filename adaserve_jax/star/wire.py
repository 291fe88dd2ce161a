"""Messages to protobuf frames and back. What comes from the other side is believed in nothing: what makes no sense is a
WireError that names the field, never an exception of another kind.

An error in one message of a frame stands in its place, so that it costs its own session only; an error of the frame
itself (no protobuf, too large, a message of no kind) is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from adaserve_jax.star import draft_pb2 as pb
from adaserve_jax.star.checks import LARGEST, Caps, Check
from adaserve_jax.star.messages import (
    REFUSALS,
    Close,
    Draft,
    FromService,
    FromTarget,
    Hello,
    Load,
    Open,
    Refused,
    Resync,
    Tree,
    Welcome,
    WireError,
)
from adaserve_jax.star.wire_rows import read_drafts, read_trees, write_draft, write_tree

MAX_FRAME_BYTES = 4 * 2**20
"""Of one frame, in both directions; larger ones are refused before they are read."""
METHOD = "/adaserve.star.v1.DraftService/Serve"
"""The one method of the service, a stream of frames in both directions."""


DEFAULT_CAPS = Caps()


def target_frame(messages: Iterable[FromTarget]) -> bytes:
    """The bytes of a frame of a target."""
    return _frame(pb.TargetFrame(), messages, _WRITE)


def service_frame(messages: Iterable[FromService]) -> bytes:
    """The bytes of a frame of the service."""
    return _frame(pb.ServiceFrame(), messages, _WRITE)


M = TypeVar("M")


def in_frames(write: Callable[[Sequence[M]], bytes], messages: Sequence[M]) -> list[bytes]:
    """The messages in as many frames as the caps ask for. write: `target_frame` or `service_frame`."""
    if len(messages) <= DEFAULT_CAPS.messages:
        data = write(messages)
        if len(data) <= MAX_FRAME_BYTES or len(messages) == 1:
            return [data]
    half = len(messages) // 2
    return in_frames(write, messages[:half]) + in_frames(write, messages[half:])


def read_target_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromTarget | WireError]:
    """The messages of a frame of a target, or what is wrong with one in its place. Raises WireError."""
    return _read(pb.TargetFrame, data, caps, _READ_TARGET, "draft", read_drafts)


def read_service_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromService | WireError]:
    """The messages of a frame of the service, or what is wrong with one in its place. Raises WireError."""
    return _read(pb.ServiceFrame, data, caps, _READ_SERVICE, "tree", read_trees)


def _read(
    kind: Any, data: bytes, caps: Caps, readers: dict[str, Callable[[Any, Caps], Any]], usual: str,
    read_usual: Callable[[list[Any], Caps], list[Any]],
) -> list[Any]:  # fmt: skip
    """usual: the kind of which there are many, read together by `read_usual`; the others one by one by `readers`."""
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {len(data)}")
    try:
        frame = kind.FromString(data)
    except DecodeError:
        raise WireError(f"a frame must be a protobuf {kind.DESCRIPTOR.name}, got {len(data)} bytes of other") from None
    if len(frame.messages) > caps.messages:
        raise WireError(f"a frame must have at most {caps.messages} messages, got {len(frame.messages)}")
    read: list[Any] = []
    many, places = [], []
    for each in frame.messages:
        name = each.WhichOneof("kind")
        if name == usual:
            places.append(len(read))
            many.append(getattr(each, name))
            read.append(None)
            continue
        if name is None:
            kinds = kind.DESCRIPTOR.fields_by_name["messages"].message_type.oneofs_by_name["kind"].fields
            raise WireError(f"a message must be one of {', '.join(each.name for each in kinds)}, got none of them")
        try:
            read.append(readers[name](getattr(each, name), caps))
        except WireError as error:
            read.append(error)
    if many:
        for place, message in zip(places, read_usual(many, caps), strict=True):
            read[place] = message
    return read


# ---- what is sent: fields one by one into the frame's own message, since each submessage given whole is copied ----


def _frame(frame: Any, messages: Iterable[FromTarget | FromService], write: dict[type, Callable[..., None]]) -> bytes:
    add = frame.messages.add
    for each in messages:
        write[type(each)](add(), each)
    return frame.SerializeToString()


def _copy(names: tuple[str, ...]) -> Callable[[Any, Any], None]:
    """Copies plain fields of the same names."""

    def copy(to: Any, m: Any) -> None:
        for name in names:
            setattr(to, name, getattr(m, name))

    return copy


_copy_hello = _copy(
    ("protocol_version", "target_id", "vocabulary_hash", "cells_hash", "draft_version", "verify_s", "plain_s")
)
_copy_welcome = _copy(
    ("protocol_version", "draft_version", "max_depth", "max_width", "max_context", "max_sessions", "lease_s")
)
_copy_refused = _copy(("code", "session", "epoch", "retry_after_s"))
_copy_open = _copy(("session", "epoch", "seed", "choice", "temperature", "top_k", "top_p", "min_p"))
_copy_load = _copy(("busy", "queue_s", "sessions", "targets"))


def _open(to: pb.FromTarget, m: Open) -> None:
    _copy_open(to.open, m)
    to.open.tokens.extend(m.tokens.tolist())


def _close(to: pb.FromTarget, m: Close) -> None:
    to.close.session = m.session


def _welcome(to: pb.FromService, m: Welcome) -> None:
    _copy_welcome(to.welcome, m)
    for (rows, width), seconds in sorted(m.level_s.items()):
        to.welcome.level_times.add(rows=rows, width=width, seconds=seconds)
    for tokens, seconds in sorted(m.catchup_s.items()):
        to.welcome.catchup_times.add(tokens=tokens, seconds=seconds)


def _refused(to: pb.FromService, m: Refused) -> None:
    _copy_refused(to.refused, m)
    to.refused.message = m.message[: DEFAULT_CAPS.text]


def _resync(to: pb.FromService, m: Resync) -> None:
    to.resync.session, to.resync.epoch = m.session, m.epoch


_WRITE: dict[type, Callable[[Any, Any], None]] = {
    Hello: lambda to, m: _copy_hello(to.hello, m),
    Open: _open,
    Draft: lambda to, m: write_draft(to.draft, m),
    Close: _close,
    Welcome: _welcome,
    Refused: _refused,
    Tree: lambda to, m: write_tree(to.tree, m),
    Resync: _resync,
    Load: lambda to, m: _copy_load(to.load, m),
}


# ---- what is received ----


def _read_hello(m: pb.Hello, caps: Caps) -> Hello:
    check = Check("Hello")
    if not m.target_id:
        raise check.fail("target_id", "a name", "an empty text")
    return Hello(
        target_id=check.text("target_id", m.target_id, caps),
        vocabulary_hash=check.text("vocabulary_hash", m.vocabulary_hash, caps),
        cells_hash=check.text("cells_hash", m.cells_hash, caps),
        draft_version=check.text("draft_version", m.draft_version, caps),
        protocol_version=m.protocol_version,
        verify_s=check.seconds("verify_s", m.verify_s),
        plain_s=check.seconds("plain_s", m.plain_s),
    )


def _read_open(m: pb.Open, caps: Caps) -> Open:
    check = Check("Open", m.session, m.epoch)
    check.named()
    for name, low, high in (("choice", 0, LARGEST), ("top_k", 0, LARGEST), ("temperature", 0, 100), ("min_p", 0, 1)):
        check.within(name, getattr(m, name), low, high)
    if not 0 < m.top_p <= 1:
        raise check.fail("top_p", "above 0 and at most 1", m.top_p)
    tokens = check.tokens(m.tokens, caps)
    return Open(m.session, m.epoch, tokens, m.seed, m.choice, m.temperature, m.top_k, m.top_p, m.min_p)


def _read_close(m: pb.Close, _: Caps) -> Close:
    Check("Close", m.session).named()
    return Close(m.session)


def _read_welcome(m: pb.Welcome, caps: Caps) -> Welcome:
    check = Check("Welcome")
    check.within("level_times", len(m.level_times), 0, caps.messages)
    check.within("catchup_times", len(m.catchup_times), 0, caps.messages)
    if not 0 < m.lease_s < math.inf:
        raise check.fail("lease_s", "a finite number of seconds > 0", m.lease_s)
    return Welcome(
        draft_version=check.text("draft_version", m.draft_version, caps),
        max_depth=check.within("max_depth", m.max_depth, 0, caps.depth),
        max_width=check.within("max_width", m.max_width, 0, caps.width),
        max_context=m.max_context,
        max_sessions=m.max_sessions,
        lease_s=m.lease_s,
        level_s={(each.rows, each.width): check.seconds("level_times", each.seconds) for each in m.level_times},
        catchup_s={each.tokens: check.seconds("catchup_times", each.seconds) for each in m.catchup_times},
        protocol_version=m.protocol_version,
    )


def _read_refused(m: pb.Refused, caps: Caps) -> Refused:
    check = Check("Refused", m.session, m.epoch)
    if m.code not in REFUSALS:
        raise check.fail("code", f"one of {', '.join(REFUSALS)}", repr(m.code[:32]))
    retry_s = check.seconds("retry_after_s", m.retry_after_s)
    return Refused(m.code, check.text("message", m.message, caps), m.session, m.epoch, retry_s)


def _read_resync(m: pb.Resync, _: Caps) -> Resync:
    Check("Resync", m.session, m.epoch).named()
    return Resync(m.session, m.epoch)


def _read_load(m: pb.Load, _: Caps) -> Load:
    check = Check("Load")
    return Load(check.seconds("busy", m.busy), check.seconds("queue_s", m.queue_s), m.sessions, m.targets)


_READ_TARGET: dict[str, Callable[[Any, Caps], Any]] = {
    "hello": _read_hello, "open": _read_open, "close": _read_close,
}  # fmt: skip
_READ_SERVICE: dict[str, Callable[[Any, Caps], Any]] = {
    "welcome": _read_welcome, "refused": _read_refused, "resync": _read_resync, "load": _read_load,
}  # fmt: skip
