"""Every family that transformers writes gives transformers' logits through the packed programs: chunked prefill over
600 tokens (past the window, past the context before scaling) and trees on top."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params
from adaserve_jax.runtime.buckets import BucketSet
from adaserve_jax.runtime.compiling import compile_all
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.packing import pack_verify, step_layout
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.tree.accept import PREFILL
from adaserve_jax.types import DraftTrees, RowSampling, StepPlan
from tests.models.torch_checkpoints import FAMILIES, VOCABULARY, torch_logits, torch_model, write_family

PAGE, LENGTH, CHUNK = 16, 600, 96
MAX_PAGES = LENGTH // PAGE + 2
TOLERANCE = 2e-4
TREE_TOKENS, TREE_PARENTS = [3, 11, 12, 13, 14, 15], [-1, 0, 1, 0, 2, 4]
QUICK = {"llama_biases-blocks", "llama_yarn-blocks", "mistral-blocks", "qwen2_window-blocks", "qwen3_window-canonical"}
CASES = [f"{name}-blocks" for name in FAMILIES] + ["mistral-canonical", "qwen3_window-canonical"]
PARAMS = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


def probe(programs: ModelPrograms, params, pools, packed, bucket):
    """Logits of every packed token; commits prompt tokens only, so that a tree leaves the pools as they are."""
    fields = step_layout(bucket, programs.max_pages).split(packed)
    forward = programs.packed_forward(params, pools, fields, bucket)
    scores = programs.sampled_logits(params, forward, jnp.arange(bucket.tokens))
    return scores, programs.in_flight(pools, fields, forward, fields["emit_depth"] == PREFILL)


def build(folder: Path, canonical: bool) -> DeviceModel:
    config = ModelConfig.from_folder(folder)
    programs = ModelPrograms(config, MAX_PAGES, canonical=canonical)
    model = DeviceModel(
        "target", config, load_params(folder, config, jnp.float32), programs, BucketSet((CHUNK,), (1,), CHUNK),
        num_pages=MAX_PAGES + 3, page_size=PAGE, dtype=jnp.dtype(jnp.float32),
    )  # fmt: skip
    model.compiled = compile_all(model.declare_forward(partial(probe, programs)))
    return model


def plan_of(context: int, chunk: list[int]) -> StepPlan:
    """One row on shuffled pages: a prompt chunk, or a decoding row where there is none."""
    table = np.random.default_rng(0).permutation(MAX_PAGES + 3)[None, :MAX_PAGES].astype(np.int32)
    zeros = np.zeros(1, np.int32)
    f32 = zeros.astype(np.float32)
    return StepPlan(
        step=0, slots=np.arange(1), num_decode=0 if chunk else 1, root_token=zeros[: 0 if chunk else 1],
        ctx_len=np.array([context], np.int32), page_table=table,
        sampling=RowSampling(zeros.astype(np.uint64), zeros, f32, zeros, f32 + 1, f32),
        prefill_tokens=np.array(chunk, np.int32), prefill_counts=np.array([len(chunk)] if chunk else [], np.int32),
        prefill_final=np.zeros(1 if chunk else 0, bool), draft=None, budget=CHUNK,
    )  # fmt: skip


def trees(tokens: list[int], parents: list[int]) -> DraftTrees:
    depth = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    arrays = [np.array(x, np.int32) for x in ([0] * len(tokens), tokens, parents, depth)]
    return DraftTrees(*arrays, arrays[3] - 1, np.ones(len(tokens), np.float32))


def run(model: DeviceModel, plan: StepPlan, tree: DraftTrees) -> np.ndarray:
    bucket = model.buckets.pick(tree.num_nodes + plan.num_prefill_tokens, 1)
    return np.asarray(model.run(pack_verify(bucket, MAX_PAGES, plan, tree)))


@pytest.mark.torch
@pytest.mark.parametrize("case", PARAMS)
def test_prefill_chunks_and_trees_equal_transformers(case: str, tmp_path: Path) -> None:
    name, attention = case.split("-")
    folder = write_family(tmp_path, name)
    theirs = torch_model(folder)
    model = build(folder, attention == "canonical")
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, LENGTH).tolist()
    expected = torch_logits(theirs, sequence)
    assert expected.std() > 0.5
    start, errors = 0, []
    for size in (1, 7, 63, 96, 96, 41, 96, 96, 96, 8):
        stop = start + size
        scores = run(model, plan_of(start, sequence[start:stop]), trees([], []))[:size]
        errors.append(np.abs(scores - expected[start:stop]).max())
        start = stop
        if start in (1, 71, LENGTH):
            errors.append(tree_error(model, theirs, sequence[:start]))
    assert start == LENGTH
    print(f"max abs logit difference, {case}: {max(errors):.1e}")
    model.close()
    assert max(errors) < TOLERANCE


def tree_error(model: DeviceModel, theirs, context: list[int]) -> float:
    """Largest difference of any node to its own path, decoded plainly after the context."""
    scores = run(model, plan_of(len(context), []), trees(TREE_TOKENS, TREE_PARENTS))
    errors = []
    for node in range(len(TREE_TOKENS)):
        path, at = [], node
        while at >= 0:
            path.append(TREE_TOKENS[at])
            at = TREE_PARENTS[at]
        errors.append(np.abs(scores[node] - torch_logits(theirs, context + path[::-1])[-1]).max())
    return max(errors)
