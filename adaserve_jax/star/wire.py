"""Messages to protobuf frames and back.

Peer input is untrusted: every field is validated, and an invalid one becomes a WireError that names it, never another
exception. The error of one message stands in that message's position, so it costs only its own session. An error of the
frame itself (not protobuf, too large, a message without a kind) is raised. Errors never contain tokens, which are
somebody's text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

M = TypeVar("M")

MAX_FRAME_BYTES = 4 * 2**20
"""Largest frame in either direction; a larger one is refused before it is parsed."""
SERVICE = "adaserve.star.v1.DraftService"
METHOD = f"/{SERVICE}/Serve"
"""The service's only method: a stream of frames in both directions."""
LARGEST = 2**31 - 1
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True)
class Caps:
    """Largest accepted values. tokens: per message; vocabulary: token ids are below it; depth, width: of a search;
    messages: per frame; text: characters of a name or an explanation."""

    tokens: int = 2**20
    vocabulary: int = 2**31 - 1
    depth: int = 64
    width: int = 64
    messages: int = 4096
    text: int = 512


DEFAULT_CAPS = Caps()


def target_frame(messages: Iterable[FromTarget]) -> bytes:
    """Return the bytes of a target's frame."""
    return _frame(pb.TargetFrame(), messages, _WRITE)


def service_frame(messages: Iterable[FromService]) -> bytes:
    """Return the bytes of a service's frame."""
    return _frame(pb.ServiceFrame(), messages, _WRITE)


def in_frames(write: Callable[[Sequence[M]], bytes], messages: Sequence[M]) -> list[bytes]:
    """Return the messages as one or more frames that keep to the caps. write: `target_frame` or `service_frame`."""
    if len(messages) <= DEFAULT_CAPS.messages:
        data = write(messages)
        if len(data) <= MAX_FRAME_BYTES or len(messages) == 1:
            return [data]
    half = len(messages) // 2
    return in_frames(write, messages[:half]) + in_frames(write, messages[half:])


def read_target_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromTarget | WireError]:
    """Return the messages of a target's frame, with a WireError in the place of an invalid one. Raises WireError."""
    return _read(pb.TargetFrame, data, caps, _READ_TARGET, "draft", read_drafts)


def read_service_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromService | WireError]:
    """Return the messages of a service's frame, with a WireError in the place of an invalid one. Raises WireError."""
    return _read(pb.ServiceFrame, data, caps, _READ_SERVICE, "tree", read_trees)


def _frame(frame: Any, messages: Iterable[FromTarget | FromService], write: dict[type, Callable[..., None]]) -> bytes:
    add = frame.messages.add
    for each in messages:
        write[type(each)](add(), each)
    return frame.SerializeToString()


def _read(
    kind: Any, data: bytes, caps: Caps, readers: dict[str, Callable[[Any, Caps], Any]], frequent: str,
    read_frequent: Callable[[list[Any], Caps], list[Any]],
) -> list[Any]:  # fmt: skip
    """Parse a frame. Messages of the kind `frequent` are read together by `read_frequent`, others one by one."""
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {len(data)}")
    try:
        frame = kind.FromString(data)
    except DecodeError:
        raise WireError(f"a frame must be a protobuf {kind.DESCRIPTOR.name}, got {len(data)} bytes of other") from None
    if len(frame.messages) > caps.messages:
        raise WireError(f"a frame must have at most {caps.messages} messages, got {len(frame.messages)}")
    read: list[Any] = []
    many, positions = [], []
    for each in frame.messages:
        name = each.WhichOneof("kind")
        if name == frequent:
            positions.append(len(read))
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
        for position, message in zip(positions, read_frequent(many, caps), strict=True):
            read[position] = message
    return read


# ---- messages of which a frame has one per row of a step: written with few calls, read as one array ----


def write_draft(draft: pb.Draft, m: Draft) -> None:
    draft.session, draft.epoch, draft.round = m.session, m.epoch, m.round
    draft.base, draft.depth, draft.width, draft.calibrated = m.base, m.depth, m.width, m.calibrated
    draft.due_s, draft.give_up_s = m.due_s, m.give_up_s
    draft.tokens.extend(m.tokens.tolist())


def write_tree(tree: pb.Tree, m: Tree) -> None:
    tree.session, tree.epoch, tree.round, tree.length, tree.width = m.session, m.epoch, m.round, m.length, m.width
    tree.queue_s, tree.service_s = m.queue_s, m.service_s
    parts: tuple[Any, ...] = (m.index, m.token, m.parent, m.cell)
    tree.nodes = b"".join([part if part.dtype == _I4 else part.astype(_I4) for part in parts])
    tree.log_q = m.log_q.astype(_F4, copy=False).tobytes()


