"""Where the time of one verification goes: products, attention, head, sampling, host, and what is left.

Each part is the difference of two programs, timed in turns in one process: the whole step from host to host, its device
program alone, the forward with the head, the forward, the forward without attention, and the layers' products alone.
So the parts add up to the step. Every row has pages of its own: a page that all rows shared would stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import Params, decode
from adaserve_jax.models.layers import weight_product
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.runtime.compile import Bucket, Declared, compile_all
from adaserve_jax.runtime.executor import ModelExecutor
from adaserve_jax.runtime.pools import Pools
from adaserve_jax.runtime.programs import ModelPrograms
from adaserve_jax.runtime.step_layout import pack_verify, step_layout
from adaserve_jax.runtime.warmup import decode_plan
from adaserve_jax.types import DraftTrees
from benchmarks.kernels.ceilings import in_turns

SHAPES = ((1, 1), (1, 8), (8, 2), (16, 2), (32, 1))
"""Rows and tokens per row."""
CONTEXTS = (256, 1500)
ROUNDS = 7


@dataclass(frozen=True)
class StepParts:
    """One shape. step_s: from host to host, the sum of all parts. products_s: of the layers' weights. rest_s: norms,
    rotary embedding, activations, and the copies between operations."""

    rows: int
    tokens: int
    context: int
    step_s: float
    products_s: float
    attention_s: float
    head_s: float
    sampling_s: float
    host_s: float
    rest_s: float


def measure_parts(executor: ModelExecutor, rounds: int = ROUNDS) -> list[StepParts]:
    """Return the parts of every shape and context that the engine's limits hold. The target must not be quantised."""
    limits = executor.limits
    if any(name.endswith(SCALE) for name in executor.target.params):
        return []
    shapes = [
        (rows, each, context)
        for context in CONTEXTS
        for rows, each in SHAPES
        if rows <= limits.max_requests and rows * each <= limits.max_tree_tokens and context + each < limits.max_context
    ]
    compiled = compile_all(_declare(executor, {_bucket(executor, rows, each) for rows, each, _ in shapes}))
    return [_parts(executor, compiled, *shape, rounds) for shape in shapes]


def _bucket(executor: ModelExecutor, rows: int, each: int) -> Bucket:
    return executor.target.buckets.pick(rows * each, rows)


def _declare(executor: ModelExecutor, buckets: set[Bucket]) -> list[Declared]:
    """Return the programs of `_parts`, to be compiled side by side: compiling takes longer than timing."""
    target, programs = executor.target, executor.target.programs
    declared: list[Declared] = []
    for bucket in buckets:
        packed = jax.ShapeDtypeStruct((step_layout(bucket, programs.max_pages).size,), jnp.int32)
        for run in (_forward, _with_head, _bare):
            function = jax.jit(partial(run, programs, bucket))
            declared.append(Declared((run, bucket), function, (target.params, target.pools, packed)))
        x = jax.ShapeDtypeStruct((programs.config.hidden_size, bucket.tokens), jnp.float32)
        declared.append(Declared((_products, bucket), jax.jit(partial(_products, programs.config)), (target.params, x)))
    return declared


def _parts(
    executor: ModelExecutor, compiled: dict[tuple[Any, ...], Callable[..., Any]], rows: int, each: int, context: int,
    rounds: int,
) -> StepParts:  # fmt: skip
    limits, target = executor.limits, executor.target
    programs = target.programs
    plan = decode_plan(limits, rows, context, None)
    pages = np.arange(plan.page_table.size).reshape(plan.page_table.shape) % limits.num_pages
    plan = replace(plan, page_table=pages.astype(np.int32))
    trees = _chains(rows, each)
    bucket = _bucket(executor, rows, each)
    packed = pack_verify(bucket, programs.max_pages, plan, trees).packed
    verify = target.compiled[("target", bucket)]
    forward, with_head, bare, products = (
        compiled[run, bucket] for run in (_forward, _with_head, _bare, _products)
    )  # fmt: skip
    x = jnp.full((programs.config.hidden_size, bucket.tokens), 1e-2)
    # A step donates the pools, so each call takes those that there are.
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: executor.verify(plan, trees),
        "verify": lambda: verify(target.params, target.pools, packed)[0].outcome,
        "with_head": lambda: with_head(target.params, target.pools, packed),
        "forward": lambda: forward(target.params, target.pools, packed),
        "bare": lambda: bare(target.params, target.pools, packed),
        "products": lambda: products(target.params, x),
    }
    seconds = in_turns(calls, rounds)
    return StepParts(
        rows, rows * each, context,
        step_s=seconds["step"],
        products_s=seconds["products"],
        attention_s=seconds["forward"] - seconds["bare"],
        head_s=seconds["with_head"] - seconds["forward"],
        sampling_s=seconds["verify"] - seconds["with_head"],
        host_s=seconds["step"] - seconds["verify"],
        rest_s=seconds["bare"] - seconds["products"],
    )  # fmt: skip


def _chains(rows: int, each: int) -> DraftTrees:
    """Return a tree for each row: a chain of `each` tokens."""
    row = np.repeat(np.arange(rows, dtype=np.int32), each)
    depth = np.tile(np.arange(each, dtype=np.int32), rows)
    index = np.arange(len(row), dtype=np.int32)
    parent = np.where(depth == 0, -1, index - 1).astype(np.int32)
    return DraftTrees(row, index, parent, depth, depth - 1, np.ones(len(row), np.float32))


def _forward(programs: ModelPrograms, bucket: Bucket, params: Params, pools: Pools, packed: jax.Array) -> Any:
    fields = step_layout(bucket, programs.max_pages).split(packed)
    return programs.packed_forward(params, pools, fields, bucket)


def _with_head(programs: ModelPrograms, bucket: Bucket, params: Params, pools: Pools, packed: jax.Array) -> Any:
    fields = step_layout(bucket, programs.max_pages).split(packed)
    forward = programs.packed_forward(params, pools, fields, bucket)
    return programs.sampled_logits(params, forward, fields["sampled"]), forward


def _bare(programs: ModelPrograms, bucket: Bucket, params: Params, pools: Pools, packed: jax.Array) -> Any:
    """Run the forward with attention that returns its queries."""
    fields = step_layout(bucket, programs.max_pages).split(packed)
    kept: list[tuple[jax.Array, jax.Array]] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        kept.append((k.transpose(2, 0, 1), v.transpose(2, 0, 1)))
        return q

    hidden = decode(params, programs.config, fields["token"], fields["position"], attend)
    return hidden, *(jnp.stack(each) for each in zip(*kept, strict=True))


def _products(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Multiply by every layer's weights, one after another, in their type as `decode` does."""
    for layer in range(config.num_layers):
        qkv, out, gate_up, down = (params[f"layers.{layer}.{name}"] for name in ("qkv", "out", "gate_up", "down"))
        for weight, size in ((qkv, config.q_size), (out, None), (gate_up, config.intermediate_size), (down, None)):
            x = weight_product(weight, x.astype(weight.dtype))[:size]
    return x
