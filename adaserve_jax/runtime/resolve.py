"""Turns "auto" into numbers, once: what the device, the models and the configuration allow together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.advice import Shape, check_fits
from adaserve_jax.memory.ledger import Ledger, MemoryLimit, Sizes, Workspace
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.partition import Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, check_supported
from adaserve_jax.runtime.buckets import BucketSet
from adaserve_jax.runtime.extension import extension_pages
from adaserve_jax.runtime.footprint import memory_limit, sizes_of
from adaserve_jax.types import Limits

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
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, *, swaps: bool = False,
    training_bytes: int = 0,
) -> Resolved:  # fmt: skip
    """draft: the one of this device. swaps: whether the policy has it give its memory to pages. training_bytes: what
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
    limits = replace(limits, extension_pages=extension_pages(config, limits, sizes, attention, swaps))
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
