"""Texts after which what a request forbids leaves no token: the step is cut before what it drew there.

A grammar whose only way on is a word that is banned leads there; so may a grammar that a tokenizer cannot spell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adaserve_jax.constraints.positions import Positions
from adaserve_jax.errors import RequestError
from adaserve_jax.types import DraftTrees, LogitEdits, StepOutcome, StepPlan

MAX_REASON_CHARS = 300


def dead_end(gave_up: str | None) -> RequestError:
    """What a request is told that came there. gave_up: why its grammar did, if it did."""
    if gave_up is None:
        why = "json_schema, bad_words and min_tokens together allow no token after this text; leave one of them out"
        return RequestError(why, code="no_token_allowed")
    return RequestError(
        f"the JSON schema costs more after this text than it may; make it simpler: {gave_up[:MAX_REASON_CHARS]}",
        param="response_format",
        code="no_token_allowed",
    )


def without_dead_ends(
    outcome: StepOutcome, edits: LogitEdits, plan: StepPlan, trees: DraftTrees, request_ids: Sequence[str]
) -> tuple[StepOutcome, list[str]]:
    """The outcome without tokens that stand where none was allowed, and the requests that came there. request_ids: of
    the step's rows."""
    ends = _dead_ends(edits, plan, trees, outcome.accepted)
    if not ends:
        return outcome, []
    counts = outcome.counts.copy()
    for row, left in ends.items():
        counts[row] = left
    return replace(outcome, counts=counts), [request_ids[row] for row in ends]


def _dead_ends(edits: LogitEdits, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray) -> dict[int, int]:
    """How many tokens are left, by row. accepted: bool[nodes], of the walk; the end of a prompt always is."""
    if edits.allowed is None:
        return {}
    dead = np.flatnonzero(~edits.allowed.any(axis=1)).tolist()
    if not dead:
        return {}
    positions = Positions.of(plan, trees)
    found: dict[int, int] = {}
    for position in dead:
        if position >= trees.num_nodes or accepted[position]:
            row, depth = int(positions.row[position]), int(positions.depth[position])
            found[row] = min(depth, found.get(row, depth))
    return found
