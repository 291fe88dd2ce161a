"""The bytes behind the ledger: of models before they are loaded, of programs once they are compiled, and of the limit.

Weights and pages are exact, to the byte that the arrays will have; the reserve for the workspace is an estimate, for
sizing pages before anything is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.memory.ledger import MIB, MemoryLimit, Sizes, Workspace
from adaserve_jax.memory.process_memory import process_memory
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.runtime.buckets import Bucket, BucketSet
from adaserve_jax.runtime.resample import EditShapes

SCORES, ACTIVATIONS, IN_FLIGHT = 8, 4, 2
"""How often the reserve counts f32 scores over the vocabulary (a forward hands them on, and drawing again sorts what it
edited), the widest activation of a step, and a step's K/V (stacked by layer, then handed on)."""
RESERVE_SHARE = 0.05
"""Share of the limit that the reserve takes beside those: for what allocators round up."""


def memory_limit(config: EngineConfig) -> MemoryLimit:
    """What `memory_limit_mib` says, and no more than the first device has: by its own word, or else what this process
    may use of the host's memory, which the devices of a CPU share with the host."""
    device = jax.local_devices()[0]
    own, source = (device.memory_stats() or {}).get("bytes_limit"), "what the device gives"
    on_host = device.platform == "cpu"
    if own is None:
        own, source = process_memory()
    if 0 < config.memory_limit_mib * MIB < own:
        return MemoryLimit(config.memory_limit_mib * MIB, "memory_limit_mib", own, on_host)
    return MemoryLimit(own, source, own, on_host)


def sizes_of(
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, dtype: jnp.dtype, placement: Placement,
    verify: BucketSet, limit: MemoryLimit, training: int = 0,
) -> Sizes:  # fmt: skip
    """config: without "auto", but for num_pages. The draft lies whole on the first device, beside its shard of the
    target; the devices of a CPU have one memory, in which all shards of this process lie. training: bytes of what
    learning keeps and takes."""
    partition, on_cpu = placement.partition, placement.devices[0].platform == "cpu"
    here = sum(device.process_index == jax.process_index() for device in placement.devices) if on_cpu else 1
    whole, local = partition.whole(target), partition.local(target)
    rows, tokens = verify.row_edges[-1], verify.token_edges[-1]
    sampled = max(bucket.sampled for bucket in verify.all())
    kept = EditShapes(verify, target.vocab_size, config.max_context).bytes(tokens) if config.num_processes == 1 else 0
    drafting = 0
    if draft is not None:
        scores = 4 * SCORES * rows * config.max_width * draft.vocab_size
        drafting = max(_workspace(draft, tokens, rows, dtype), scores)

    def sized(quantize: str) -> Sizes:
        verifying = here * _workspace(local, tokens, sampled, dtype)
        if quantize == "int8" and on_cpu:  # each product is a loop there, and no two share a result's place
            verifying += here * 4 * tokens * target.num_layers * _outputs(local)
        return Sizes(
            target_weights=here * weight_bytes(whole, dtype, quantize, partition),
            target_page=here * page_bytes(local, config.page_size, dtype),
            draft_weights=0 if draft is None else weight_bytes(draft, dtype),
            further_drafts=0 if draft is None else len(config.drafts) * weight_bytes(draft, dtype),
            training=training,
            draft_page=0 if draft is None else page_bytes(draft, config.page_size, dtype),
            reserve=max(verifying, drafting) + kept + int(RESERVE_SHARE * limit.bytes),
        )

    sizes = sized(config.quantize)
    return sizes if config.quantize == "int8" else replace(sizes, int8=sized("int8"))


def weight_bytes(config: ModelConfig, dtype: jnp.dtype, quantize: str = "none", partition: Partition = WHOLE) -> int:
    """Of one device's weights, as `load_params` places them. config: the partition's whole model."""
    specs = param_specs(config, quantize)
    total = 0
    for name, (shape, axes) in specs.items():
        size = math.prod(shape) * weight_dtype(name, specs, dtype).itemsize
        total += size // partition.ways if partition.split_axis(axes) is not None else size
    return total


def weight_dtype(name: str, specs: Mapping[str, Any], dtype: jnp.dtype) -> np.dtype:
    """Of a weight of `param_specs`, as `load_params` gives it; a matrix that has a scale is in int8."""
    if name.endswith(SCALE):
        return np.dtype(np.float32)
    return np.dtype(np.int8) if name + SCALE in specs else dtype


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """KV of one page, all layers. config: of what one device holds."""
    return 2 * config.num_layers * config.kv_size * page_size * dtype.itemsize


def workspace_of(compiled: Mapping[tuple[Any, ...], Callable], kept: Callable[[int], int] | None = None) -> Workspace:
    """By what the compiler says of each program. Results count of the programs of steps only, and not where they take
    the place of an argument: what other programs make are pages, which the ledger has. kept: bytes of arguments that
    are kept for steps of up to so many tokens; None: none."""
    sizes = []
    for key, program in compiled.items():
        analysis = program.memory_analysis()  # type: ignore[attr-defined]
        tokens = _tokens(key)
        is_step = tokens or "search" in key
        result = analysis.output_size_in_bytes - analysis.alias_size_in_bytes if is_step else 0
        sizes.append((tokens, analysis.temp_size_in_bytes, result))

    def up_to(most: int) -> int:
        def largest(part: int) -> int:
            return max((each[part] for tokens, *each in sizes if tokens <= most), default=0)

        return largest(0) + largest(1) + (0 if kept is None else kept(most))

    by_tokens = {tokens: up_to(tokens) for tokens in sorted({tokens for tokens, _, _ in sizes if tokens})}
    return Workspace(up_to(max(by_tokens, default=0)), by_tokens)


def _tokens(key: tuple[Any, ...]) -> int:
    """Packed tokens of a program, by its key; 0: it has none."""
    bucket = next((part for part in key if isinstance(part, Bucket)), None)
    if bucket is not None:
        return bucket.tokens
    return key[key.index("commit") + 1] if "commit" in key else 0


def _workspace(config: ModelConfig, tokens: int, sampled: int, dtype: jnp.dtype) -> int:
    """Bytes that a packed forward is expected to take. config: of what one device holds."""
    widest = max(2 * config.intermediate_size, config.q_size + 2 * config.kv_size, config.hidden_size)
    scores, activation = 4 * sampled * config.vocab_size, 4 * tokens * widest
    in_flight = 2 * config.num_layers * tokens * config.kv_size * dtype.itemsize
    return SCORES * scores + ACTIVATIONS * activation + IN_FLIGHT * in_flight


def _outputs(config: ModelConfig) -> int:
    """Features that the products of a layer have together."""
    return config.q_size + 2 * config.kv_size + 2 * config.intermediate_size + 2 * config.hidden_size
