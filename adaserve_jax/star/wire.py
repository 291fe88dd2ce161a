"""Messages to protobuf frames and back. What comes from the other side is believed in nothing: what makes no sense is a
WireError that names the field, never an exception of another kind.

An error in one message of a frame stands in its place, so that it costs its own session only; an error of the frame
itself (no protobuf, too large, a message of no kind) is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from adaserve_jax.star import draft_pb2 as pb
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

MAX_FRAME_BYTES = 4 * 2**20
"""Of one frame, in both directions; larger ones are refused before they are read."""
METHOD = "/adaserve.star.v1.DraftService/Serve"
"""The one method of the service, a stream of frames in both directions."""


@dataclass(frozen=True)
class Caps:
    """The most that is believed. tokens: of one message; vocabulary: token ids are below it; depth, width: of a search;
    messages: of a frame; text: characters of a name or an explanation."""

    tokens: int = 2**20
    vocabulary: int = 2**31 - 1
    depth: int = 64
    width: int = 64
    messages: int = 4096
    text: int = 512


DEFAULT_CAPS = Caps()
LARGEST = 2**31 - 1


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
    return _read(pb.TargetFrame, data, caps, _READ_TARGET)


def read_service_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromService | WireError]:
    """The messages of a frame of the service, or what is wrong with one in its place. Raises WireError."""
    read = _read(pb.ServiceFrame, data, caps, _READ_SERVICE)
    trees = [each for each in read if type(each) is Tree and len(each.index)]
    return read if _are_sound(trees, caps) else [_checked(each, caps) for each in read]


def _read(kind: Any, data: bytes, caps: Caps, readers: dict[str, Callable[[Any, Caps], Any]]) -> list[Any]:
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {len(data)}")
    try:
        frame = kind.FromString(data)
    except DecodeError:
        raise WireError(f"a frame must be a protobuf {kind.DESCRIPTOR.name}, got {len(data)} bytes of other") from None
    if len(frame.messages) > caps.messages:
        raise WireError(f"a frame must have at most {caps.messages} messages, got {len(frame.messages)}")
    read: list[Any] = []
    for each in frame.messages:
        name = each.WhichOneof("kind")
        if name is None:
            raise WireError(f"a message must be one of {', '.join(readers)}, got none of them")
        try:
            read.append(readers[name](getattr(each, name), caps))
        except WireError as error:
            read.append(error)
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
_copy_draft = _copy(("session", "epoch", "round", "base", "depth", "width", "calibrated", "due_s", "give_up_s"))
_copy_tree = _copy(("session", "epoch", "round", "length", "width", "queue_s", "service_s"))
_copy_load = _copy(("busy", "queue_s", "sessions", "targets"))


def _open(to: pb.FromTarget, m: Open) -> None:
    _copy_open(to.open, m)
    to.open.tokens.extend(m.tokens.tolist())


def _draft(to: pb.FromTarget, m: Draft) -> None:
    draft = to.draft
    _copy_draft(draft, m)
    draft.tokens.extend(m.tokens.tolist())


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


def _tree(to: pb.FromService, m: Tree) -> None:
    tree = to.tree
    _copy_tree(tree, m)
    tree.nodes = b"".join([part.astype("<i4", copy=False).tobytes() for part in (m.index, m.token, m.parent, m.cell)])
    tree.log_q = m.log_q.astype("<f4", copy=False).tobytes()


def _resync(to: pb.FromService, m: Resync) -> None:
    to.resync.session, to.resync.epoch = m.session, m.epoch


_WRITE: dict[type, Callable[[Any, Any], None]] = {
    Hello: lambda to, m: _copy_hello(to.hello, m),
    Open: _open,
    Draft: _draft,
    Close: _close,
    Welcome: _welcome,
    Refused: _refused,
    Tree: _tree,
    Resync: _resync,
    Load: lambda to, m: _copy_load(to.load, m),
}


# ---- what is received ----


class _Check:
    """Raises WireErrors about one message. What is said is put together only when something is wrong."""

    __slots__ = ("epoch", "kind", "session")

    def __init__(self, kind: str, session: int = 0, epoch: int = 0) -> None:
        self.kind = kind
        self.session = session
        self.epoch = epoch

    def fail(self, field: str, expected: str, got: object) -> WireError:
        return WireError(f"{self.kind}.{field} must be {expected}, got {got}", self.session, self.epoch)

    def named(self) -> None:
        """Sessions are numbered from 1; 0 is nobody's."""
        if self.session < 1:
            raise self.fail("session", "at least 1", self.session)

    def seconds(self, field: str, value: float) -> float:
        """Finite and not negative."""
        if not 0 <= value < math.inf:
            raise self.fail(field, "a finite number of seconds >= 0", value)
        return value

    def text(self, field: str, value: str, caps: Caps) -> str:
        if len(value) > caps.text:
            raise self.fail(field, f"of at most {caps.text} characters", f"{len(value)} characters")
        return value

    def within(self, field: str, value: float, low: float, high: float) -> Any:
        if not low <= value <= high:
            raise self.fail(field, f"from {low} to {high}", value)
        return value

    def tokens(self, values: Any, caps: Caps) -> np.ndarray:
        """i32[n], each a token of the vocabulary. Errors do not tell the tokens, which are somebody's text."""
        count = len(values)
        if count > caps.tokens:
            raise self.fail("tokens", f"at most {caps.tokens} tokens", count)
        said = values[:]
        if count and not (min(said) >= 0 and max(said) < caps.vocabulary):
            raise self.fail("tokens", f"ids from 0 to {caps.vocabulary - 1}", "others")
        return np.fromiter(said, np.int32, count)


