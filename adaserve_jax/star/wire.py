"""Messages to protobuf frames and back.

Peer input is untrusted: every field is validated, and an invalid one becomes a WireError that names it, never another
exception. The error of one message stands in that message's position, so it costs only its own session. An error of the
frame itself (not protobuf, too large, a message without a kind) is raised. Errors never contain tokens, which are
somebody's text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from adaserve_jax.sampling import INTEGERS, NUMBERS
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
    SessionSampling,
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
MAX_STEP_S = 60.0
"""Longest time of a step of either side; admission and the target's plans compute with it."""
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
    return _frame(pb.TargetFrame(), messages)


def service_frame(messages: Iterable[FromService]) -> bytes:
    """Return the bytes of a service's frame."""
    return _frame(pb.ServiceFrame(), messages)


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
    return _read(pb.TargetFrame, data, caps, "draft", read_drafts)


def read_service_frame(data: bytes, caps: Caps = DEFAULT_CAPS) -> list[FromService | WireError]:
    """Return the messages of a service's frame, with a WireError in the place of an invalid one. Raises WireError."""
    return _read(pb.ServiceFrame, data, caps, "tree", read_trees)


def _frame(frame: Any, messages: Iterable[FromTarget | FromService]) -> bytes:
    add = frame.messages.add
    for each in messages:
        kind = type(each)
        # Fields are set in position, because protobuf copies a submessage that is given whole.
        _WRITE.get(kind, _write)(getattr(add(), _NAMES[kind]), each)
    return frame.SerializeToString()


def _read(
    kind: Any, data: bytes, caps: Caps, frequent: str, read_frequent: Callable[[list[Any], Caps], list[Any]]
) -> list[Any]:
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
        read.append(_read_one(_KINDS[name], getattr(each, name), caps))
    if many:
        for position, message in zip(positions, read_frequent(many, caps), strict=True):
            read[position] = message
    return read


# ---- messages of which a frame has one per row of a step: written with few calls, read as one array ----


def write_draft(draft: pb.Draft, m: Draft) -> None:
    draft.session, draft.epoch, draft.round = m.session, m.epoch, m.round
    draft.base, draft.depth, draft.width, draft.calibrated = m.base, m.depth, m.width, bool(m.calibrated)
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


# ---- the other messages, by their fields ----

_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda m: np.array(m.tokens[:], np.int32),
    "sampling": lambda m: SessionSampling(*(getattr(m, name) for name in SessionSampling._fields)),
    "level_s": lambda m: {(each.rows, each.width): each.seconds for each in m.level_times},
    "catchup_s": lambda m: {each.tokens: each.seconds for each in m.catchup_times},
}
"""Values that protobuf holds in another form, by the message's field."""


def _write(to: Any, m: FromTarget | FromService) -> None:
    for name in _FIELDS[type(m)]:
        if name not in _CONVERTED:
            setattr(to, name, getattr(m, name))
    if isinstance(m, Open):
        to.tokens.extend(m.tokens.tolist())
        for name, value in m.sampling._asdict().items():
            setattr(to, name, value)
    elif isinstance(m, Refused):
        to.message = m.message[: DEFAULT_CAPS.text]
    elif isinstance(m, Welcome):
        for (rows, width), seconds in sorted(m.level_s.items()):
            to.level_times.add(rows=rows, width=width, seconds=seconds)
        for tokens, seconds in sorted(m.catchup_s.items()):
            to.catchup_times.add(tokens=tokens, seconds=seconds)


def _read_one(kind: type, m: Any, caps: Caps) -> Any:
    """Return the message of that kind, or a WireError that names its first invalid field."""
    names = _FIELDS[kind]
    return _field_error(kind, m, caps) or kind(
        **{name: _CONVERTED[name](m) if name in _CONVERTED else getattr(m, name) for name in names}
    )


# ---- validation ----

Check = Callable[[Any, Caps], tuple[str, object] | None]
"""check(value, caps): what the value must be and what it is; None if it is valid."""


def _within(low: float, high: float = math.inf) -> Check:
    expected = f"from {low} to {high}" if math.isfinite(high) else f"at least {low}"
    return lambda value, _: None if low <= value <= high else (expected, value)


def _up_to(cap: str, low: int = 0) -> Check:
    """Return a check of integers from `low` to the cap of that name."""
    return lambda value, caps: _within(low, getattr(caps, cap))(value, caps)


def _seconds(value: float, _: Caps) -> tuple[str, object] | None:
    return None if 0 <= value < math.inf else ("a finite number of seconds >= 0", value)


def _text(value: str, caps: Caps) -> tuple[str, object] | None:
    if len(value) <= caps.text:
        return None
    return f"of at most {caps.text} characters", f"{len(value)} characters"


def _tokens(values: Any, caps: Caps) -> tuple[str, object] | None:
    if len(values) > caps.tokens:
        return f"at most {caps.tokens} tokens", len(values)
    ids = values[:]
    if ids and not (min(ids) >= 0 and max(ids) < caps.vocabulary):
        return f"ids from 0 to {caps.vocabulary - 1}", "others"
    return None


