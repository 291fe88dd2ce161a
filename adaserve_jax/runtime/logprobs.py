"""Log probabilities of what a step draws: made on the device, taken apart on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from adaserve_jax.constraints.positions import Positions
from adaserve_jax.runtime.buckets import Bucket
from adaserve_jax.sampling import MAX_LOGPROBS
from adaserve_jax.types import DraftTrees, LogitEdits, StepLogprobs, StepPlan


def report_size(sampled: int, vocab_size: int) -> int:
    """Of what `report` gives."""
    return sampled * (1 + 2 * min(MAX_LOGPROBS, vocab_size))


def report(logits: jax.Array, drawn: jax.Array) -> jax.Array:
    """i32[N + 2 N K]: the bits of the log probability of each drawn token, the ids of the K likeliest tokens, and the
    bits of theirs. logits: f32[N, V]; drawn: i32[N]."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    own = jnp.take_along_axis(logits, drawn[:, None], axis=1) - total
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    bits = [lax.bitcast_convert_type(part, jnp.int32).reshape(-1) for part in (own, top - total)]
    return jnp.concatenate([bits[0], ids.astype(jnp.int32).reshape(-1), bits[1]])


def logprobs_of(
    report: np.ndarray, bucket: Bucket, plan: StepPlan, trees: DraftTrees, accepted: np.ndarray, edits: LogitEdits,
    max_depth: int,
) -> StepLogprobs | None:  # fmt: skip
    """Of the emitted tokens of the rows that asked; None: no row did. report: i32 as above; accepted: bool[nodes]."""
    if (edits.logprobs < 0).all():
        return None
    own, *rest = np.split(report, [bucket.sampled, (bucket.sampled + len(report)) // 2])
    ids, top = (part.reshape(bucket.sampled, -1) for part in rest)
    positions = Positions.of(plan, trees)
    emitted = edits.logprobs[positions.row] >= 0
    emitted[: len(accepted)] &= accepted
    at = np.flatnonzero(emitted)
    shape = (plan.num_rows, max_depth + 1)
    each = (*shape, ids.shape[1])
    found = StepLogprobs(np.zeros(shape, np.float32), np.zeros(each, np.int32), np.zeros(each, np.float32))
    place = (positions.row[at], positions.depth[at])
    found.drawn[place] = own.view(np.float32)[at]
    found.top_ids[place] = ids[at]
    found.top[place] = np.ascontiguousarray(top).view(np.float32)[at]
    return found