def read_drafts(messages: Sequence[pb.Draft], caps: Caps) -> list[Draft | WireError]:
    """Read all Drafts of a frame, with a WireError in the place of an invalid one."""
    flat: list[int] = []
    ends = [0]
    for m in messages:
        flat += m.tokens
        ends.append(len(flat))
    is_valid = not flat or (min(flat) >= 0 and max(flat) < caps.vocabulary)
    if not is_valid and len(messages) > 1:
        return [each for m in messages for each in read_drafts([m], caps)]
    tokens = np.array(flat, np.int32) if is_valid else np.zeros(0, np.int32)
    read: list[Draft | WireError] = []
    for m, (start, end) in zip(messages, pairwise(ends), strict=True):
        session, base, depth, width, due_s, give_up_s = m.session, m.base, m.depth, m.width, m.due_s, m.give_up_s
        if (
            is_valid and session and base <= LARGEST and depth <= caps.depth and give_up_s >= 0 and due_s == due_s
            and (width or not depth) and width <= caps.width and end - start <= caps.tokens
        ):  # fmt: skip
            # A view would keep the tokens of the whole frame in memory.
            own = tokens if end - start == len(tokens) else tokens[start:end].copy()
            read.append(Draft(session, m.epoch, m.round, base, own, depth, width, m.calibrated, due_s, give_up_s))
        else:
            read.append(_draft_error(m, caps))
    return read