def _times(*sizes: str) -> Check:
    """Return a check of measured times. sizes: names of what each was measured for."""
    checks = dict.fromkeys(sizes, _within(1)) | {"seconds": _within(0, MAX_STEP_S)}

    def check(values: Any, caps: Caps) -> tuple[str, object] | None:
        named = ((name, checks[name](getattr(each, name), caps)) for each in values for name in checks)
        faults = ((f"of {name} {fault[0]}", fault[1]) for name, fault in named if fault is not None)
        return _up_to("messages")(len(values), caps) or next(faults, None)

    return check


_SESSION = _within(1)
_CHECKS: dict[type, dict[str, Check]] = {
    Hello: {
        "target_id": lambda value, caps: _text(value, caps) if value else ("a name", "an empty text"),
        "vocabulary_hash": _text, "cells_hash": _text, "draft_version": _text,
        "verify_s": _within(0, MAX_STEP_S), "plain_s": _within(0, MAX_STEP_S),
    },
    Open: {
        "session": _SESSION, "choice": _within(0, LARGEST),
        **{name: _within(*bounds) for name, bounds in (NUMBERS | INTEGERS).items() if name in SessionSampling._fields},
        "top_p": lambda value, _: None if 0 < value <= 1 else ("above 0 and at most 1", value),
        "tokens": _tokens,
    },
    Draft: {
        "session": _SESSION, "base": _within(0, LARGEST), "depth": _up_to("depth"), "width": _up_to("width"),
        "due_s": lambda value, _: ("a number of seconds", value) if math.isnan(value) else None,
        "give_up_s": _within(0), "tokens": _tokens,
    },
    Close: {"session": _SESSION},
    Welcome: {
        "draft_version": _text, "max_depth": _up_to("depth"), "max_width": _up_to("width"),
        "lease_s": lambda value, _: None if 0 < value < math.inf else ("a finite number of seconds > 0", value),
        "level_times": _times("rows", "width"), "catchup_times": _times("tokens"),
    },
    Refused: {
        "code": lambda value, _: None if value in REFUSALS else (f"one of {', '.join(REFUSALS)}", repr(value[:32])),
        "message": _text, "retry_after_s": _seconds,
    },
    Tree: {"session": _SESSION, "width": _up_to("width", 1), "queue_s": _seconds, "service_s": _seconds},
    Resync: {"session": _SESSION},
    Load: {"busy": _seconds, "queue_s": _seconds},
}  # fmt: skip
"""Checks by field of the wire; fields that are not named have no invalid values."""
_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in _CHECKS}
_NAMES = {kind: kind.__name__.lower() for kind in _CHECKS}
_KINDS = {name: kind for kind, name in _NAMES.items()}
_WRITE: dict[type, Callable[[Any, Any], None]] = {Draft: write_draft, Tree: write_tree}


def _error(m: Any, field: str, expected: str, got: object) -> WireError:
    text = f"{m.DESCRIPTOR.name}.{field} must be {expected}, got {got}"
    return WireError(text, getattr(m, "session", 0), getattr(m, "epoch", 0))


def _field_error(kind: type, m: Any, caps: Caps) -> WireError | None:
    """Return an error that names the first invalid field; None if each is valid by itself."""
    for name, check in _CHECKS[kind].items():
        fault = check(getattr(m, name), caps)
        if fault is not None:
            return _error(m, name, *fault)
    return None


def _draft_error(m: pb.Draft, caps: Caps) -> WireError:
    return _field_error(Draft, m, caps) or _error(m, "width", f"from 1 to {caps.width}", m.width)


def _tree_error(m: pb.Tree, caps: Caps) -> WireError:
    nodes, most = len(m.log_q) // 4, caps.depth * m.width
    error = _field_error(Tree, m, caps)
    if error is not None:
        return error
    if nodes > most:
        return _error(m, "log_q", f"at most {most} numbers", nodes)
    if len(m.log_q) != 4 * nodes or len(m.nodes) != 16 * nodes:
        return _error(m, "nodes", f"4 integers for each of {len(m.log_q) / 4:g} nodes", f"{len(m.nodes)} bytes")
    index, token, parent, cell = np.frombuffer(m.nodes, _I4).reshape(4, nodes)
    if index[0] < 0 or index[-1] >= most or not (index[1:] > index[:-1]).all():
        return _error(m, "index", f"rising, from 0 to {most - 1}", "others")
    if parent.min() < -1 or not (parent < index).all():
        return _error(m, "parent", "-1 or a column before its child's", "others")
    if token.min() < 0 or token.max() >= caps.vocabulary:
        return _error(m, "token", f"ids from 0 to {caps.vocabulary - 1}", "others")
    if cell.min() < -1:
        return _error(m, "cell", "at least -1", cell.min())
    return _error(m, "log_q", "numbers of at most 0", "others")