def _read_hello(m: pb.Hello, caps: Caps) -> Hello:
    check = _Check("Hello")
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
    check = _Check("Open", m.session, m.epoch)
    check.named()
    for name, low, high in (("choice", 0, LARGEST), ("top_k", 0, LARGEST), ("temperature", 0, 100), ("min_p", 0, 1)):
        check.within(name, getattr(m, name), low, high)
    if not 0 < m.top_p <= 1:
        raise check.fail("top_p", "above 0 and at most 1", m.top_p)
    tokens = check.tokens(m.tokens, caps)
    return Open(m.session, m.epoch, tokens, m.seed, m.choice, m.temperature, m.top_k, m.top_p, m.min_p)


def _read_draft(m: pb.Draft, caps: Caps) -> Draft:
    check = _Check("Draft", m.session, m.epoch)
    check.named()
    check.within("base", m.base, 0, LARGEST)
    depth = check.within("depth", m.depth, 0, caps.depth)
    width = check.within("width", m.width, 1 if depth else 0, caps.width)
    due_s, give_up_s = m.due_s, m.give_up_s
    if math.isnan(due_s):
        raise check.fail("due_s", "a number of seconds", due_s)
    check.within("give_up_s", give_up_s, 0, math.inf)
    tokens = check.tokens(m.tokens, caps)
    return Draft(m.session, m.epoch, m.round, m.base, tokens, depth, width, m.calibrated, due_s, give_up_s)


def _read_close(m: pb.Close, _: Caps) -> Close:
    _Check("Close", m.session).named()
    return Close(m.session)


def _read_welcome(m: pb.Welcome, caps: Caps) -> Welcome:
    check = _Check("Welcome")
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
    check = _Check("Refused", m.session, m.epoch)
    if m.code not in REFUSALS:
        raise check.fail("code", f"one of {', '.join(REFUSALS)}", repr(m.code[:32]))
    retry_s = check.seconds("retry_after_s", m.retry_after_s)
    return Refused(m.code, check.text("message", m.message, caps), m.session, m.epoch, retry_s)


def _read_tree(m: pb.Tree, caps: Caps) -> Tree:
    session, epoch, width = m.session, m.epoch, m.width
    check = _Check("Tree", session, epoch)
    check.named()
    check.within("width", width, 1, caps.width)
    said, log_q = m.nodes, m.log_q
    nodes, most = len(log_q) // 4, caps.depth * width
    check.within("log_q", nodes, 0, most)
    if len(log_q) != 4 * nodes or len(said) != 16 * nodes:
        raise check.fail("nodes", f"4 integers for each of {len(log_q) / 4:g} nodes", f"{len(said)} bytes")
    index, token, parent, cell = np.frombuffer(said, "<i4").reshape(4, nodes)
    chances = np.frombuffer(log_q, "<f4")
    times = check.seconds("queue_s", m.queue_s), check.seconds("service_s", m.service_s)
    return Tree(session, epoch, m.round, m.length, width, index, token, parent, cell, chances, *times)


def _are_sound(trees: list[Tree], caps: Caps) -> bool:
    """Whether the nodes of all trees make sense, looked at together, since there are many and few of them are wrong."""
    if not trees:
        return True
    index, token, parent, cell = (
        np.concatenate([getattr(tree, name) for tree in trees]) for name in ("index", "token", "parent", "cell")
    )
    log_q = np.concatenate([tree.log_q for tree in trees])
    rises = index[1:] > index[:-1]
    rises[np.cumsum([len(tree.index) for tree in trees])[:-1] - 1] = True  # from one tree to the next
    return bool(
        rises.all() and index.min() >= 0 and all(tree.index[-1] < caps.depth * tree.width for tree in trees)
        and (parent < index).all() and parent.min() >= -1 and cell.min() >= -1
        and token.min() >= 0 and token.max() < caps.vocabulary and (log_q <= 0).all()
    )  # fmt: skip


def _checked(read: Any, caps: Caps) -> Any:
    """What was read, or what is wrong with a tree's nodes."""
    if type(read) is not Tree or not len(read.index) or _are_sound([read], caps):
        return read
    check, most = _Check("Tree", read.session, read.epoch), caps.depth * read.width
    rises = (read.index[1:] > read.index[:-1]).all()
    if read.index[0] < 0 or read.index[-1] >= most or not rises:
        return check.fail("index", f"rising, from 0 to {most - 1}", "others")
    if read.parent.min() < -1 or not (read.parent < read.index).all():
        return check.fail("parent", "-1 or a column before its child's", "others")
    if read.token.min() < 0 or read.token.max() >= caps.vocabulary:
        return check.fail("token", f"ids from 0 to {caps.vocabulary - 1}", "others")
    if read.cell.min() < -1:
        return check.fail("cell", "at least -1", read.cell.min())
    return check.fail("log_q", "numbers of at most 0", "others")


def _read_resync(m: pb.Resync, _: Caps) -> Resync:
    _Check("Resync", m.session, m.epoch).named()
    return Resync(m.session, m.epoch)


def _read_load(m: pb.Load, _: Caps) -> Load:
    check = _Check("Load")
    return Load(check.seconds("busy", m.busy), check.seconds("queue_s", m.queue_s), m.sessions, m.targets)


_READ_TARGET: dict[str, Callable[[Any, Caps], Any]] = {
    "hello": _read_hello, "open": _read_open, "draft": _read_draft, "close": _read_close,
}  # fmt: skip
_READ_SERVICE: dict[str, Callable[[Any, Caps], Any]] = {
    "welcome": _read_welcome, "refused": _read_refused, "tree": _read_tree, "resync": _read_resync, "load": _read_load,
}  # fmt: skip
