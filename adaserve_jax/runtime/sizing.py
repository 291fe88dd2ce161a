"""Sizing: replaces "auto" in a configuration by numbers, and plans an engine's memory before weights are loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adaserve_jax.config import WEIGHT_KINDS, EngineConfig, Quantize
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import (
    MIB,
    Ledger,
    MemoryLimit,
    Sizes,
    Workspace,
    check_fits,
    process_memory,
)
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.decoder import adapter_specs, param_specs
from adaserve_jax.models.loading import weight_dtype
from adaserve_jax.models.partition import WHOLE, Partition
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.quantize import ZERO, int4_group
from adaserve_jax.pallas_kernels.paged_tree_attention.api import Implementation, reads_slabs, unsupported
from adaserve_jax.runtime.absent_device import AbsentDevice
from adaserve_jax.runtime.compile import Bucket, BucketSet
from adaserve_jax.runtime.pools import pool_head_dim
from adaserve_jax.runtime.resample import EditShapes
from adaserve_jax.types import Limits

CPU_KV_BYTES = 2 << 30
"""Most memory that auto sizing gives to KV pages on a CPU."""
OWN_KERNEL: dict[str, Implementation] = {"cpu": "cpu", "gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
"""The attention kernel of each platform."""
SCORES, ACTIVATIONS, IN_FLIGHT = 8, 4, 2
"""Copies in the reserve of the f32 scores over the vocabulary (a forward returns them, and drawing again
sorts the edited ones), of a step's widest activation, and of its K/V (stacked by layer, then returned)."""
RESERVE_SHARE = 0.05
"""Share of the memory limit that the reserve adds to these, since allocators round up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """A configuration without "auto", and the buckets, limits and memory plan that follow from it.

    placement: devices of the target. attention, draft_attention: the kernel implementations. sizes: bytes of each part.
    memory: the limit that they must fit into. weight_format: how a quantised target is stored and held, for people; ""
    for one in full precision. draft_vocabulary: how the target's tokens are mapped to the drafts', for
    people; "" if the vocabularies are the same. synthetic: `acceptance_rates`; None: tokens are compared.
    """

    config: EngineConfig
    limits: Limits
    verify_buckets: BucketSet
    catchup_buckets: BucketSet
    search_widths: tuple[int, ...]
    dtype: jnp.dtype
    placement: Placement
    attention: Implementation
    draft_attention: Implementation
    sizes: Sizes
    memory: MemoryLimit
    weight_format: str = ""
    draft_vocabulary: str = ""
    synthetic: tuple[float, ...] | None = None

    def ledger(self, workspace: Workspace | None = None) -> Ledger:
        """Return the planned bytes of every part. workspace: of the compiled programs; None before that is known."""
        limits = self.limits
        return Ledger(self.sizes, self.memory, limits.num_pages, limits.extension_pages, workspace)

    def check_memory(self, workspace: Workspace | None = None) -> None:
        """Raise ConfigError, with what to change, unless the ledger fits the memory limit."""
        check_fits(self.ledger(workspace), self.limits)


def resolve(
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, *, elastic: bool = False,
    training_bytes: int = 0, absent: AbsentDevice | None = None, map_bytes: int = 0,
) -> Resolved:  # fmt: skip
    """Replace every "auto" of a configuration by what device, models and memory allow.

    draft: the local draft's configuration; None without one. elastic: True where the policy exchanges the draft for
    pages and config.elastic is "auto". training_bytes: memory to leave to learning beside serving. absent: the device
    to plan for in place of those that jax sees. map_bytes: of the maps from the target's vocabulary to the drafts'; 0
    if they have the target's.
    Raises ConfigError: the parts do not fit each other; the message says which to change.
    """
    platform = _platform(absent)
    on_cpu = platform == "cpu"
    models = [model for model in (target, draft) if model is not None]
    is_head = draft is not None and draft.is_head
    deepest = config.max_depth
    if draft is not None and is_head:
        draft.check_target(target)
        models = [target]  # a head states the length that it was trained with
        if draft.medusa is not None:
            deepest = min(deepest, draft.medusa.num_heads)
    supported = min(model.max_position for model in models)
    if config.max_context > supported:
        raise ConfigError(
            f"max_context must be at most {supported}, which the models support, got {config.max_context}"
        )
    config = replace(
        config,
        dtype=_dtype_name(config, platform),
        max_requests=config.max_requests or max(config.row_edges, default=32 if on_cpu else 128),
        max_context=config.max_context or min(*(model.usual_context for model in models), 2048 if on_cpu else 8192),
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
    placement = _placement(config, target, absent)
    capability = _capability(placement, absent)
    attention = choose_attention(config, placement.partition.local(target), dtype, platform, capability)
    verify_rows = _ends(rows) if attention == "cpu" and not config.row_edges else rows
    verify = BucketSet(edges, verify_rows, edges[-1] if config.deterministic else max_tree)
    memory = memory_limit(config, absent)
    speculates = draft is not None or config.drafter is not None
    max_depth = deepest if speculates else 0
    suffix_depth = min(config.suffix_depth, max_tree) if config.may_draft_from_text else 0
    texts = _bytes_of_texts(config, max(max_depth, suffix_depth)) if suffix_depth else 0
    sizes = sizes_of(config, target, draft, dtype, placement, verify, memory, training_bytes, map_bytes, texts)
    extends = config.elastic == "on" or (config.elastic == "auto" and elastic)
    pages_of = partial(Sizes.pages_within, limit=memory, extends=extends)
    config, sizes = _choose_weights(config, target, sizes, pages_of)
    pages = config.num_pages or _auto_pages(config, sizes, pages_of(sizes), on_cpu)
    config = replace(
        config, max_tree_tokens=max_tree, max_batch_tokens=edges[-1], num_pages=pages,
        attention=attention.partition("_")[0],  # "mosaic" of both platforms
    )  # fmt: skip
    limits = Limits(
        max_requests=config.max_requests, token_edges=edges, max_tree_tokens=max_tree, max_context=config.max_context,
        page_size=config.page_size, num_pages=pages, max_depth=max_depth,
        max_width=config.max_width if speculates else 0, suffix_depth=suffix_depth, draft_is_head=is_head,
    )  # fmt: skip
    limits = replace(limits, extension_pages=_extension_pages(config, limits, sizes, attention, elastic))
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
        draft_attention="xla" if draft is None else draft_attention(attention, draft, config.page_size, dtype),
        sizes=sizes,
        memory=memory,
        weight_format=_describe_weights(config, target),
    )


def dtype_of(config: EngineConfig) -> jnp.dtype:
    """Return the type of weights and KV; with "auto", f32 on a CPU and bf16 elsewhere."""
    return jnp.dtype(jnp.float32 if _dtype_name(config, _platform(None)) == "f32" else jnp.bfloat16)


def _platform(absent: AbsentDevice | None) -> str:
    return jax.local_devices()[0].platform if absent is None else absent.platform


def _dtype_name(config: EngineConfig, platform: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "f32" if platform == "cpu" else "bf16"


def choose_attention(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, platform: str, capability: str = "9.0"
) -> Implementation:
    """Return the implementation of attention in the target. model: one device's part of it. capability: compute
    capability of a GPU.

    With "auto" it is the platform's own kernel where that runs these shapes, but XLA in deterministic mode, whose order
    of summation only xla has, and with elastic "on", since kernels of accelerators read one pool of pages.
    Raises ConfigError: the one in `config` cannot run on this platform or with this model.
    """
    if config.attention == "xla":
        return "xla"
    own = OWN_KERNEL.get(platform, "xla")
    if config.attention == "auto":
        if config.deterministic or (platform != "cpu" and config.elastic == "on"):
            return "xla"
        reason = _refusal(own, model, config.page_size, dtype, capability)
        if platform != "cpu":
            _log.info("attention is %s", f"xla: {reason}" if reason else f"{own}; --attention xla has XLA's")
        return "xla" if reason else own
    if config.deterministic:
        raise ConfigError(
            f"attention must be auto or xla in deterministic mode, whose order of summation only xla has, got "
            f"{config.attention!r}"
        )
    if config.attention == "cpu" and platform != "cpu":
        raise ConfigError(f"attention 'cpu' runs on CPUs, and jax sees {platform!r}; use auto or xla")
    if config.attention == "mosaic" and platform not in ("gpu", "tpu"):
        raise ConfigError(f"attention 'mosaic' needs a GPU or a TPU, and jax sees {platform!r}; use auto or xla")
    if reason := _refusal(own, model, config.page_size, dtype, capability):
        raise ConfigError(f"attention {config.attention!r} cannot run on this device: {reason}; use auto or xla")
    return own


def draft_attention(chosen: Implementation, draft: ModelConfig, page_size: int, dtype: jnp.dtype) -> Implementation:
    """Return the implementation of attention in the draft: the target's, or xla where that cannot run its shapes."""
    return "xla" if _refusal(chosen, draft, page_size, dtype, "9.0") else chosen


