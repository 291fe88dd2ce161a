"""The packed forward with pages, chunked prefill and trees equals the float64 oracle; the pools are never copied."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params
from adaserve_jax.runtime.absent_engine import copies_of
from adaserve_jax.runtime.compile import BucketSet, compile_all
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.pools import pool_head_dim
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.step_layout import step_layout
from adaserve_jax.tree.verify import PREFILL
from adaserve_jax.types import StepPlan
from tests.models.checkpoints import write_checkpoint
from tests.oracles.llama import oracle_logits
from tests.plans import i32, packed_trees, step_plan
from tests.runtime.packed_model import run
from tests.slow import slow_after

PAGE, MAX_PAGES, TOKENS, ROWS = 8, 6, 16, 4
SEQUENCES = [[5, 9, 300, 17, 40, 41, 42, 43, 44, 45, 46, 47, 48], [7, 7, 250]]
TREES = [([3, 11, 12, 13], [-1, 0, 1, 0]), ([19, 20], [-1, 0])]  # tokens and parents, root first
# The oracle reads weights in float64; the engine's own rounding is what the bound is about.
TOLERANCE = 1e-4


def probe(programs: ModelPrograms, params, pools, packed, bucket):
    """Logits of every packed token; commits roots and prompt tokens only."""
    fields = step_layout(bucket, programs.max_pages).split(packed)
    forward = programs.packed_forward(params, pools, fields, bucket)
    keep = (fields["emit_depth"] == 0) | (fields["emit_depth"] == PREFILL)
    scores = programs.sampled_logits(params, forward, jnp.arange(bucket.tokens))
    return scores, programs.in_flight(pools, fields, forward, keep)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=slow_after(1, ["blocks", "canonical", "pools_of_a_tpu"]))
def model(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[DeviceModel]:
    config = ModelConfig.from_folder(checkpoint)
    programs = ModelPrograms(config, MAX_PAGES, canonical=request.param == "canonical")
    buckets = BucketSet((TOKENS,), (ROWS,), TOKENS)
    params = load_params(checkpoint, config, jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pools_of_a_tpu":
            patch.setattr(
                "adaserve_jax.runtime.pools.pool_head_dim", lambda head_dim, _: pool_head_dim(head_dim, "tpu")
            )
        built = DeviceModel(
            "target", config, params, programs, buckets, num_pages=32, page_size=PAGE, dtype=jnp.dtype(jnp.float32)
        )
    assert (built.pools.k.shape[4] == config.head_dim) == (request.param != "pools_of_a_tpu")
    built.compiled = compile_all(built.declare_forward(partial(probe, programs)))
    yield built
    built.close()


def plan_of(contexts: list[int], chunks: list[list[int]]) -> StepPlan:
    """Rows with shuffled pages; the last len(chunks) of them prefill."""
    rows = len(contexts)
    table = np.random.default_rng(0).permutation(32)[: 2 * MAX_PAGES].reshape(2, MAX_PAGES)[:rows].astype(np.int32)
    return step_plan(rows - len(chunks), chunks, ctx_len=i32(contexts), page_table=table, tree_token_cap=TOKENS)


def test_chunked_prefill_and_trees_equal_the_oracle(model: DeviceModel, checkpoint: Path) -> None:
    cuts = [[(0, 5), (5, 12), (12, 13)], [(0, 1), (1, 2), (2, 3)]]
    expected = [oracle_logits(checkpoint, sequence) for sequence in SEQUENCES]
    for step in range(3):
        spans = [cuts[row][step] for row in range(2)]
        chunks = [SEQUENCES[row][start:stop] for row, (start, stop) in enumerate(spans)]
        scores = run(model, plan_of([start for start, _ in spans], chunks), packed_trees([]))
        offset = 0
        for row, (start, stop) in enumerate(spans):
            found = scores[offset : offset + stop - start]
            np.testing.assert_allclose(found, expected[row][start:stop], atol=TOLERANCE)
            offset += stop - start
    check_trees(model, checkpoint)


def check_trees(model: DeviceModel, checkpoint: Path) -> None:
    """Every node's logits equal those of its own path, decoded plainly after the committed context."""
    trees = packed_trees(TREES)
    scores = run(model, plan_of([len(s) for s in SEQUENCES], []), trees)
    for node in range(trees.num_nodes):
        path, at = [], node
        while at >= 0:
            path.append(int(trees.token[at]))
            at = trees.parent[at]
        expected = oracle_logits(checkpoint, SEQUENCES[trees.row[node]] + path[::-1])[-1]
        np.testing.assert_allclose(scores[node], expected, atol=TOLERANCE)


def test_no_program_copies_a_pool(model: DeviceModel) -> None:
    shape = model.pools.k.shape
    assert len(model.compiled) == 2
    for program in model.compiled.values():
        assert str(list(shape)).replace(" ", "")[1:-1] in program.as_text()
        assert copies_of(program.as_text(), shape) == []
