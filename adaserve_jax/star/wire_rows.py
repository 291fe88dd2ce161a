"""Drafts and Trees on the wire: of these a frame has one for each row of a step, so they are written with few calls and
read all at once.

What makes no sense is a WireError in the place of its message. Errors do not tell tokens, which are somebody's text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from adaserve_jax.star import draft_pb2 as pb
from adaserve_jax.star.checks import LARGEST, Caps, Check
from adaserve_jax.star.messages import Draft, Tree, WireError

_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


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


def read_drafts(said: Sequence[pb.Draft], caps: Caps) -> list[Draft | WireError]:
    """What targets ask for, or what is wrong with it."""
    spoken: list[int] = []
    ends = [0]
    for m in said:
        spoken += m.tokens
        ends.append(len(spoken))
    is_sound = not spoken or (min(spoken) >= 0 and max(spoken) < caps.vocabulary)
    if not is_sound and len(said) > 1:
        return [each for m in said for each in read_drafts([m], caps)]
    tokens = np.array(spoken, np.int32) if is_sound else np.zeros(0, np.int32)
    read: list[Draft | WireError] = []
    for m, (start, end) in zip(said, pairwise(ends), strict=True):
        session, base, depth, width, due_s, give_up_s = m.session, m.base, m.depth, m.width, m.due_s, m.give_up_s
        if (
            is_sound and session and base <= LARGEST and depth <= caps.depth and give_up_s >= 0 and due_s == due_s
            and (width or not depth) and width <= caps.width and end - start <= caps.tokens
        ):  # fmt: skip
            own = tokens if end - start == len(tokens) else tokens[start:end].copy()  # it outlives the frame
            read.append(Draft(session, m.epoch, m.round, base, own, depth, width, m.calibrated, due_s, give_up_s))
        else:
            read.append(_wrong_draft(m, caps))
    return read


def read_trees(said: Sequence[pb.Tree], caps: Caps) -> list[Tree | WireError]:
    """What the service found, or what is wrong with it."""
    parts: list[np.ndarray] = []
    chances: list[bytes] = []
    for m in said:
        nodes, log_q, width = m.nodes, m.log_q, m.width
        if not (
            len(nodes) == 4 * len(log_q) and not len(log_q) % 4 and len(log_q) <= 4 * caps.depth * width
            and m.session and 1 <= width <= caps.width and 0 <= m.queue_s < math.inf and 0 <= m.service_s < math.inf
        ):  # fmt: skip
            return _each_alone(said, caps)
        parts.append(np.ndarray((4, len(log_q) // 4), _I4, nodes))
        chances.append(log_q)
    ends = list(accumulate([part.shape[1] for part in parts], initial=0))
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    log_q = np.frombuffer(b"".join(chances), _F4)
    if not _are_sound(whole, log_q, ends, [caps.depth * m.width for m in said], caps):
        return _each_alone(said, caps)
    read: list[Tree | WireError] = []
    for m, (index, token, parent, cell), (start, end) in zip(said, parts, pairwise(ends), strict=True):
        names = m.session, m.epoch, m.round, m.length, m.width
        read.append(Tree(*names, index, token, parent, cell, log_q[start:end], m.queue_s, m.service_s))
    return read


def _each_alone(said: Sequence[pb.Tree], caps: Caps) -> list[Tree | WireError]:
    """After one of them was found to make no sense: which, and why."""
    if len(said) == 1:
        return [_wrong_tree(said[0], caps)]
    return [each for m in said for each in read_trees([m], caps)]


def _are_sound(nodes: np.ndarray, log_q: np.ndarray, ends: list[int], bounds: list[int], caps: Caps) -> bool:
    """Whether the nodes of all trees make sense. nodes: i32[4, N]; log_q: f32[N]; ends: i32[trees + 1], where each
    begins and the last ends; bounds: of each, its columns are below it."""
    if not ends[-1]:
        return True
    index, token, parent = nodes[:3]
    rises = index[1:] > index[:-1]
    if len(bounds) > 1:
        rises[[end - 1 for end in ends[1:-1] if 0 < end < ends[-1]]] = True  # from one tree to the next
    # Every index is at least 0, as it comes after its parent; a token below 0 is a large one without its sign.
    sound = (rises, parent < index, nodes[2:] >= -1, token.view(np.uint32) < caps.vocabulary, log_q <= 0)
    return all(b"\0" not in each.tobytes() for each in sound) and all(
        start == end or index.item(end - 1) < bound for (start, end), bound in zip(pairwise(ends), bounds, strict=True)
    )


# ---- what makes no sense, by field ----


def _wrong_draft(m: pb.Draft, caps: Caps) -> WireError:
    check = Check("Draft", m.session, m.epoch)
    try:
        check.named()
        check.within("base", m.base, 0, LARGEST)
        check.within("depth", m.depth, 0, caps.depth)
        check.within("width", m.width, 1 if m.depth else 0, caps.width)
        if math.isnan(m.due_s):
            raise check.fail("due_s", "a number of seconds", m.due_s)
        check.within("give_up_s", m.give_up_s, 0, math.inf)
        check.tokens(m.tokens, caps)
    except WireError as error:
        return error
    raise AssertionError("a Draft that makes sense was taken for one that makes none")


def _wrong_tree(m: pb.Tree, caps: Caps) -> WireError:
    check, nodes, most = Check("Tree", m.session, m.epoch), len(m.log_q) // 4, caps.depth * m.width
    try:
        check.named()
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
