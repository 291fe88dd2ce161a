"""Turns "auto" into numbers, once: what the device, the models and the configuration allow together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import MIB, Ledger, MemoryLimit, Shape, Sizes, Workspace, check_fits, process_memory
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import param_specs
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, check_supported, reads_slabs
from adaserve_jax.runtime.compile import Bucket, BucketSet
from adaserve_jax.runtime.resample import EditShapes
from adaserve_jax.types import Limits

# How many KV pages the draft's memory makes while the draft is away, and whether this engine shall have them.


def extension_pages(
    config: EngineConfig, limits: Limits, sizes: Sizes, attention: Implementation, elastic: bool
) -> int:
    """N_draft: whole pages of the target that fit into the draft's weights and KV pool; 0: the draft stays.

    limits: without an extension. elastic: whether the policy has the draft give its memory to pages. Raises
    ConfigError: elastic is "on" where it cannot be.
    """
    has_draft = limits.max_depth > 0 and config.drafter is None
    if not has_draft or config.elastic == "off" or (config.elastic == "auto" and not (elastic and _runs_short(limits))):
        reason, pages = "" if has_draft else "there is no draft", 0
    else:
        reason, pages = _obstacle(config, attention), sizes.extension_pages(limits.num_pages)
        if not reason and not pages:
            reason = "the draft's memory is less than one page of the target"
    if reason and config.elastic == "on":
        raise ConfigError(f"elastic must be off or auto here, got 'on': {reason}")
    return 0 if reason else pages


def _obstacle(config: EngineConfig, attention: Implementation) -> str:
    """Why pools cannot be extended, or ""."""
    if config.num_processes > 1:
        return f"the target lies in {config.num_processes} processes; one must hold it alone"
    if config.tp > 1:
        return f"the target is divided over {config.tp} devices (tp), and the draft's memory is on the first only"
    if not reads_slabs(attention):
        return f"attention by {attention!r} reads one pool of pages; use attention xla"
    return ""


def _runs_short(limits: Limits) -> bool:
    """Whether the pool does not hold every request at its longest."""
    return limits.num_pages < limits.max_requests * limits.max_pages_per_request


# The bytes behind the ledger: of models before they are loaded, of programs once they are compiled, and of the
# limit.
#
# Weights and pages are exact, to the byte that the arrays will have; the reserve for the workspace is an
# estimate, for sizing pages before anything is compiled.

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


CPU_KV_BYTES = 2 << 30  # most memory that auto sizing gives to KV pages on a CPU
TPU_LANES = 128  # XLA lays out arrays whose last axis is a multiple of this in the order of their axes


@dataclass(frozen=True)
class Resolved:
    """A configuration without "auto", and the buckets and limits that follow from it. placement: of the target;
    attention: who implements it, in both models. sizes, memory: what the ledger is made of."""

    config: EngineConfig
    limits: Limits
    verify_buckets: BucketSet
    catchup_buckets: BucketSet
    search_widths: tuple[int, ...]
    dtype: jnp.dtype
    placement: Placement
    attention: Implementation
    sizes: Sizes
    memory: MemoryLimit

    def ledger(self, workspace: Workspace | None = None) -> Ledger:
        """What all of it takes. workspace: what the compiled programs take; None: not known yet."""
        limits = self.limits
        return Ledger(self.sizes, self.memory, limits.num_pages, limits.extension_pages, workspace)

    def check_memory(self, workspace: Workspace | None = None) -> None:
        """Raises ConfigError, with what to change, unless the ledger fits the limit."""
        limits = self.limits
        check_fits(self.ledger(workspace), Shape(limits.page_size, limits.max_context, limits.max_requests))

    def without_draft(self) -> Resolved:
        """As another process than the first has it."""
        return replace(self, sizes=self.sizes.without_draft())


def resolve(
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, *, elastic: bool = False,
    training_bytes: int = 0,
) -> Resolved:  # fmt: skip
    """draft: the one of this device. elastic: whether the policy has it give its memory to pages. training_bytes: what
    learning keeps and takes beside what serves. Raises ConfigError when the parts do not fit each other; the message
    says which to change."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    supported = min(model.max_position for model in (target, draft) if model is not None)
    if config.max_context > supported:
        raise ConfigError(
            f"max_context must be at most {supported}, which the models support, got {config.max_context}"
        )
    config = replace(
        config,
        dtype=_dtype_name(config),
        max_requests=config.max_requests or max(config.row_edges, default=32 if on_cpu else 128),
        max_context=config.max_context or min(supported, 2048 if on_cpu else 8192),
    )
    edges, rows = _edges(config, on_cpu)
    max_tree = config.max_tree_tokens or (128 if on_cpu else 512)
    max_tree = min(max_tree, edges[-1])
    if max_tree < config.max_requests:
        raise ConfigError(
            f"max_tree_tokens ({max_tree}) must be at least max_requests ({config.max_requests}): every request "
            "verifies one token; raise max_tree_tokens and max_batch_tokens or lower max_requests"
        )
    dtype = dtype_of(config)
    placement = _placement(config, target)
    verify = BucketSet(edges, rows, edges[-1] if config.deterministic else max_tree)
    memory = memory_limit(config)
    sizes = sizes_of(config, target, draft, dtype, placement, verify, memory, training_bytes)
    pages = config.num_pages or _auto_pages(config, sizes, memory, on_cpu)
    config = replace(config, max_tree_tokens=max_tree, max_batch_tokens=edges[-1], num_pages=pages)
    speculates = draft is not None or config.drafter is not None
    limits = Limits(
        max_requests=config.max_requests, token_edges=edges, max_tree_tokens=max_tree, max_context=config.max_context,
        page_size=config.page_size, num_pages=pages, max_depth=config.max_depth if speculates else 0,
        max_width=config.max_width if speculates else 0,
    )  # fmt: skip
    attention = choose_attention(
        config, [placement.partition.local(target), *([draft] if draft else [])], dtype, device.platform
    )
    limits = replace(limits, extension_pages=extension_pages(config, limits, sizes, attention, elastic))
    catchup = _catchup_edges(edges)
    return Resolved(
        config=config,
        limits=limits,
        verify_buckets=verify,
        catchup_buckets=BucketSet(catchup, rows, None),
        search_widths=tuple(sorted({1, config.max_width})) if draft is not None else (),
        dtype=dtype,
        placement=placement,
        attention=attention,
        sizes=sizes,
        memory=memory,
    )


