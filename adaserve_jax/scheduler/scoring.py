"""Scoring of prompts: which positions of a step's prefill chunks report the log probability of the prompt's next token.

Such a position takes one of the step's sampled positions, as a tree node does, so the logits of a prompt come in
chunks of at most `Limits.max_tree_tokens` positions, however long it is.
"""

from __future__ import annotations

import numpy as np

from adaserve_jax.scheduler.sequence import SequenceState
from adaserve_jax.types import ScoredPrompts


def share_out(prefill: list[SequenceState], tokens: int, positions: int) -> list[int]:
    """Return chunk lengths for the first of `prefill`, in order, until `tokens` are given out.

    positions: sampled positions that scoring may take, beside one for each sequence.
    """
    chunks: list[int] = []
    for state in prefill:
        if tokens <= 0:
            break
        chunk = min(state.pending, tokens)
        if state.is_scored:
            unscored = max(state.num_scored - state.num_computed, 0)
            chunk = min(chunk, unscored + 1 + positions)
            positions -= max(chunk - unscored - 1, 0)
        chunks.append(chunk)
        tokens -= chunk
    return chunks


def scored_prompts(prefill: list[SequenceState], chunks: list[int], num_decode: int) -> ScoredPrompts | None:
    """Return the positions of these chunks that are scored; None if there are none.

    prefill: sequences of the rows from `num_decode` on, as many as chunks.
    """
    if not any(state.is_scored for state in prefill):
        return None
    rows: list[tuple[int, int, int]] = []
    at, token = [], []
    first = 0
    for row, (state, chunk) in enumerate(zip(prefill, chunks, strict=True), num_decode):
        computed = state.num_computed
        begin, end = max(computed, state.num_scored), min(computed + chunk, state.prompt_len - 1)
        if begin < end:
            rows.append((row, end - begin, state.sequence.sampling.prompt_logprobs or 0))
            at.append(np.arange(begin, end, dtype=np.int32) + (first - computed))
            token.append(state.token_ids[begin + 1 : end + 1])
        first += chunk
    if not rows:
        return None
    row_ids, counts, tops = np.array(rows, np.int32).T
    return ScoredPrompts(row_ids, counts, tops, np.concatenate(at), np.concatenate(token))
