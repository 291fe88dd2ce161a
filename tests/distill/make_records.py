"""Small records for tests."""

from __future__ import annotations

import numpy as np

from adaserve_jax.distill.records import Record


def make_record(
    number: int = 0, *, tenant: str = "", held_out: bool = False, draft: int = 0, num_tokens: int = 6, top_k: int = 3
) -> Record:
    """A record that its first token, `number`, tells from others; its scores are drawn from it."""
    rng = np.random.default_rng(number)
    tokens = np.concatenate([[number], rng.integers(0, 1000, num_tokens - 1)]).astype(np.int32)
    position = np.flatnonzero(rng.random(num_tokens - 1) < 0.7).astype(np.int32)
    position = position if len(position) else np.zeros(1, np.int32)
    logits = -np.sort(rng.exponential(size=(len(position), top_k)).astype(np.float32))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True) + 1)
    ids = rng.permuted(np.tile(np.arange(1000, dtype=np.int32), (len(position), 1)), axis=1)[:, :top_k]
    return Record(tokens, position, ids, log_p, draft, tenant, held_out)
