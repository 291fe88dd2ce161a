"""A model behind one packed program that gives the logits of every token: for tests of the forward."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.loading import load_params
from adaserve_jax.models.partition import Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.runtime.adapters import AdapterBank, empty_adapters
from adaserve_jax.runtime.compile import BucketSet, compile_all
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.step_layout import pack_verify
from adaserve_jax.tree.verify import PREFILL
from adaserve_jax.types import DraftTrees, StepPlan
from tests.plans import i32, packed_trees, step_plan

PAGE, LENGTH, CHUNK = 32, 600, 96
MAX_PAGES = LENGTH // PAGE + 2
RANK = 8
"""Room of an adapter."""
TREE_TOKENS, TREE_PARENTS = [3, 11, 12, 13, 14, 15], [-1, 0, 1, 0, 2, 4]


def probe(programs: ModelPrograms, params, pools, packed, bucket):
    """Logits of every packed token; commits prompt tokens only, so that a tree leaves the pools as they are."""
    fields = programs.layout(bucket).split(packed)
    forward = programs.packed_forward(params, pools, fields, bucket)
    scores = programs.sampled_logits(params, forward, jnp.arange(bucket.tokens))
    return scores, programs.in_flight(pools, fields, forward, fields["emit_depth"] == PREFILL)


def build(
    folder: Path, canonical: bool, ways: int = 1, quantize: str = "none", adapters: tuple[Path, ...] = (),
) -> DeviceModel:  # fmt: skip
    """A model whose forward returns logits, divided over the first `ways` devices. adapters: in slots from 1 on."""
    config = ModelConfig.from_folder(folder).for_context(LENGTH)
    partition = Partition.of(config, ways, exact=canonical)
    placement = Placement.over(tuple(jax.devices()[:ways]), partition)
    programs = ModelPrograms(partition.local(config), MAX_PAGES, canonical, partition, max_adapters=len(adapters))
    params = load_params(folder, config, jnp.float32, placement=placement, quantize=quantize)
    if adapters:
        params |= empty_adapters(config, len(adapters), RANK, jnp.float32, placement)
    model = DeviceModel(
        "target", config, params, programs,
        BucketSet((CHUNK,), (1,), CHUNK), num_pages=MAX_PAGES + 3, page_size=PAGE, dtype=jnp.dtype(jnp.float32),
        placement=placement,
    )  # fmt: skip
    bank = AdapterBank(model, len(adapters), RANK) if adapters else None
    model.compiled = compile_all(
        [*model.declare_forward(partial(probe, programs)), *(bank.declare() if bank is not None else ())]
    )
    for slot, adapter in enumerate(adapters, 1):
        assert bank is not None
        bank.put(slot, bank.read(adapter))
    return model


def plan_of(context: int, chunk: list[int], adapter: int = 0) -> StepPlan:
    """One row on shuffled pages: a prompt chunk, or a decoding row where there is none."""
    table = np.random.default_rng(0).permutation(MAX_PAGES + 3)[None, :MAX_PAGES].astype(np.int32)
    return step_plan(
        0 if chunk else 1, [chunk] if chunk else [], ctx_len=i32([context]), page_table=table, tree_token_cap=CHUNK,
        adapters=i32([adapter]) if adapter else None,
    )  # fmt: skip


def trees(tokens: list[int], parents: list[int]) -> DraftTrees:
    return packed_trees([(tokens, parents)])


def run(model: DeviceModel, plan: StepPlan, tree: DraftTrees) -> np.ndarray:
    programs, bucket = model.programs, model.buckets.pick(tree.num_nodes + plan.num_prefill_tokens, plan.num_rows)
    packed = pack_verify(bucket, programs.max_pages, plan, tree, adapted=programs.max_adapters > 0)
    return np.asarray(model.run(packed))