def dtype_of(config: EngineConfig) -> jnp.dtype:
    """Of weights and KV, on this device where config.dtype is "auto"."""
    return jnp.dtype(jnp.float32 if _dtype_name(config) == "f32" else jnp.bfloat16)


def _dtype_name(config: EngineConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "f32" if jax.local_devices()[0].platform == "cpu" else "bf16"


def choose_attention(
    config: EngineConfig, models: list[ModelConfig], dtype: jnp.dtype, platform: str
) -> Implementation:
    """Who implements attention. models: the device's part of each. Raises ConfigError when the one asked for cannot
    run on this platform or with these models."""
    if config.attention in ("auto", "xla"):
        return "xla"
    if config.deterministic:
        raise ConfigError(
            f"attention must be auto or xla in deterministic mode, whose order of summation only xla has, got "
            f"{config.attention!r}"
        )
    if config.attention == "plain":
        return "plain"
    if platform not in ("gpu", "tpu"):
        raise ConfigError(f"attention 'mosaic' needs a GPU or a TPU, and jax sees {platform!r}; use auto or xla")
    implementation: Implementation = "mosaic_gpu" if platform == "gpu" else "mosaic_tpu"
    for model in models:
        if platform == "tpu" and model.head_dim % TPU_LANES:
            raise ConfigError(
                f"attention 'mosaic' on a TPU is for head dimensions that are multiples of {TPU_LANES}, not "
                f"{model.head_dim}: XLA would copy the pools, which it lays out otherwise; use auto or xla"
            )
        check_supported(
            implementation, head_dim=model.head_dim, page_size=config.page_size,
            group=model.num_heads // model.num_kv_heads, dtype=dtype,
        )  # fmt: skip
    return implementation


def _edges(config: EngineConfig, on_cpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token edges and row edges. Deterministic mode: one of each."""
    if config.deterministic:
        if config.token_edges or config.row_edges:
            raise ConfigError(
                "deterministic mode runs every step in one bucket: leave out token_edges and row_edges, and set its "
                "size by max_batch_tokens and max_requests"
            )
        largest = config.max_batch_tokens or max(64, 1 << (config.max_requests - 1).bit_length())
        return (largest,), (config.max_requests,)
    tokens = config.token_edges or _geometric((1, 4), config.max_batch_tokens or (256 if on_cpu else 1024))
    if config.token_edges and config.max_batch_tokens and config.max_batch_tokens != tokens[-1]:
        raise ConfigError(f"max_batch_tokens ({config.max_batch_tokens}) must equal the last of token_edges {tokens}")
    rows = config.row_edges or _row_edges(config.max_requests)
    if rows[-1] != config.max_requests:
        raise ConfigError(f"the last of row_edges {rows} must equal max_requests ({config.max_requests})")
    return tokens, rows


def _geometric(start: tuple[int, ...], largest: int) -> tuple[int, ...]:
    edges = [edge for edge in start if edge < largest]
    value = start[-1] * 2
    while value < largest:
        edges.append(value)
        value *= 2
    return (*edges, largest)


def _row_edges(largest: int) -> tuple[int, ...]:
    """1, 8, 32, 128, ... up to `largest`: each edge is one more program per token edge."""
    edges = [edge for edge in (1, 8, 32, 128, 512) if edge < largest]
    return (*edges, largest)


def _catchup_edges(edges: tuple[int, ...]) -> tuple[int, ...]:
    """Every other token edge, the last included: the draft is cheap, programs are not."""
    return tuple(sorted({*edges[1::2], edges[-1]}))


def draft_buckets(largest: int, max_rows: int) -> BucketSet:
    """Catch-up of a draft that has no target beside it: up to `largest` tokens of up to `max_rows` requests. Small
    batches are closely spaced: a service drafts for as many as wait, often two or three, a few tokens each."""
    tokens = {*_catchup_edges(_geometric((1, 4), largest)), min(8, largest)}
    rows = {*_row_edges(max_rows), *(edge for edge in (2, 4) if edge < max_rows)}
    return BucketSet(tuple(sorted(tokens)), tuple(sorted(rows)), None)


def _placement(config: EngineConfig, target: ModelConfig) -> Placement:
    """The devices of the target. Several processes give all that they have: every one must hold a part."""
    devices = jax.devices()
    if config.tp > len(devices):
        hint = "; a CPU shows more with XLA_FLAGS=--xla_force_host_platform_device_count=N"
        raise ConfigError(
            f"tp must be at most {len(devices)}, the {devices[0].platform} devices that jax sees, got {config.tp}"
            f"{hint if devices[0].platform == 'cpu' else ''}"
        )
    if config.num_processes > 1 and config.tp != len(devices):
        raise ConfigError(
            f"tp must be {len(devices)}, all devices of the {config.num_processes} processes, got {config.tp}"
        )
    return Placement.over(tuple(devices[: config.tp]), Partition.of(target, config.tp, exact=config.deterministic))


def _auto_pages(config: EngineConfig, sizes: Sizes, memory: MemoryLimit, on_cpu: bool) -> int:
    """Pages for every request at full length, as far as the memory goes that weights and the reserve for the workspace
    leave; on a CPU, which has other work, within CPU_KV_BYTES. Never less than one request needs: what does not fit
    then is refused."""
    least = -(-config.max_context // config.page_size)
    most = sizes.pages_within(memory)
    if on_cpu:
        most = min(most, CPU_KV_BYTES // sizes.page)
    return max(least, min(config.max_requests * least, most))