def _refusal(
    implementation: Implementation, model: ModelConfig, page_size: int, dtype: jnp.dtype, capability: str
) -> str:
    """Return why a kernel does not run a model's shapes on a device; "" if it does."""
    if implementation == "mosaic_gpu" and not capability.startswith("9."):
        return f"the kernel is for Hopper GPUs, of compute capability 9, and this one has {capability or 'none'}"
    head_dim = pool_head_dim(model.head_dim, "tpu") if implementation == "mosaic_tpu" else model.head_dim
    group = model.num_heads // model.num_kv_heads
    reason = unsupported(implementation, head_dim=head_dim, page_size=page_size, group=group, dtype=dtype)
    return f"the kernel {reason}" if reason else ""


def _capability(placement: Placement, absent: AbsentDevice | None) -> str:
    if absent is not None and absent.chip is not None:
        return ".".join(map(str, absent.chip.capability))
    return str(getattr(placement.devices[0], "compute_capability", ""))


def _edges(config: EngineConfig, on_cpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return token edges and row edges; in deterministic mode, one of each."""
    if config.deterministic:
        if config.token_edges or config.row_edges:
            raise ConfigError(
                "deterministic mode runs every step in one bucket: leave out token_edges and row_edges, and set its "
                "size by max_batch_tokens and max_requests"
            )
        largest = config.max_batch_tokens or max(64, 1 << (config.max_requests - 1).bit_length())
        return (largest,), (config.max_requests,)
    tokens = config.token_edges or _token_edges(config.max_batch_tokens or (256 if on_cpu else 1024))
    if config.token_edges and config.max_batch_tokens and config.max_batch_tokens != tokens[-1]:
        raise ConfigError(f"max_batch_tokens ({config.max_batch_tokens}) must equal the last of token_edges {tokens}")
    rows = config.row_edges or _row_edges(config.max_requests)
    if rows[-1] != config.max_requests:
        raise ConfigError(f"the last of row_edges {rows} must equal max_requests ({config.max_requests})")
    return tokens, rows


def _token_edges(largest: int) -> tuple[int, ...]:
    """Return 1, 4, 8, 16, ... below `largest`, and `largest`."""
    return (*(edge for edge in (1, *(4 << power for power in range(largest.bit_length()))) if edge < largest), largest)


def _row_edges(largest: int) -> tuple[int, ...]:
    """Return 1, 8, 32, 128, 512 below `largest`, and `largest`: each edge adds a program per token edge."""
    edges = [edge for edge in (1, 8, 32, 128, 512) if edge < largest]
    return (*edges, largest)


def _ends(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and the last row edge: the kernel for CPUs leaves out rows that are not there."""
    return tuple(sorted({rows[0], rows[-1]}))


def _catchup_edges(edges: tuple[int, ...]) -> tuple[int, ...]:
    """Return every other token edge and the last: padding a draft's step is cheap, more programs are not."""
    return tuple(sorted({*edges[1::2], edges[-1]}))


def draft_buckets(largest: int, max_rows: int) -> BucketSet:
    """Return the catch-up buckets of a draft service: up to `largest` tokens of up to `max_rows` requests.

    Small buckets are closely spaced, since a service drafts for the requests that wait: often two or three, a few
    tokens each.
    """
    tokens = {*_catchup_edges(_token_edges(largest)), min(8, largest)}
    rows = {*_row_edges(max_rows), *(edge for edge in (2, 4) if edge < max_rows)}
    return BucketSet(tuple(sorted(tokens)), tuple(sorted(rows)), None)


def _placement(config: EngineConfig, target: ModelConfig, absent: AbsentDevice | None) -> Placement:
    """Return the target's devices. Several processes use all of theirs, since each must hold a part."""
    devices = jax.devices() if absent is None else absent.devices(config.tp)
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


def _choose_weights(
    config: EngineConfig, target: ModelConfig, sizes: Sizes, pages_of: Callable[[Sizes], int]
) -> tuple[EngineConfig, Sizes]:
    """Replace "auto" in `quantize`, with the sizes that follow. Full precision is never rounded without being asked.

    A checkpoint that is quantised already is held in `dtype`, which computes what it says. Where that does not fit, it
    is held in the first of `sizes.quantized` that does, or in the last. pages_of: pages that sizes leave; they must be
    those asked for, or those of one request.
    """
    if config.quantize != "auto":
        return config, sizes
    kinds: list[tuple[Quantize, Sizes]] = [("none", sizes)]
    if target.weight_format is not None:
        kinds += sizes.quantized.items()
    least = config.num_pages or _least_pages(config)
    kind, chosen = next((each for each in kinds if pages_of(each[1]) >= least), kinds[-1])
    return replace(config, quantize=kind), chosen


def _describe_weights(config: EngineConfig, target: ModelConfig) -> str:
    if target.weight_format is None:
        return ""
    kinds = {"int8": "int8 with a scale per row", "int4": "int4 with a scale per group of inputs"}
    held = kinds.get(config.quantize, config.dtype)
    return f"{target.weight_format.title}, held as {held}; activations and KV are {config.dtype}"


def _least_pages(config: EngineConfig) -> int:
    """Return the pages of one request at its longest."""
    return -(-config.max_context // config.page_size)


def _bytes_of_texts(config: EngineConfig, max_tree_depth: int) -> int:
    """Return the host memory of the texts that are drafted from."""
    from adaserve_jax.suffix.source import source_bytes

    return source_bytes(config.max_requests, config.max_context + max_tree_depth + 1, config.suffix_kept_tokens)


def _auto_pages(config: EngineConfig, sizes: Sizes, most: int, on_cpu: bool) -> int:
    """Return pages for every request at full length, `most` at most, which fit beside weights and reserve.

    On a CPU, which has other work, at most CPU_KV_BYTES. At least what one request needs: if that does not fit, the
    memory check refuses it.
    """
    least = _least_pages(config)
    if on_cpu:
        most = min(most, CPU_KV_BYTES // sizes.page)
    return max(least, min(config.max_requests * least, most))


def _extension_pages(
    config: EngineConfig, limits: Limits, sizes: Sizes, attention: Implementation, elastic: bool
) -> int:
    """Return N_draft: whole pages of the target that fit into the draft's weights and KV pool; 0: the draft stays.

    With "auto", the draft stays unless the policy is elastic and the pool cannot hold every request at full length.
    Raises ConfigError: elastic is "on" where it is impossible.
    """
    runs_short = limits.num_pages < limits.max_requests * limits.max_pages_per_request
    wanted = config.elastic == "on" or (config.elastic == "auto" and elastic and runs_short)
    pages, reason = 0, ""
    if not limits.max_depth or config.drafter is not None:
        reason = "there is no draft"
    elif config.num_processes > 1:
        reason = f"the target lies in {config.num_processes} processes; one must hold it alone"
    elif config.tp > 1:
        reason = f"the target is divided over {config.tp} devices (tp), and the draft's memory is on the first only"
    elif not reads_slabs(attention):
        reason = f"attention by {attention!r} reads one pool of pages; use attention xla"
    elif wanted and not (pages := sizes.extension_pages(limits.num_pages)):
        reason = "the draft's memory is less than one page of the target"
    if reason and config.elastic == "on":
        raise ConfigError(f"elastic must be off or auto here, got 'on': {reason}")
    return pages


def memory_limit(config: EngineConfig, absent: AbsentDevice | None = None) -> MemoryLimit:
    """Return `memory_limit_mib`, or less where the first device has less.

    A device that does not report its memory is taken to have what this process may use of the host's. absent: the
    device to plan for in place of the first that jax sees.
    """
    if absent is None:
        device = jax.local_devices()[0]
        own, source = (device.memory_stats() or {}).get("bytes_limit"), "what the device gives"
        on_host = device.platform == "cpu"
        if own is None:
            own, source = process_memory()
    else:
        own, source, on_host = absent.limit_bytes, f"{absent.memory_share:.0%} of {absent.title}", False
    if 0 < config.memory_limit_mib * MIB < own:
        return MemoryLimit(config.memory_limit_mib * MIB, "memory_limit_mib", own, on_host)
    return MemoryLimit(own, source, own, on_host)


def sizes_of(
    config: EngineConfig, target: ModelConfig, draft: ModelConfig | None, dtype: jnp.dtype, placement: Placement,
    verify: BucketSet, limit: MemoryLimit, training: int = 0, map_bytes: int = 0, texts: int = 0,
) -> Sizes:  # fmt: skip
    """Return the bytes of each part on the first device. config: without "auto", except num_pages.

    The draft lies whole on that device, beside its shard of the target. The devices of a CPU have one memory, which
    holds all shards of this process. Weights and pages are exact, to the byte that the arrays will have; the reserve
    for the workspace is an estimate, for sizing pages before anything is compiled. training: bytes of learning.
    map_bytes: of the maps of vocabularies. texts: of those that are drafted from.
    """
    partition, platform = placement.partition, placement.devices[0].platform
    on_cpu = platform == "cpu"
    here = sum(device.process_index == jax.process_index() for device in placement.devices) if on_cpu else 1
    whole, local = partition.whole(target), partition.local(target)
    rows, tokens = verify.row_edges[-1], verify.token_edges[-1]
    sampled = max(bucket.sampled for bucket in verify.all())
    kept = EditShapes(verify, target.vocab_size, config.max_context).bytes(tokens) if config.num_processes == 1 else 0
    drafting = 0
    features = 0 if draft is None else len(draft.feature_layers(target.num_layers))
    if draft is not None:
        searched = max(draft.vocab_size, target.vocab_size) if map_bytes else draft.vocab_size
        scores = 4 * SCORES * rows * config.max_width * searched
        drafting = max(_workspace(draft, tokens, rows, dtype), scores)

    def sized(quantize: str) -> Sizes:
        verifying = here * _workspace(local, tokens, sampled, dtype)
        if quantize != "none" and on_cpu:  # each product is a loop there, and no two share a result's place
            outputs = local.q_size + 2 * local.kv_size + 2 * local.intermediate_size + 2 * local.hidden_size
            verifying += here * 4 * tokens * target.num_layers * outputs
        own = 0
        if draft is not None:
            shared = shared_weights(draft, quantize, config.tp)
            own = sum(size for name, size in _weight_sizes(draft, dtype, "none", WHOLE).items() if name not in shared)
        return Sizes(
            target_weights=here * weight_bytes(whole, dtype, quantize, partition),
            target_page=here * page_bytes(local, config.page_size, dtype, platform, feature_layers=features),
            adapters=here * adapter_bytes(whole, config.lora_slots, config.max_lora_rank, dtype, partition),
            draft_weights=own,
            further_drafts=len(config.drafts) * own,
            training=training,
            vocabulary_maps=map_bytes,
            texts=texts,
            draft_page=0 if draft is None else page_bytes(draft, config.page_size, dtype, platform),
            reserve=max(verifying, drafting) + kept + int(RESERVE_SHARE * limit.bytes),
        )

    obstacle = _int4_obstacle(whole, partition)
    if config.quantize == "int4" and obstacle:
        raise ConfigError(f"quantize must be none or int8 here, got 'int4': {obstacle}")
    held: Quantize = "none" if config.quantize == "auto" else config.quantize
    smaller = [kind for kind in WEIGHT_KINDS[WEIGHT_KINDS.index(held) + 1 :] if kind != "int4" or not obstacle]
    if target.weight_format is not None and target.weight_format.in_4_bits:
        smaller.reverse()  # int4 holds the layers as the file has them, and int8 rounds them
    return replace(sized(held), quantized={kind: sized(kind) for kind in smaller})


def _int4_obstacle(config: ModelConfig, partition: Partition) -> str:
    """Return why a model cannot be in int4; "" if it can. config: the partition's whole model."""
    plain, specs = param_specs(config), param_specs(config, "int4")
    for name, ((_, groups), axes) in ((name, specs[name + ZERO]) for name in plain if name + ZERO in specs):
        inputs = plain[name][0][1]
        if inputs % int4_group(inputs):
            return f"{name} has {inputs} inputs, which do not make whole groups"
        if partition.split_axis(axes) == 1 and groups % partition.ways:
            return f"{partition.ways} devices (tp) cannot divide the {groups} groups of inputs of {name}"
    return ""


def shared_weights(draft: ModelConfig, quantize: str, tp: int) -> tuple[str, ...]:
    """Return the weights that a draft uses of its target's. quantize, tp: of the target; a head cannot compute in int8,
    and lies whole on its device."""
    if quantize != "none" or tp > 1:
        return ()
    if draft.is_mtp:
        return ("embed",) if draft.tie_embeddings else ("embed", "head")
    return ("embed",) if draft.eagle3 is not None and draft.eagle3.shares_embedding else ()


def weight_bytes(config: ModelConfig, dtype: jnp.dtype, quantize: str = "none", partition: Partition = WHOLE) -> int:
    """Return the bytes of one device's weights, as `load_params` places them. config: the partition's whole model."""
    return sum(_weight_sizes(config, dtype, quantize, partition).values())


def adapter_bytes(config: ModelConfig, count: int, rank: int, dtype: jnp.dtype, partition: Partition = WHOLE) -> int:
    """Return the bytes of one device's room for adapters. config: the partition's whole model."""
    if not count:
        return 0
    total = 0
    for shape, axes in adapter_specs(config, count, rank).values():
        size = math.prod(shape) * dtype.itemsize
        total += size // partition.ways if partition.split_axis(axes) is not None else size
    return total


def expert_bytes(config: ModelConfig, dtype: jnp.dtype, quantize: str = "none", partition: Partition = WHOLE) -> int:
    """Return the part of `weight_bytes` that only tokens which chose an expert need."""
    sizes = _weight_sizes(config, dtype, quantize, partition)
    return sum(size for name, size in sizes.items() if ".experts.gate_up" in name or ".experts.down" in name)


def _weight_sizes(config: ModelConfig, dtype: jnp.dtype, quantize: str, partition: Partition) -> dict[str, int]:
    """Return the bytes of each weight on one device."""
    specs = param_specs(config, quantize)
    sizes = {}
    for name, (shape, axes) in specs.items():
        size = math.prod(shape) * weight_dtype(name, specs, dtype).itemsize
        sizes[name] = size // partition.ways if partition.split_axis(axes) is not None else size
    return sizes


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype, platform: str, *, feature_layers: int = 0) -> int:
    """Return the bytes of one page's KV, all layers. config: one device's part of the model. feature_layers: layers
    whose outputs are kept too, for a head."""
    slot = 2 * config.num_layers * config.num_kv_heads * pool_head_dim(config.head_dim, platform)
    slot += feature_layers * pool_head_dim(config.hidden_size, platform)
    return slot * page_size * dtype.itemsize


def workspace_of(compiled: Mapping[tuple[Any, ...], Callable], kept: Callable[[int], int] | None = None) -> Workspace:
    """Return the workspace of compiled programs, by the compiler's own analysis.

    Results count for programs of steps only, and not where they alias an argument: other programs make pages, which the
    ledger counts itself. kept(tokens): bytes of arguments that stay on the device for steps of up to so many tokens.
    """
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
    """Return the packed tokens of a program, from its key; 0 if it has none."""
    bucket = next((part for part in key if isinstance(part, Bucket)), None)
    if bucket is not None:
        return bucket.tokens
    return key[key.index("commit") + 1] if "commit" in key else 0


def _workspace(config: ModelConfig, tokens: int, sampled: int, dtype: jnp.dtype) -> int:
    """Estimate the bytes of a packed forward. config: one device's part of the model."""
    widest = max(2 * config.intermediate_size, config.q_size + 2 * config.kv_size, config.hidden_size)
    if config.experts is not None:  # each token once for each of its experts
        chosen = config.experts.per_token * max(2 * config.experts.intermediate_size, config.hidden_size)
        widest = max(widest, chosen, 2 * config.experts.shared)
    scores, activation = 4 * sampled * config.vocab_size, 4 * tokens * widest
    in_flight = 2 * config.num_layers * tokens * config.kv_size * dtype.itemsize
    return SCORES * scores + ACTIVATIONS * activation + IN_FLIGHT * in_flight
