"""How much of what the target says a draft would say: measured on texts of the target that nobody was served.

Exact over the whole vocabulary; the acceptance rate of spec decoding, mean over positions of sum min(p, q). Of a head
it is the mean over the levels that a head is trained for, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.heads import HeadTarget
from adaserve_jax.distill.offline import Scorer
from adaserve_jax.distill.programs import batch_sums, head_sums
from adaserve_jax.distill.records import PackedBatch, pack
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params

NUM_TOKENS = 512


class Judge:
    """Texts of each domain, scored by the target. texts: (tokens i32[n], tokens of the prompt) by domain."""

    def __init__(
        self, target: ModelConfig, target_params: Params, draft: ModelConfig,
        texts: Mapping[str, Sequence[tuple[np.ndarray, int]]], temperature: float,
    ) -> None:  # fmt: skip
        top_k = draft.vocab_size
        scorer = Scorer(target, top_k=top_k, vocab_size=top_k, temperature=temperature)
        self._batches: dict[str, list[PackedBatch]] = {}
        for name, each in texts.items():
            records = scorer.records(target_params, [text for text, _ in each], [prompt - 1 for _, prompt in each])
            packed = pack(records, NUM_TOKENS, np.random.default_rng(0))
            self._batches[name] = [PackedBatch(*map(jnp.asarray, batch)) for batch in packed]
        learn = LearnConfig(learn_top_k=top_k, learn_temperature=temperature)
        self._target_params = target_params
        self._sums: Any = jax.jit(partial(_sums, draft, target, learn))

    def acceptance(self, params: Params) -> dict[str, float]:
        """By domain."""
        found = {}
        for name, batches in self._batches.items():
            sums = [np.asarray(self._sums(params, self._target_params, batch)) for batch in batches]
            overlap, rows = np.sum(sums, axis=0)
            found[name] = float(overlap / rows)
        return found


def _sums(
    draft: ModelConfig, target: ModelConfig, learn: LearnConfig, params: Params, target_params: Params,
    batch: PackedBatch,
) -> jax.Array:  # fmt: skip
    """Return the sums of overlaps and of weights, f32[2]."""
    if not draft.is_head:
        overlap, weight = batch_sums(params, draft, learn, batch)[1], batch.weight.sum()
    else:
        features = HeadTarget(target, target_params).features(target_params, draft, batch)
        _, overlap, weight = head_sums(params, draft, learn, batch, features, 1.0)
    return jnp.stack([overlap, weight])
