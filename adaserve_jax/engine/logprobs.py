"""Log probabilities of a step put to the updates of the requests that asked for them. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from adaserve_jax.types import LogitEdits, RequestUpdate, StepLogprobs, TokenLogprob


def with_logprobs(
    updates: Iterable[RequestUpdate], request_ids: Sequence[str], edits: LogitEdits, found: StepLogprobs
) -> list[RequestUpdate]:
    """The updates, with one TokenLogprob per token where the request asked. request_ids: of the step's rows."""
    rows = {request_ids[row]: row for row in np.flatnonzero(edits.logprobs >= 0).tolist()}
    return [
        replace(update, logprobs=_told(update.token_ids, found, row, int(edits.logprobs[row])))
        if (row := rows.get(update.request_id)) is not None
        else update
        for update in updates
    ]


def _told(token_ids: tuple[int, ...], found: StepLogprobs, row: int, count: int) -> tuple[TokenLogprob, ...]:
    """Of a row's kept tokens, each with `count` of the likeliest."""
    drawn = found.drawn[row].tolist()
    ids, top = found.top_ids[row, :, :count].tolist(), found.top[row, :, :count].tolist()
    return tuple(
        TokenLogprob(token, drawn[place], tuple(zip(ids[place], top[place], strict=True)))
        for place, token in enumerate(token_ids)
    )
