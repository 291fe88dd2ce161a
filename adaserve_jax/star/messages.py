"""Messages between targets and the draft service as plain values; `draft.proto` is their wire format.

A target opens one stream and sends Hello; the service answers Welcome or Refused. The target then opens one session per
speculating request and asks for one tree per session and round. A frame is a list of messages; a target's frame holds
what one of its steps asks. Source: StarSD, appendix E; docs/architecture/star.md lists the departures.

A session is named by its target (`Hello.target_id`) and a number chosen by the target, so no round trip is needed for a
name. `epoch` counts how often the target has sent the session's whole text anew; a message of an earlier epoch is
dropped, and a Draft of a later one is answered with Resync. `round` counts the Draft messages of a session, across
epochs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from adaserve_jax.errors import AdaServeError
from adaserve_jax.sampling import RowSampling
from adaserve_jax.tree.acceptance_table import ChanceTable

PROTOCOL_VERSION = 1
"""Version of messages.py and draft.proto together; both sides must have the same one."""


class WireError(AdaServeError):
    """A received message is invalid. session, epoch: those of the message; session 0: it concerns no session."""

    code = "invalid"

    def __init__(self, message: str, session: int = 0, epoch: int = 0) -> None:
        super().__init__(message)
        self.session = session
        self.epoch = epoch


@dataclass(frozen=True)
class Hello:
    """First message of a stream.

    target_id: unique per target process. vocabulary_hash: `models.tokenizer.Tokenizer.vocabulary_hash` of the model's
    rows. cells_hash: `cells_hash` of the acceptance table, because trees refer to its cells. draft_version: required
    version; "": any. verify_s: expected seconds between two drafts, which is one verification and the target's other
    work. plain_s: expected seconds of one plain decoding step. Admission uses both, at most 60 s each; 0: unknown.
    """

    target_id: str
    vocabulary_hash: str
    cells_hash: str
    draft_version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    verify_s: float = 0.0
    plain_s: float = 0.0


@dataclass(frozen=True)
class Welcome:
    """Answer to Hello: the target is admitted.

    max_context: most tokens of a session, including its tree. max_sessions: most sessions of this target at once.
    lease_s: a session is freed after so many seconds without a message. level_s: seconds of one search level by
    (rows, width); catchup_s: seconds of feeding so many tokens; both measured by the service on an idle device, at most
    60 s each.
    """

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
    """Refusal of a target, or of one session (session > 0). code: one of REFUSALS. retry_after_s: when to ask again;
    0: asking again without a change is useless."""

    code: str
    message: str
    session: int = 0
    epoch: int = 0
    retry_after_s: float = 0.0


REFUSALS = (
    "protocol_version", "vocabulary", "draft_version", "cells", "unauthenticated", "full", "quota", "rate", "too_long",
    "invalid", "shutting_down",
)  # fmt: skip
"""Codes of Refused. full: with one more target, drafting would be slower than plain decoding; quota: too many sessions
or waiting drafts; rate: too many messages; too_long: longer than max_context; invalid: malformed message."""


SessionSampling = RowSampling[float]
"""Sampling parameters of one request. The draft needs them because its noise must be the target's."""


@dataclass(frozen=True, eq=False)
class Open:
    """Open a session, or reopen it with a higher epoch. tokens: i32[n], its whole text so far; the service keeps the KV
    of the common prefix."""

    session: int
    epoch: int
    tokens: np.ndarray
    sampling: SessionSampling


@dataclass(eq=False, slots=True)  # not frozen: a frozen one takes four times as long to create
class Draft:
    """Set the text to its first `base` tokens and `tokens`, i32[n], then search from its end.

    depth: levels of the tree; 0: only feed the tokens, without an answer. width: beam width. calibrated: as
    `DraftPlan.calibrated`. due_s: seconds until the request's next token is due; inf without an SLO. give_up_s: the
    longest time that the target waits for the tree, in seconds.
    """

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


@dataclass(eq=False, slots=True)  # not frozen: a frozen one takes four times as long to create
class Tree:
    """Candidates for one Draft. A tree without nodes says that the draft failed or could not be ready in time.

    length: tokens of the text that they follow. index: i32[C], the column of each node, level * width + rank; absent
    nodes are left out. token, parent, cell: i32[C] and log_q: f32[C], as in one row of `CandidateTrees`; parent is a
    column, -1 the root. queue_s, service_s: seconds spent waiting for the device and on it.
    """

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
    """A Draft does not fit the session (a gap, another text, or no such session): the target must reopen it."""

    session: int
    epoch: int


@dataclass(frozen=True)
class Load:
    """Load of the service, sent along with answers. busy: share of the last seconds in which the device worked;
    queue_s: seconds of waiting work; sessions: those of all targets; targets: connected ones."""

    busy: float
    queue_s: float
    sessions: int
    targets: int


LOAD_EVERY_S = 0.25
"""Least time between two Load messages to one target."""

FromTarget = Hello | Open | Draft | Close
FromService = Welcome | Refused | Tree | Resync | Load


def cells_hash(table: ChanceTable) -> str:
    """Return 16 hexadecimal digits that identify the table's cells: their number and their edges, not their chances."""
    edges = [[repr(float(edge)) for edge in mode] for mode in table.edges.astype(np.float32)]
    text = json.dumps([list(table.chance.shape), edges])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def log_f_of(cell: np.ndarray, parent: np.ndarray, log_chance: np.ndarray, coupled: np.ndarray) -> np.ndarray:
    """Return log f of trees, f32[R, D, W], bit for bit as `tree.beam` adds it up on a device.

    A tree carries the cell of each node; the chances stay with the target, which learns them. cell, parent: i32[R, D,
    W], -1 where a node is absent; a parent is a column (level * W + rank), -1 at the root. log_chance: f32[2, cells],
    by mode. coupled: bool[R], rows with temperature > 0.
    """
    gain = log_chance[coupled.astype(np.intp)[:, None, None], np.maximum(cell, 0)]
    return along_paths(np.where(cell < 0, np.float32(-np.inf), gain), parent)


def along_paths(gain: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return sums of `gain` along each path, f32[R, D, W], added from the first level down; -inf below absent nodes.

    gain: f32[R, D, W], -inf where absent. parent: as in `log_f_of`.
    """
    rows, depth, width = gain.shape
    sums = gain.copy()
    flat = sums.reshape(-1)
    above = np.maximum(parent, 0) + np.arange(0, rows * depth * width, depth * width)[:, None, None]
    for level in range(1, depth):
        sums[:, level] += flat[above[:, level]]
    return sums
