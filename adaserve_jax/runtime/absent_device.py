"""Accelerators that are not in this machine: what their vendors publish of them, and handles to compile for.

A handle is a jax device without a driver behind it. libtpu compiles for TPUs, and jax's CUDA plugin with ptxas for
GPUs; both run on any Linux machine (extras `tpu-aot` and `cuda-aot`).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from jax.experimental import topologies

from adaserve_jax.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class GpuChip:
    """What XLA's compiler reads of a GPU. capability: major and minor compute capability. shared_bytes: shared memory
    of a multiprocessor, and of one block at most. clock_ghz: boost clock."""

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_bytes: tuple[int, int]
    l2_bytes: int
    clock_ghz: float


@dataclass(frozen=True)
class AbsentDevice:
    """One device as jax would show it, by its data sheet.

    memory_bytes: all of it; memory_share: what jax may take. bytes_per_s: of its memory. flops_per_s: of dense bf16
    products. link_bytes_per_s: to the other devices of its host or slice, in one direction. chip: of a GPU. topologies:
    of a TPU, libtpu's names by number of devices.
    """

    name: str
    title: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    chip: GpuChip | None = None
    topologies: tuple[tuple[int, str], ...] = ()

    @property
    def platform(self) -> Literal["gpu", "tpu"]:
        return "tpu" if self.chip is None else "gpu"

    @property
    def memory_share(self) -> float:
        """Share of the memory that jax gives to programs: its default on a GPU; on a TPU all but what libtpu keeps."""
        return 0.75 if self.platform == "gpu" else 0.97

    @property
    def limit_bytes(self) -> int:
        """Bytes that an engine may use."""
        return int(self.memory_share * self.memory_bytes)

    def devices(self, count: int) -> tuple[Any, ...]:
        """Return handles of `count` devices that are connected to each other.

        Raises ConfigError: the compiler is not installed, or the device does not come in this number.
        """
        if self.platform == "gpu":
            return _gpus(self, count)
        return _tpus(self, count)


def _hopper(memory_bytes: int, title: str, bytes_per_s: float, name: str) -> AbsentDevice:
    chip = GpuChip((9, 0), 132, 128, 2048, (233472, 232448), 50 << 20, 1.98)
    return AbsentDevice(name, title, memory_bytes, bytes_per_s, 989e12, 450e9, chip)


DEVICES = {
    device.name: device
    for device in (
        _hopper(80 * GIB, "NVIDIA H100 SXM 80 GB", 3.35e12, "h100"),
        _hopper(141 * 10**9, "NVIDIA H200 SXM 141 GB", 4.8e12, "h200"),
        AbsentDevice(
            "a100", "NVIDIA A100 SXM 80 GB", 80 * GIB, 2.039e12, 312e12, 300e9,
            GpuChip((8, 0), 108, 64, 2048, (167936, 166912), 40 << 20, 1.41),
        ),
        AbsentDevice(
            "l40s", "NVIDIA L40S 48 GB", 48 * GIB, 0.864e12, 362e12, 32e9,
            GpuChip((8, 9), 142, 128, 1536, (102400, 101376), 96 << 20, 2.52),
        ),
        AbsentDevice(
            "v5e", "TPU v5e", 16 * GIB, 0.819e12, 197e12, 200e9,
            topologies=((4, "v5e:2x2"), (8, "v5e:2x4"), (16, "v5e:4x4")),
        ),
        AbsentDevice(
            "v5p", "TPU v5p", 95 * GIB, 2.765e12, 459e12, 600e9,
            topologies=((4, "v5p:2x2x1"), (8, "v5p:2x2x2"), (16, "v5p:2x2x4")),
        ),
        AbsentDevice(
            "v6e", "TPU v6e", 32 * GIB, 1.64e12, 918e12, 448e9,
            topologies=((4, "v6e:2x2"), (8, "v6e:2x4"), (16, "v6e:4x4")),
        ),
        AbsentDevice(  # jax shows the two cores of a chip as two devices: half a chip's figures
            "tpu7x", "TPU 7x, one of a chip's two cores", 96 * GIB, 3.69e12, 1153e12, 300e9,
            topologies=((8, "tpu7x:2x2x1"), (16, "tpu7x:2x2x2")),
        ),
    )
}  # fmt: skip
"""Devices by name, with figures of the vendors' data sheets."""


def device_named(name: str) -> AbsentDevice:
    """Return a device by name. Raises ConfigError: there is none of that name."""
    if name not in DEVICES:
        raise ConfigError(f"no device {name!r} is known to compile for: give one of {', '.join(DEVICES)}")
    return DEVICES[name]


def missing_compiler(platform: Literal["gpu", "tpu"]) -> str | None:
    """Return the extra that brings the platform's compiler, if it is not installed."""
    if platform == "tpu":
        return None if importlib.util.find_spec("libtpu") else "tpu-aot"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return None if any(importlib.util.find_spec(plugin) for plugin in plugins) else "cuda-aot"


def _check_compiler(device: AbsentDevice) -> None:
    extra = missing_compiler(device.platform)
    if extra is not None:
        raise ConfigError(
            f"the compiler for {device.title} is not installed; install it with pip install 'adaserve-jax[{extra}]'"
        )


@cache
def _tpus(device: AbsentDevice, count: int) -> tuple[Any, ...]:
    _check_compiler(device)
    name = next((name for size, name in device.topologies if size >= count), None)
    if name is None:
        raise ConfigError(f"tp must be at most {device.topologies[-1][0]} on {device.name}, got {count}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    return tuple(topologies.get_topology_desc(name, platform="tpu").devices[:count])


@cache
def _gpus(device: AbsentDevice, count: int) -> tuple[Any, ...]:
    _check_compiler(device)
    if count > 8:
        raise ConfigError(f"tp must be at most 8 on {device.name}, the GPUs of one host, got {count}")
    topology = topologies.get_topology_desc(
        device.name, platform="cuda", target_config=_target_config(device), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)


def _target_config(device: AbsentDevice) -> str:
    """Return the text form of XLA's GpuTargetConfigProto."""
    chip = device.chip
    assert chip is not None
    major, minor = chip.capability
    shared, shared_per_block = chip.shared_bytes
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_per_block}
  threads_per_core_limit: {chip.threads_per_core}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(device.bytes_per_s)}
  device_memory_size: {device.memory_bytes}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_ghz}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{device.title}"
"""
