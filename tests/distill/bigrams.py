"""Languages whose next token depends on the last one only, a draft that is small enough to learn them in a second, and
records of texts in them: what a target that speaks such a language would have left."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import Record
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.distill.updates import DraftUpdates, RecordBuffer
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, param_specs

VOCAB, LENGTH, NUM_TOKENS = 24, 24, 64
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    rope_theta=1e4, rms_norm_eps=1e-5, tie_embeddings=False, max_position=64,
)  # fmt: skip
LEARN = LearnConfig(learn_rate=0.02, learn_top_k=VOCAB, learn_every=8, learn_steps=4, learn_buffer=64)


def random_params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    specs = param_specs(CONFIG)
    return {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, (shape, _) in specs.items()}


class Language:
    """A table of log probabilities, f64[V, V]."""

    def __init__(self, seed: int):
        logits = 2.5 * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB))
        self.log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._rng = np.random.default_rng((seed, 1))

    def record(self, *, tenant: str = "", held_out: bool = False, draft: int = 0) -> Record:
        tokens = [int(self._rng.integers(VOCAB))]
        while len(tokens) < LENGTH:
            tokens.append(int(self._rng.choice(VOCAB, p=np.exp(self.log_p[tokens[-1]]))))
        scores = self.log_p[tokens[:-1]]
        ids = np.argsort(-scores, axis=1)
        log_p = np.take_along_axis(scores, ids, axis=1).astype(np.float32)
        position = np.arange(LENGTH - 1, dtype=np.int32)
        return Record(np.array(tokens, np.int32), position, ids.astype(np.int32), log_p, draft, tenant, held_out)

    def records(self, count: int, **changes) -> list[Record]:
        """Every eighth of them is held out."""
        return [self.record(held_out=index % 8 == 7, **changes) for index in range(count)]


def programs_of(learn: LearnConfig = LEARN) -> TrainPrograms:
    programs = TrainPrograms(CONFIG, learn, NUM_TOKENS, jnp.float32)
    programs.compile()
    return programs


class Served:
    """A draft's updates, and the versions that they had serve."""

    def __init__(self, programs: TrainPrograms, learn: LearnConfig = LEARN, name: str = "default"):
        self.versions: list[Params] = []
        buffer = RecordBuffer(learn.learn_buffer, learn.learn_held_out, learn.learn_tenant_share)
        self.updates = DraftUpdates(
            name, Trainer(programs, random_params()), buffer, learn, NUM_TOKENS, self.versions.append,
            np.random.default_rng(7),
        )  # fmt: skip

    def take(self, records: Sequence[Record]) -> list[str]:
        """Add them one by one, doing what becomes due; the kinds of the pieces that were done."""
        done = []
        for record in records:
            self.updates.add(record)
            while self.updates.due:
                done += list(self.updates.run())
        return done