def read_trees(messages: Sequence[pb.Tree], caps: Caps) -> list[Tree | WireError]:
    """Read all Trees of a frame, with a WireError in the place of an invalid one."""
    parts: list[np.ndarray] = []
    chances: list[bytes] = []
    for m in messages:
        nodes, log_q, width = m.nodes, m.log_q, m.width
        if not (
            len(nodes) == 4 * len(log_q) and not len(log_q) % 4 and len(log_q) <= 4 * caps.depth * width
            and m.session and 1 <= width <= caps.width and 0 <= m.queue_s < math.inf and 0 <= m.service_s < math.inf
        ):  # fmt: skip
            return _read_one_by_one(messages, caps)
        parts.append(np.ndarray((4, len(log_q) // 4), _I4, nodes))
        chances.append(log_q)
    ends = list(accumulate([part.shape[1] for part in parts], initial=0))
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    log_q = np.frombuffer(b"".join(chances), _F4)
    if not _are_valid(whole, log_q, ends, [caps.depth * m.width for m in messages], caps):
        return _read_one_by_one(messages, caps)
    read: list[Tree | WireError] = []
    for m, (index, token, parent, cell), (start, end) in zip(messages, parts, pairwise(ends), strict=True):
        names = m.session, m.epoch, m.round, m.length, m.width
        read.append(Tree(*names, index, token, parent, cell, log_q[start:end], m.queue_s, m.service_s))
    return read


def _read_one_by_one(messages: Sequence[pb.Tree], caps: Caps) -> list[Tree | WireError]:
    """Find the invalid Tree among several, and why it is invalid."""
    if len(messages) == 1:
        return [_tree_error(messages[0], caps)]
    return [each for m in messages for each in read_trees([m], caps)]


def _are_valid(nodes: np.ndarray, log_q: np.ndarray, ends: list[int], bounds: list[int], caps: Caps) -> bool:
    """Return whether the nodes of all trees are valid.

    nodes: i32[4, N]. log_q: f32[N]. ends: i32[trees + 1], where each tree begins and the last one ends. bounds: one per
    tree; its columns are below it.
    """
    if not ends[-1]:
        return True
    index, token, parent = nodes[:3]
    rises = index[1:] > index[:-1]
    if len(bounds) > 1:
        rises[[end - 1 for end in ends[1:-1] if 0 < end < ends[-1]]] = True  # at the boundary between two trees
    # An index is at least 0 because it is above its parent; a negative token is a large unsigned one.
    checks = (rises, parent < index, nodes[2:] >= -1, token.view(np.uint32) < caps.vocabulary, log_q <= 0)
    return all(b"\0" not in each.tobytes() for each in checks) and all(
        start == end or index.item(end - 1) < bound for (start, end), bound in zip(pairwise(ends), bounds, strict=True)
    )


# ---- the other messages: fields are set in position, because protobuf copies a submessage that is given whole ----


def _copy(names: tuple[str, ...]) -> Callable[[Any, Any], None]:
    """Return a function that copies the plain fields of these names."""

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


def _read_hello(m: pb.Hello, caps: Caps) -> Hello:
    check = FieldCheck("Hello")
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
    check = FieldCheck("Open", m.session, m.epoch)
    check.session_number()
    for name, low, high in (("choice", 0, LARGEST), ("top_k", 0, LARGEST), ("temperature", 0, 100), ("min_p", 0, 1)):
        check.within(name, getattr(m, name), low, high)
    if not 0 < m.top_p <= 1:
        raise check.fail("top_p", "above 0 and at most 1", m.top_p)
    tokens = check.tokens(m.tokens, caps)
    return Open(m.session, m.epoch, tokens, m.seed, m.choice, m.temperature, m.top_k, m.top_p, m.min_p)


def _read_close(m: pb.Close, _: Caps) -> Close:
    FieldCheck("Close", m.session).session_number()
    return Close(m.session)


def _read_welcome(m: pb.Welcome, caps: Caps) -> Welcome:
    check = FieldCheck("Welcome")
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
    check = FieldCheck("Refused", m.session, m.epoch)
    if m.code not in REFUSALS:
        raise check.fail("code", f"one of {', '.join(REFUSALS)}", repr(m.code[:32]))
    retry_s = check.seconds("retry_after_s", m.retry_after_s)
    return Refused(m.code, check.text("message", m.message, caps), m.session, m.epoch, retry_s)


def _read_resync(m: pb.Resync, _: Caps) -> Resync:
    FieldCheck("Resync", m.session, m.epoch).session_number()
    return Resync(m.session, m.epoch)


def _read_load(m: pb.Load, _: Caps) -> Load:
    check = FieldCheck("Load")
    return Load(check.seconds("busy", m.busy), check.seconds("queue_s", m.queue_s), m.sessions, m.targets)


_READ_TARGET: dict[str, Callable[[Any, Caps], Any]] = {
    "hello": _read_hello, "open": _read_open, "close": _read_close,
}  # fmt: skip
_READ_SERVICE: dict[str, Callable[[Any, Caps], Any]] = {
    "welcome": _read_welcome, "refused": _read_refused, "resync": _read_resync, "load": _read_load,
}  # fmt: skip


# ---- validation of single fields ----


class FieldCheck:
    """Validation of one message's fields. Raises WireError; its text is only built when a field is invalid."""

    __slots__ = ("epoch", "kind", "session")

    def __init__(self, kind: str, session: int = 0, epoch: int = 0) -> None:
        self.kind = kind
        self.session = session
        self.epoch = epoch

    def fail(self, field: str, expected: str, got: object) -> WireError:
        return WireError(f"{self.kind}.{field} must be {expected}, got {got}", self.session, self.epoch)

    def session_number(self) -> None:
        """Check that the message names a session; they are numbered from 1."""
        if self.session < 1:
            raise self.fail("session", "at least 1", self.session)

    def seconds(self, field: str, value: float) -> float:
        """Return `value` if it is finite and not negative."""
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
        """Return the tokens, i32[n], if each is in the vocabulary."""
        count = len(values)
        if count > caps.tokens:
            raise self.fail("tokens", f"at most {caps.tokens} tokens", count)
        messages = values[:]
        if count and not (min(messages) >= 0 and max(messages) < caps.vocabulary):
            raise self.fail("tokens", f"ids from 0 to {caps.vocabulary - 1}", "others")
        return np.fromiter(messages, np.int32, count)


def _draft_error(m: pb.Draft, caps: Caps) -> WireError:
    check = FieldCheck("Draft", m.session, m.epoch)
    try:
        check.session_number()
        check.within("base", m.base, 0, LARGEST)
        check.within("depth", m.depth, 0, caps.depth)
        check.within("width", m.width, 1 if m.depth else 0, caps.width)
        if math.isnan(m.due_s):
            raise check.fail("due_s", "a number of seconds", m.due_s)
        check.within("give_up_s", m.give_up_s, 0, math.inf)
        check.tokens(m.tokens, caps)
    except WireError as error:
        return error
    raise AssertionError("a valid Draft was rejected")


def _tree_error(m: pb.Tree, caps: Caps) -> WireError:
    check, nodes, most = FieldCheck("Tree", m.session, m.epoch), len(m.log_q) // 4, caps.depth * m.width
    try:
        check.session_number()
        check.within("width", m.width, 1, caps.width)
        check.within("log_q", nodes, 0, most)
        check.seconds("queue_s", m.queue_s)
        check.seconds("service_s", m.service_s)
    except WireError as error:
        return error
    if len(m.log_q) != 4 * nodes or len(m.nodes) != 16 * nodes:
        return check.fail("nodes", f"4 integers for each of {len(m.log_q) / 4:g} nodes", f"{len(m.nodes)} bytes")
    index, token, parent, cell = np.frombuffer(m.nodes, _I4).reshape(4, nodes)
    if index[0] < 0 or index[-1] >= most or not (index[1:] > index[:-1]).all():
        return check.fail("index", f"rising, from 0 to {most - 1}", "others")
    if parent.min() < -1 or not (parent < index).all():
        return check.fail("parent", "-1 or a column before its child's", "others")
    if token.min() < 0 or token.max() >= caps.vocabulary:
        return check.fail("token", f"ids from 0 to {caps.vocabulary - 1}", "others")
    if cell.min() < -1:
        return check.fail("cell", "at least -1", cell.min())
    return check.fail("log_q", "numbers of at most 0", "others")
