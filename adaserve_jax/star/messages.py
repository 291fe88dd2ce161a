"""What targets and the draft service say to each other, as plain values. `draft.proto` is the same on the wire.

A target opens one stream and says Hello; the service answers Welcome, or Refused. Then the target opens sessions, one
for each request that speculates, and asks each for one tree per round. Frames are lists of messages; a frame of the
target is what one step of it asks. Source: StarSD, appendix E; the departures are in docs/architecture/star.md.

A session is named by its target (`Hello.target_id`) and by a number that the target chose, so nobody waits for a name.
epoch: counts how often the target has sent the session's whole text anew; what carries another epoch than the
session's is of another time and is dropped. round: counts the Draft messages of a session, across epochs.

Imports no jax and no gRPC.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from adaserve_jax.errors import AdaServeError
from adaserve_jax.tree.acceptance_table import ChanceTable

PROTOCOL_VERSION = 1
"""Of messages.py and draft.proto together: both sides must have the same."""


class WireError(AdaServeError):
    """What was received makes no sense. session, epoch: whose message it was; session 0: nobody's, or a target's."""

    code = "invalid"

    def __init__(self, message: str, session: int = 0, epoch: int = 0) -> None:
        super().__init__(message)
        self.session = session
        self.epoch = epoch


@dataclass(frozen=True)
class Hello:
    """The first message of a stream. target_id: unique for each target process. vocabulary_hash: of
    `models.tokenizer.Tokenizer.vocabulary_hash`. draft_version: the only one that will do; "": any.
    cells_hash: of the acceptance table's cells (`star.cells.cells_hash`), which trees name. verify_s: seconds of one
    verification, with what else the target does between two drafts; plain_s: of one plain decoding step; both as
    expected, for admission, 0: not known."""

    target_id: str
    vocabulary_hash: str
    cells_hash: str
    draft_version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    verify_s: float = 0.0
    plain_s: float = 0.0


@dataclass(frozen=True)
class Welcome:
    """The target is admitted. max_sessions: most at once for this target; max_context: tokens of a session, its tree
    included. lease_s: a session that says nothing for so long is freed. level_s: seconds of one level of a search by
    (rows, width); catchup_s: of feeding so many tokens; both as measured by the service when nobody else asks."""

    draft_version: str
    max_depth: int
    max_width: int
    max_context: int
    max_sessions: int
    lease_s: float
    level_s: dict[tuple[int, int], float]
    catchup_s: dict[int, float]
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Refused:
    """A target, or one session of it (session > 0), gets nothing. code: one of REFUSALS. retry_after_s: when it is
    worth asking again; 0: never as it is."""

    code: str
    message: str
    session: int = 0
    epoch: int = 0
    retry_after_s: float = 0.0


REFUSALS = (
    "protocol_version", "vocabulary", "draft_version", "cells", "unauthenticated", "full", "quota", "rate", "too_long",
    "invalid", "shutting_down",
)  # fmt: skip
"""Codes of Refused. full: one target more would leave it slower than plain decoding; quota: too many sessions, or
drafts asked for at once; rate: too many messages; too_long: longer than max_context; invalid: what was
said makes no sense."""


@dataclass(frozen=True, eq=False)
class Open:
    """Begin a session, or begin it anew with a higher epoch: `tokens`, i32[n], is its whole text so far. The service
    keeps what KV it has of a common beginning. seed to min_p: of the request, since the noise must be the target's."""

    session: int
    epoch: int
    tokens: np.ndarray
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(eq=False, slots=True)  # not frozen, which makes one take four times as long; nobody changes it
class Draft:
    """The text has grown by `tokens`, i32[n], behind its first `base` ones; search from its end. depth 0: only feed
    them, nothing is answered. width: of the beam; calibrated: as `DraftPlan.calibrated`. due_s: seconds from now until
    the request's next token is due; inf without a target. give_up_s: the target waits no longer than that."""

    session: int
    epoch: int
    round: int
    base: int
    tokens: np.ndarray
    depth: int
    width: int
    calibrated: bool
    due_s: float
    give_up_s: float


@dataclass(frozen=True)
class Close:
    """The request has ended: free the session's KV. Unknown sessions are ignored."""

    session: int


@dataclass(eq=False, slots=True)  # not frozen, which makes one take four times as long; nobody changes it
class Tree:
    """The candidates of one Draft. length: of the text that they follow, base + tokens. token, parent, cell: i32[C],
    log_q: f32[C], as `CandidateTrees` has them for one row of `width`, without absent nodes: index[C], i32, says which
    column each is (level * width + rank); parent is a column too, -1 the root. queue_s, service_s: spent waiting for
    the device and on it. Without any node: the draft could not be ready in time, or failed; nobody need wait for it."""

    session: int
    epoch: int
    round: int
    length: int
    width: int
    index: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    cell: np.ndarray
    log_q: np.ndarray
    queue_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True)
class Resync:
    """A Draft did not follow what the session holds (a gap, another text, or no such session): open it anew."""

    session: int
    epoch: int


@dataclass(frozen=True)
class Load:
    """How busy the service is, sent with answers at most every LOAD_EVERY_S: busy: share of the last seconds that the
    device worked; queue_s: seconds of work that waits; sessions: of all targets; targets: connected ones."""

    busy: float
    queue_s: float
    sessions: int
    targets: int


LOAD_EVERY_S = 0.25

FromTarget = Hello | Open | Draft | Close
FromService = Welcome | Refused | Tree | Resync | Load

# What a target makes of the cells that a draft service names: log f of a tree's nodes, by its own chances.
#
# A tree brings which cell of the acceptance table each node is in, and the draft's own probability of it;
# chances stay with the target, which learns them. Imports no jax.


def cells_hash(table: ChanceTable) -> str:
    """16 hexadecimal digits of how many cells a table has and where they end; its chances do not count."""
    edges = [[repr(float(edge)) for edge in mode] for mode in table.edges.astype(np.float32)]
    said = json.dumps([list(table.chance.shape), edges])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def log_f_of(cell: np.ndarray, parent: np.ndarray, log_chance: np.ndarray, coupled: np.ndarray) -> np.ndarray:
    """f32[R, D, W], log f of trees by a table's chances, bit for bit as `tree.beam` adds them up on a device.

    cell, parent: i32[R, D, W], parent a column (level * W + rank), both -1 where absent. log_chance: f32[2, cells], by
    mode; coupled: bool[R].
    """
    gain = log_chance[coupled.astype(np.intp)[:, None, None], np.maximum(cell, 0)]
    return along_paths(np.where(cell < 0, np.float32(-np.inf), gain), parent)


def along_paths(gain: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """f32[R, D, W], sums of `gain` from the first level down to each node, added in that order; -inf below what is
    absent. gain: f32[R, D, W], -inf where absent; parent: as in `log_f_of`."""
    rows, depth, width = gain.shape
    sums = gain.copy()
    flat = sums.reshape(-1)
    above = np.maximum(parent, 0) + np.arange(0, rows * depth * width, depth * width)[:, None, None]
    for level in range(1, depth):
        sums[:, level] += flat[above[:, level]]
    return sums
