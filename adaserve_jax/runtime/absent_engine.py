"""Compiles an engine's programs for a device that is not here, and reports what its compiler says of each.

No weight is made. A few layers stand for all: programs are unrolled, so a layer more adds the same work again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.pallas_kernels.compat import compiling_for
from adaserve_jax.runtime.absent_device import AbsentDevice
from adaserve_jax.runtime.compile import Bucket, Declared
from adaserve_jax.runtime.loading import AbstractEngine, ModelPair, declare_shapes, read_draft
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.sizing import Resolved, adapter_bytes, page_bytes, resolve, weight_bytes
from adaserve_jax.types import Progress

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
MOSAIC_DUMP = "MOSAIC_GPU_DUMP_TO"
THUNKS = "thunk_sequence_after_thunk_passes"
_WITHOUT_DATA = ("bitcast", "conditional", "copy-start", "get-tuple-element", "parameter", "tuple", "while")
"""Operations that write no array: of a copy in two parts, the second counts."""
_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program.

    kind: of `kind_of`. shape: the rest of its key. error: the compiler's own words, and then nothing else counts.
    *_bytes: on one device; alias: results in the place of an argument. ledger_bytes: arguments by the engine's own
    arithmetic; None where it has none. pool_copies: instructions that copy, convert or transpose a whole pool.
    collectives: bytes of results by operation.

    Of a GPU: launches, what the host starts, of which a command buffer (CUDA graph) is one however many kernels it has,
    and the body of a loop counts once; kernels, in and outside of command buffers. Where ptxas is installed too:
    registers and shared_bytes, the most of any kernel; spilled_bytes, which all kernels store to memory for want of
    registers. Of a TPU, the most of any Mosaic kernel: vmem_bytes, scratch and blocks, and smem_bytes, scalars.
    """

    kind: str
    shape: str
    seconds: float
    error: str | None = None
    argument_bytes: int = 0
    temporary_bytes: int = 0
    result_bytes: int = 0
    alias_bytes: int = 0
    code_bytes: int = 0
    ledger_bytes: int | None = None
    pool_copies: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    launches: int | None = None
    kernels: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    spilled_bytes: int | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None


@dataclass(frozen=True)
class DevicePlan:
    """An engine planned for a device that is not here.

    resolved: with all layers. layers: that programs are compiled with, of the target and of the draft.
    """

    device: AbsentDevice
    pair: ModelPair
    resolved: Resolved
    layers: int


def plan_absent(config: EngineConfig, device: AbsentDevice, *, elastic: bool = False, layers: int = 0) -> DevicePlan:
    """Plan an engine for an absent device from the models' configurations, and from a head's weights where they are
    there; weights and vocabularies may be missing. layers: to compile; 0: all.

    Raises CheckpointError, ConfigError: as `plan_shapes` does; ConfigError: the device's compiler is not installed.
    """
    if config.num_processes > 1:
        raise ConfigError(f"--device plans one process, got num_processes {config.num_processes}; leave it out")
    folder = resolve_folder(config.target, "target")
    drafts = [resolve_folder(path, "draft", config.target) for path in config.draft_folders.values()]
    target = ModelConfig.from_folder(folder).for_context(config.max_context)
    draft = None
    if drafts:
        draft = read_draft(str(config.draft), drafts[0], config.max_context, may_lack_weights=True)
    pair = ModelPair(folder, target, draft, tuple(drafts))
    return DevicePlan(device, pair, resolve(config, pair.target, draft, elastic=elastic, absent=device), layers)


def compile_absent(
    engine: DevicePlan, *, every_bucket: bool = False, kinds: Collection[str] = (), progress: Progress | None = None
) -> list[CompiledProgram]:
    """Compile the programs of an engine, of each kind the largest, or all with `every_bucket`, and report on each.

    kinds: to compile (`kind_of`); none: all. A program that does not compile is reported with the compiler's error.
    """
    pair = engine.pair if not engine.layers else _cut(engine.pair, engine.layers)
    with compiling_for(engine.device.platform):
        abstract = declare_shapes(pair, engine.resolved)
        chosen = abstract.declared if every_bucket else _largest(abstract.declared)
        chosen = [program for program in chosen if not kinds or kind_of(program.key) in kinds]
        reports = []
        for done, declared in enumerate(chosen, 1):
            reports.append(_report(declared, abstract, pair, engine.resolved))
            if progress is not None:
                progress("compiling", done, len(chosen))
    return reports


def _cut(pair: ModelPair, layers: int) -> ModelPair:
    def first(config: ModelConfig) -> ModelConfig:
        count = min(layers, config.num_layers)
        return replace(config, num_layers=count, windows=config.windows[:count])

    draft = None if pair.draft is None else first(pair.draft)
    if draft is not None and draft.eagle3 is not None:  # it may read layers that are cut; any are as large
        draft = replace(draft, eagle3=replace(draft.eagle3, layers=(0, 0, 0)))
    return replace(pair, target=first(pair.target), draft=draft)


