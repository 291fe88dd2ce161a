"""A tiny draft and made records, as the tests of training need them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import PackedBatch, pack
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, init_params

VOCAB, TOP, SIZE = 23, 5, 32
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    rope_theta=100.0, rms_norm_eps=1e-5, tie_embeddings=False, max_position=512, windows=(None, 4),
)  # fmt: skip
SMALL = replace(CONFIG, num_layers=1, windows=(4,))
"""Configuration of the programs that all tests of training share."""


def made_params(config: ModelConfig = CONFIG, dtype: Any = jnp.float32) -> Params:
    """Random weights, norms among them."""
    params = init_params(config, 3)
    rng = np.random.default_rng(5)
    return {
        name: jnp.asarray(np.asarray(weight) + 0.1 * rng.standard_normal(weight.shape), dtype)
        for name, weight in params.items()
    }


def float64(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(weight, np.float64) for name, weight in params.items()}


def made_record(
    rng: np.random.Generator, length: int, rows: int | list[int], *, top: int = TOP, vocab: int = VOCAB
) -> Any:
    """A text of random tokens with that many rows, or rows at those positions; the fields that packing reads."""
    at = rng.choice(length - 1, rows, replace=False) if isinstance(rows, int) else rows
    position = np.sort(at).astype(np.int32)
    every = np.log(rng.dirichlet(np.ones(vocab), len(position)))
    ids = np.argsort(-every, axis=1)[:, :top].astype(np.int32)
    log_p = np.take_along_axis(every, ids, axis=1).astype(np.float32)
    tokens = rng.integers(0, vocab, length).astype(np.int32)
    return SimpleNamespace(tokens=tokens, position=position, ids=ids, log_p=log_p)


def workspace_of(programs: TrainPrograms) -> int:
    """The largest memory of a program beyond its arguments, as the compiler reports it: temporaries, and results that
    replace no argument. Without "begin", whose results stay."""
    kept = (program for key, program in programs.compiled.items() if key != ("begin",))
    analyses = [program.memory_analysis() for program in kept]  # type: ignore[attr-defined]
    return max(each.temp_size_in_bytes + each.output_size_in_bytes - each.alias_size_in_bytes for each in analyses)


def as_texts(records: list[Any]) -> list[tuple]:
    """As the oracle takes them."""
    return [(each.tokens, each.position, each.ids, each.log_p) for each in records]


def assert_close(found: Any, expected: dict[str, np.ndarray], relative: float = 1e-4) -> None:
    """Each array differs by no more than that share of its largest value."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), value, rtol=0, atol=relative * max(np.abs(value).max(), 1e-6),
            err_msg=name,
        )  # fmt: skip


def assert_same(found: Any, expected: Any) -> None:
    """All arrays of two trees, bit by bit."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)


def packed(*records: Any) -> PackedBatch:
    """Return the one batch of these records."""
    (batch,) = pack(records, SIZE, np.random.default_rng(0))
    return batch
