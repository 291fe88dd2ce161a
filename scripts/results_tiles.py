"""Table of docs/architecture/device.md from a run of benchmarks/kernels/tile_sizes.py. Imports no jax."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import line, short_commit

ON_TPU = (
    "| device | KV heads | keys per step | instructions of a step | per key | registers spilled | VMEM, MiB "
    "| to copy the step's pages, us | copying is longer above, GHz |\n|---|---|---|---|---|---|---|---|---|"
)
ON_GPU = "| device | KV heads | slots in shared memory | registers | bytes spilled |\n|---|---|---|---|---|"
MIB = 1 << 20


def tile_tables(result: dict[str, Any]) -> str:
    """Return a table for TPUs and one for GPUs, a row for each size."""
    on_tpu, on_gpu = [], []
    for row in result["rows"]:
        shape = row["device"], str(row["kv_heads"])
        if "keys" in row:
            steps, copy_s = row["step_instructions"], row["copy_s"]
            on_tpu.append(line(
                *shape, str(row["keys"]), f"{steps:,}", f"{steps / row['keys']:.2f}", str(row["spills"]),
                f"{row['vmem_bytes'] / MIB:.1f}", f"{copy_s * 1e6:.2f}", f"{steps / copy_s / 1e9:.2f}",
            ))  # fmt: skip
        else:
            on_gpu.append(line(*shape, str(row["depth"]), str(row["registers"]), str(row["spilled_bytes"])))
    about = (
        "Compiled with `python -m benchmarks.kernels.tile_sizes --out tile-sizes.json`, not run. Copies are at the "
        f"data sheet's bandwidth. jax {result['jax_version']}, commit {short_commit(result['commit'])}."
    )
    tables = ["\n".join([head, *rows]) for head, rows in ((ON_TPU, on_tpu), (ON_GPU, on_gpu)) if rows]
    return "\n\n".join([*tables, about])
