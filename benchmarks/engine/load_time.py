"""Load time and peak memory of a checkpoint, from safetensors and as `adaserve convert` writes it.

Each load is a fresh process, the files being in the page cache from the conversion. Peak memory is the process's
largest resident set, less what it held before the load; "beside the weights" is that peak without the weights
themselves. Linux only: both are read from /proc.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, grow
from adaserve_jax.results.provenance import machine_name, source_commit
from benchmarks import program
from benchmarks.grown import shape_of

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@dataclass(frozen=True)
class Load:
    """One load. import_s: time to import what reads the format. weight_bytes: what stays; largest_bytes: of it, the
    largest weight; peak_bytes: growth of the resident set at its peak, weights included."""

    layout: str
    dtype: str
    import_s: float
    load_s: float
    weight_bytes: int
    largest_bytes: int
    peak_bytes: int

    @property
    def beside_bytes(self) -> int:
        return self.peak_bytes - self.weight_bytes


def measure_here(folder: Path, dtype: str, quantize: str = "none") -> Load:
    """Load in this process, which must not have loaded anything before."""
    import jax.numpy as jnp

    from adaserve_jax.models.config import ModelConfig
    from adaserve_jax.models.loading import is_converted, load_params
    from adaserve_jax.models.writing import TYPES

    converted = is_converted(folder)
    jnp.zeros(1).block_until_ready()
    started = time.perf_counter()
    if converted:
        import tensorstore  # noqa: F401  timed
    imported = time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status_bytes("VmRSS")
    params = load_params(folder, ModelConfig.from_folder(folder), TYPES[dtype], quantize=quantize)
    done = time.perf_counter()
    peak = _status_bytes("VmHWM")
    sizes = [value.nbytes for value in params.values()]
    layout = "converted" if converted else "safetensors"
    return Load(layout, dtype, imported - started, done - imported, sum(sizes), max(sizes), peak - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(folder: Path, dtype: str, quantize: str) -> Load:
    """A load in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.engine.load_time", "one", str(folder.resolve())]
    command += ["--dtype", dtype, "--quantize", quantize]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Load(**json.loads(run.splitlines()[-1]))


app = typer.Typer()


@app.command()
def one(folder: Path, dtype: str = "f32", quantize: str = "none") -> None:
    """Measure one load in this process and print it as JSON; used by `compare`."""
    print(json.dumps(asdict(measure_here(folder, dtype, quantize))))


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    params: Annotated[str, typer.Option(help=f"size that the demo target is grown to: {', '.join(SHAPES)}")] = "1B",
    source: Annotated[str, typer.Option(help="checkpoint folder to measure instead")] = "",
    stored: Annotated[str, typer.Option(help="type that the grown checkpoint is stored in")] = "bf16",
    dtype: Annotated[str, typer.Option(help="type to load as: f32 or bf16")] = "f32",
    quantize: Annotated[str, typer.Option(help="weights to load: none, int8 or int4")] = "none",
    repeats: Annotated[int, typer.Option(help="loads of each layout")] = 3,
) -> None:
    """Measure both layouts of one checkpoint."""
    shape = shape_of(params)
    with tempfile.TemporaryDirectory() as scratch:
        folder, converted = Path(source or Path(scratch) / "grown"), Path(scratch) / "converted"
        if not source:
            grow(resolve_folder("demo", "target"), folder, shape, dtype=stored)
        command = [sys.executable, "-m", "adaserve_jax.cli", "convert", str(folder), str(converted), "--dtype", dtype]
        subprocess.run(command, check=True)
        loads = [measure(path, dtype, quantize) for _ in range(repeats) for path in (folder, converted)]
    result = {
        "commit": source_commit(), "machine": machine_name(),
        "command": shlex.join(["python", "-m", "benchmarks.engine.load_time", *sys.argv[1:]]),
        "checkpoint": source or f"demo grown to {params}, {stored}", "quantize": quantize,
        "loads": [asdict(load) for load in loads],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    _show(result["checkpoint"], loads)


def _show(checkpoint: str, loads: list[Load]) -> None:
    table = Table(
        "layout", "load s", "import s", "weights MiB", "largest MiB", "beside the weights MiB", title=checkpoint
    )
    for layout in ("safetensors", "converted"):
        runs = [load for load in loads if load.layout == layout]
        times = (median(load.load_s for load in runs), median(load.import_s for load in runs))
        sizes = (runs[0].weight_bytes, runs[0].largest_bytes, max(load.beside_bytes for load in runs))
        table.add_row(layout, *(f"{value:.2f}" for value in times), *(f"{value / MIB:.0f}" for value in sizes))
    Console(width=120).print(table)


if __name__ == "__main__":
    program.run(app)
