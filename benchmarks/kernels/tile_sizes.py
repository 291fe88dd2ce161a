"""Compiles the attention kernels with other tile sizes, for devices that are not here, and reads the figures.

`python -m benchmarks.kernels.tile_sizes --out tile-sizes.json` compiles one layer's attention of a step of 1024 tokens
in 128 rows. On TPUs it varies KEYS_PER_STEP, and reads the schedule that libtpu writes: the instructions of one step
over context keys, how many vector registers all of the kernel spills, and the VMEM. On Hopper GPUs it varies DEPTH, and
reads registers and spills. The page docs/architecture/device.md shows it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from adaserve_jax.pallas_kernels.compat import compiling_for
from adaserve_jax.pallas_kernels.paged_tree_attention import api, mosaic_gpu, mosaic_tpu
from adaserve_jax.pallas_kernels.paged_tree_attention.packed import PackedTokens, query_blocks
from adaserve_jax.results.provenance import source_commit
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.runtime.absent_device import DEVICES, missing_compiler
from adaserve_jax.runtime.absent_engine import compile_with_figures
from adaserve_jax.runtime.compile import Bucket
from adaserve_jax.tree.verify import ancestor_bits

BUCKET = Bucket(tokens=1024, rows=128, sampled=128)
HEAD_DIM, PAGE_SIZE, PAGES, TABLE_PAGES = 128, 64, 815, 128
TPU_SHAPES = (("v5e", 2, 4), ("v5p", 8, 4), ("v6e", 8, 4), ("v6e", 1, 8), ("tpu7x", 8, 4))
"""Device, KV heads and query heads of each, of one device's part of llama-8b or llama-70b."""
KEYS = (256, 512, 1024)
PAGE_BUFFER_BYTES = 16 << 20
"""Room for pages that cuts none of KEYS."""
LONG_RUN = 100
"""Instructions of a run that computes; those that start copies and clear pages are shorter."""
GPU_SHAPES = (("h100", 8, 4),)
DEPTHS = (2, 3, 4, 5)


def lower_attention(device: str, kv_heads: int, group: int, implementation: Any) -> Any:
    """Lower the attention of one layer."""
    chip = DEVICES[device].devices(1)[0]
    here = jax.sharding.SingleDeviceSharding(chip)

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=here)

    def run(q, k, v, k_pool, v_pool, table, ctx_len, count, row, position, parent):
        blocks = query_blocks(count, row, num_blocks=BUCKET.num_blocks, block_size=BUCKET.block_size)
        tokens = PackedTokens(table, ctx_len, count, row, position, ancestor_bits(parent), blocks, None)
        return api.paged_tree_attention(q, k, v, k_pool, v_pool, 0, tokens, None, implementation=implementation)

    rows, tokens = BUCKET.rows, BUCKET.tokens
    new = shape(kv_heads, HEAD_DIM, tokens)
    pool = shape(1, PAGES, kv_heads, PAGE_SIZE, HEAD_DIM)
    sizes = ((rows, TABLE_PAGES), (rows,), (rows,), (tokens,), (tokens,), (tokens,))
    where = [shape(*each, dtype=jnp.int32) for each in sizes]
    with compiling_for(DEVICES[device].platform):
        return jax.jit(run).lower(shape(kv_heads * group, HEAD_DIM, tokens), new, new, pool, pool, *where)


def read_schedule(folder: Path) -> dict[str, int]:
    """Return the instructions of a context step and the spilled registers, from what libtpu writes of the kernel.

    A context step is the longest run of instructions in the second level of loops before its last long run, which is
    the step over in-flight keys. The loops inside of it, which start copies, are not in it. One instruction takes a
    cycle or more.
    """
    (bundles,) = folder.glob("*paged_tree_attention*[0-9]-final_bundles.txt")
    (used,) = folder.glob("*paged_tree_attention*final_hlo-static-per-bundle-utilization.txt")
    depths = [len(each) for each in re.findall(r"^\s*0x[0-9a-f]+\s+(?:\w\w)?\s*: (>*)", bundles.read_text(), re.M)]
    *before, _ = [size for depth, run in groupby(depths) if depth == 2 and (size := len(list(run))) >= LONG_RUN]
    header, *lines = re.search(r"^(MXU, .*)\n([\s\S]*)", used.read_text(), re.M)[0].splitlines()  # type: ignore[index]
    columns = [list(map(int, line.split())) for line in lines if re.fullmatch(r"[\d ]+", line)][1:]
    spills = header.split(", ").index("VSTORE:SPILL")
    return {"step_instructions": max(before), "spills": sum(row[spills] for row in columns)}


def tpu_rows(dumps: Path) -> Iterator[dict[str, Any]]:
    for device, kv_heads, group in TPU_SHAPES:
        for keys in KEYS:
            mosaic_tpu.KEYS_PER_STEP, mosaic_tpu.PAGE_BUFFER_BYTES = keys, PAGE_BUFFER_BYTES
            lowered = lower_attention(device, kv_heads, group, "mosaic_tpu")
            _, figures = compile_with_figures(lowered, DEVICES[device].devices(1)[0])
            copied = 2 * 2 * keys * kv_heads * HEAD_DIM
            yield {"device": device, "kv_heads": kv_heads, "keys": keys, **figures, **read_schedule(dumps),
                   "copy_s": copied / DEVICES[device].bytes_per_s}  # fmt: skip
            for file in dumps.iterdir():
                file.unlink()


def gpu_rows() -> Iterator[dict[str, Any]]:
    for device, kv_heads, group in GPU_SHAPES:
        for depth in DEPTHS:
            mosaic_gpu.DEPTH[HEAD_DIM] = depth
            lowered = lower_attention(device, kv_heads, group, "mosaic_gpu")
            _, figures = compile_with_figures(lowered, DEVICES[device].devices(1)[0])
            yield {"device": device, "kv_heads": kv_heads, "depth": depth, **figures}


def main(out: Annotated[Path, typer.Option(help="JSON file to write")]) -> None:
    """Compile every size for every device whose compiler is installed."""
    found = {"commit": source_commit(), "jax_version": jax.__version__, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        parts = [] if missing_compiler("gpu") else [gpu_rows()]
        parts += [] if missing_compiler("tpu") else [tpu_rows(Path(folder))]
        for row in chain(*parts):
            found["rows"].append(row)
            print(row, flush=True)
            write_whole(out, json.dumps(found, indent=1) + "\n", mode=SHARED)


if __name__ == "__main__":
    typer.run(main)