def _largest(declared: Iterable[Declared]) -> list[Declared]:
    """Return the last program of each kind: buckets, and what is declared for them, are in increasing order."""
    return list({kind_of(program.key): program for program in declared}.values())


def kind_of(key: tuple[Any, ...]) -> str:
    """Return the kind of a program in words, from its key: verify, commit, catch-up, "commit of the draft", "search,
    width W", resample, capture, adapter, move, "empty extension", "empty pools of the draft"; with ", two slabs" where
    the pools are extended.
    """
    role, *rest = key
    slabs = ", two slabs" if rest[-1:] == ["extended"] else ""
    first = rest[0] if isinstance(rest[0], str) else ""
    if not first:
        return ("verify" if role == "target" else "catch-up") + slabs
    if first == "commit":
        return ("commit" if role == "target" else "commit of the draft") + slabs
    if first == "search":
        return f"search, width {rest[2]}"
    return {"pools": "empty pools of the draft", "extension": "empty extension"}.get(first, first)


def _shape_of(key: tuple[Any, ...]) -> str:
    bucket = next((part for part in key if isinstance(part, Bucket)), None)
    if bucket is not None:
        return f"{bucket.rows} rows, {bucket.tokens} tokens"
    numbers = [part for part in key if isinstance(part, int)]
    if "search" in key:
        return f"{numbers[0]} rows"
    return f"{numbers[0]} tokens" if numbers else ""


def _report(declared: Declared, abstract: AbstractEngine, pair: ModelPair, resolved: Resolved) -> CompiledProgram:
    kind, shape, started = kind_of(declared.key), _shape_of(declared.key), time.perf_counter()
    first = jax.sharding.SingleDeviceSharding(resolved.placement.devices[0])
    arguments = jax.tree.map(lambda leaf: _on(first, leaf), declared.arguments)
    try:
        function = declared.function if arguments else _placed(declared.function, first)
        compiled, figures = compile_with_figures(function.lower(*arguments), resolved.placement.devices[0])
    except Exception as error:  # whatever a compiler raises is the report
        return CompiledProgram(kind, shape, time.perf_counter() - started, _first_lines(error))
    seconds = time.perf_counter() - started
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if sliced := kernels_of_slices(text):
        return CompiledProgram(
            kind, shape, seconds,
            f"{sliced} Mosaic kernels are given a slice by its address, which they refuse at run time if it is not "
            "aligned to 256 bytes; give them a computed array",
        )  # fmt: skip
    return CompiledProgram(
        kind, shape, seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        result_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        ledger_bytes=_ledger_bytes(declared, pair, resolved),
        pool_copies=sum(len(copies_of(text, pool)) for pool in _pool_shapes(abstract)),
        collectives=collectives_of(text),
        **figures,
    )  # fmt: skip


def compile_with_figures(lowered: Any, device: Any) -> tuple[Any, dict[str, Any]]:
    """Compile a program. Returns it, and the figures of `CompiledProgram` that only this kind of device has.

    A Mosaic kernel of a GPU that this process compiled before is not compiled again, and does not count again.
    """
    if device.platform == "tpu":
        compiled = lowered.compile()
        return compiled, read_mosaic_tpu(compiled.as_text())
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ.get(MOSAIC_DUMP)
        os.environ[MOSAIC_DUMP] = folder
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        finally:
            os.environ.pop(MOSAIC_DUMP)
            if kept is not None:
                os.environ[MOSAIC_DUMP] = kept
        thunks = "\n".join(path.read_text() for path in Path(folder).glob(f"*.{THUNKS}.txt"))
        ptxas = _ptxas()
        if ptxas is None:
            return compiled, read_thunks(thunks)
        said = [path.read_text() for path in Path(folder).glob("*.ptxas")]
        kernels = [path for path in Path(folder).glob("*.ptx") if not path.with_suffix(".ptxas").exists()]
        figures = read_ptxas("\n".join([*said, *(_assemble(ptxas, kernel) for kernel in kernels)]))
        return compiled, figures | read_thunks(thunks)


def _ptxas() -> str | None:
    """Return the path of ptxas of the package nvidia-cuda-nvcc, of CUDA 12 or 13; None if it is not installed."""
    packages = [find_spec(f"nvidia.{name}") for name in ("cuda_nvcc", "cu13")] if find_spec("nvidia") else []
    places = [place for package in packages if package for place in package.submodule_search_locations or ()]
    return next((str(path) for place in places if (path := Path(place, "bin", "ptxas")).exists()), None)


def _assemble(ptxas: str, kernel: Path) -> str:
    architecture = re.search(r"^\.target (\w+)", kernel.read_text(), re.MULTILINE)
    if architecture is None:  # a program of copies alone has an empty file
        return ""
    command = [ptxas, "--verbose", f"--gpu-name={architecture[1]}", str(kernel), "--output-file", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def read_ptxas(text: str) -> dict[str, int]:
    """Return the most registers and shared bytes of any kernel, and the spilled bytes of all, from what ptxas says."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        "shared_bytes": max(map(int, re.findall(r"(\d+) bytes smem", text)), default=0),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
    }


def read_thunks(text: str) -> dict[str, int]:
    """Return launches and kernels of a GPU program, from XLA's sequence of thunks after its passes."""
    launches = kernels = 0
    buffer_indent: int | None = None
    for spaces, kind in re.findall(r"^( *)\d+: k(\w+)", text, re.MULTILINE):
        if buffer_indent is not None and len(spaces) <= buffer_indent:
            buffer_indent = None
        if kind in ("While", "Conditional"):
            continue
        launches += buffer_indent is None
        if kind == "CommandBuffer":
            buffer_indent = len(spaces)
        else:
            kernels += 1
    return {"launches": launches, "kernels": kernels}


def read_mosaic_tpu(text: str) -> dict[str, int]:
    """Return the most VMEM and SMEM of any Mosaic kernel, from a compiled TPU program; nothing if it has none.

    Scalars that are prefetched to SMEM are the operands of one axis.
    """
    vmem, smem = [], []
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        used = re.search(r'"used_scoped_memory_configs":(\[.*?\])', line)
        configs = json.loads(used[1]) if used else []
        vmem.append(sum(int(each["size"]) for each in configs if each["memory_space"] == "1"))
        operands = re.search(r"operand_layout_constraints=\{(.*?)\}, \w+=", line)
        smem.append(sum(4 * int(size) for size in re.findall(r"s32\[(\d+)\]", operands[1] if operands else "")))
    return {"vmem_bytes": max(vmem), "smem_bytes": max(smem)} if vmem else {}


def _on(sharding: jax.sharding.Sharding, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument, on the first device unless it says where it lies."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed(function: Any, sharding: jax.sharding.Sharding) -> Any:
    """Return a jitted function without arguments, whose results lie there."""
    return jax.jit(function.__wrapped__, out_shardings=sharding)


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"


def _ledger_bytes(declared: Declared, pair: ModelPair, resolved: Resolved) -> int | None:
    """Return the bytes of weights, adapters and pages that a forward of one slab takes, as the ledger counts them."""
    kind, config, dtype, limits = kind_of(declared.key), resolved.config, resolved.dtype, resolved.limits
    partition, platform = resolved.placement.partition, resolved.placement.devices[0].platform
    whole, local = partition.whole(pair.target), partition.local(pair.target)
    page = page_bytes(local, limits.page_size, dtype, platform)
    if kind == "verify":  # a head's features are written by the commit, and read by the catch-up alone
        weights = weight_bytes(whole, dtype, config.quantize, partition)
        weights += adapter_bytes(whole, config.lora_slots, config.max_lora_rank, dtype, partition)
    elif kind == "catch-up" and pair.draft is not None:
        read = len(pair.draft.feature_layers(pair.target.num_layers))
        features = page_bytes(local, limits.page_size, dtype, platform, feature_layers=read) - page
        weights = weight_bytes(pair.draft, dtype)
        page = page_bytes(pair.draft, limits.page_size, dtype, platform) + features
    else:
        return None
    return weights + limits.num_pages * page


def _pool_shapes(abstract: AbstractEngine) -> set[tuple[int, ...]]:
    def shard(model: DeviceModel) -> tuple[int, ...]:
        pool: Any = model.pools.k
        return tuple(pool.sharding.shard_shape(pool.shape))

    return {shard(abstract.target)} | ({shard(abstract.drafter.model)} if abstract.drafter is not None else set())


def copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Return the instructions of a program's text that copy, convert or transpose an array of this shape.

    Their results may have the axes in another order, since a compiler may copy a pool into one.
    A small array that a TPU fetches into its VMEM, memory space 1, is not copied. Where a copy and the update of a
    slice are fused, the slice is copied.
    """
    found = []
    for name, result, opcode in re.findall(r"(%\S+) = (\(.*?\)|\S+) ([\w-]+)\(", hlo):
        copies = re.search(r"copy(?!\S*dynamic-update-slice)|convert|transpose", f"{name} {opcode}")
        if opcode in _WITHOUT_DATA or not copies:
            continue
        arrays = re.findall(r"\w+\[([\d,]+)\](\S*)", result)
        if sorted(shape) in (sorted(map(int, sizes.split(","))) for sizes, layout in arrays if "S(1)" not in layout):
            found.append(name)
    return found


def kernels_of_slices(hlo: str) -> int:
    """Return how many Mosaic kernels of a GPU program are given a slice of an array by its address, in its optimised
    HLO."""
    computations = re.findall(r"^%dynamic-slice-fusion[^\n]*\{$.*?^\}", hlo, re.MULTILINE | re.DOTALL)
    return sum('custom_call_target="mosaic_gpu' in each for each in computations)


def collectives_of(hlo: str) -> dict[str, int]:
    """Return the bytes of the results of each kind of exchange between devices in a program's text."""
    found: Counter[str] = Counter()
    for result, operation in re.findall(rf" = (\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", result):
            count = 1
            for size in filter(None, sizes.split(",")):
                count *= int(size)
            found[operation] += count * _SIZES.get(dtype, 4)
    return dict(found)
