"""What this device can do, and how near the engine's programs come to it. Works on CPU, GPU and TPU.

    python benchmarks/device.py --out device.json [--target CHECKPOINT --draft CHECKPOINT] [--policies ar,adaserve]

Measures the device's own ceilings (copy bandwidth, square matmul), compiles and times every step program, sets each
verify program beside the least time that its weights and operations need at those ceilings, and runs a short
open-loop bench. Takes every engine option of `adaserve bench`; --duration 0 leaves the bench out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.bench.console import result_table
from adaserve_jax.bench.runner import BenchPlan, run_bench
from adaserve_jax.bench.workload import load_workload
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import open_bench_engine, progress_bar
from adaserve_jax.config import FIELD_HELP, EngineConfig
from adaserve_jax.errors import AdaServeError
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.types import CostSamples

REPEATS = 5
BATCH_S = 0.05  # calls are timed in batches of about this long, so that dispatch does not count


@dataclass(frozen=True)
class Ceilings:
    """The device's own best. copy counts bytes read and written."""

    dtype: str
    copy_bytes: int
    copy_bytes_per_s: float
    matmul_size: int
    matmul_flops_per_s: float


@dataclass(frozen=True)
class StepTime:
    """One verify program. bound_s: the larger of weights / copy bandwidth and 2 x weights x tokens / matmul rate."""

    tokens: int
    rows: int
    seconds: float
    bound_s: float

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.seconds


@dataclass(frozen=True)
class ProgramTimes:
    """Every program of the engine, as its own warm-up timed it (host to host, typical context)."""

    target_params: int
    target_weight_bytes: int
    dtype: str
    load_s: float
    compile_and_time_s: float
    peak_memory_bytes: int | None
    verify: list[StepTime]
    catchup: list[dict[str, float]]
    draft_level: list[dict[str, float]]


def best_seconds(call: Callable[[], jax.Array]) -> float:
    """Least mean seconds of a call over REPEATS batches; the first call, which compiles, is left out.

    A device runs calls in order, so waiting for the last one waits for all.
    """
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, int(BATCH_S / max(1e-9, time.perf_counter() - started)))
    means = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        means.append((time.perf_counter() - started) / calls)
    return min(means)


def measure_ceilings(dtype: Any) -> Ceilings:
    """Copy bandwidth on an array far above any cache, and the rate of a large square matmul."""
    on_cpu = jax.default_backend() == "cpu"
    size = 2048 if on_cpu else 8192
    elements = (1 << 28) // jnp.dtype(dtype).itemsize
    copied = 2 * elements * jnp.dtype(dtype).itemsize
    copy_s = best_seconds(_repeated(lambda x: x + 1, jnp.ones(elements, dtype)))
    square = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    matmul = jax.jit(lambda a: a @ a)
    matmul_s = best_seconds(lambda: matmul(square))
    return Ceilings(jnp.dtype(dtype).name, copied, copied / copy_s, size, 2 * size**3 / matmul_s)


def _repeated(function: Callable[[jax.Array], jax.Array], start: jax.Array) -> Callable[[], jax.Array]:
    """A call that applies `function` to its own last result in place, so that no call pays for fresh memory."""
    compiled = jax.jit(function, donate_argnums=0)
    state = [start]

    def call() -> jax.Array:
        state[0] = compiled(state[0])
        return state[0]

    return call


def measure_programs(config: EngineConfig) -> tuple[Ceilings, ProgramTimes]:
    """Load, compile and time the engine's programs; frees them again."""
    started = time.perf_counter()
    executor = load_executor(config)
    loaded = time.perf_counter()
    try:
        with progress_bar() as progress:
            samples = executor.warm_up(progress)
        ready = time.perf_counter()
        weights = executor.target.params
        params = sum(x.size for name, x in weights.items() if not name.endswith(SCALE))
        weight_bytes = sum(x.nbytes for x in weights.values())
        dtype = executor.resolved.dtype
        memory = jax.local_devices()[0].memory_stats() or {}
    finally:
        executor.close()
    ceilings = measure_ceilings(dtype)
    programs = ProgramTimes(
        target_params=params,
        target_weight_bytes=weight_bytes,
        dtype=dtype.name,
        load_s=loaded - started,
        compile_and_time_s=ready - loaded,
        peak_memory_bytes=memory.get("peak_bytes_in_use"),
        verify=step_times(samples, ceilings, params, weight_bytes),
        catchup=[{"tokens": tokens, "seconds": s} for tokens, s in sorted(samples.catchup_s.items())],
        draft_level=[{"rows": r, "width": w, "seconds": s} for (r, w), s in sorted(samples.draft_level_s.items())],
    )
    return ceilings, programs


def step_times(samples: CostSamples, ceilings: Ceilings, params: int, weight_bytes: int) -> list[StepTime]:
    """Measured verify times beside their bounds, which leave out attention, and count the head at every token.

    A model that fits the caches of a CPU can beat its bound: the bandwidth is that of memory.
    """
    reading_s = weight_bytes / ceilings.copy_bytes_per_s
    return [
        StepTime(tokens, rows, s, max(reading_s, 2 * params * tokens / ceilings.matmul_flops_per_s))
        for (tokens, rows), s in sorted(samples.verify_s.items())
    ]


def measure_serving(config: EngineConfig, plan: BenchPlan) -> list[ResultRow]:
    """Rows of a short open-loop bench over the packaged workload."""
    with tempfile.TemporaryDirectory() as folder:
        return run_bench(
            plan, load_workload(), lambda policy: open_bench_engine(replace(config, policy=policy)), Path(folder)
        )


def show(ceilings: Ceilings, programs: ProgramTimes, rows: list[ResultRow]) -> None:
    console = Console(width=140)
    console.print(
        f"{machine_name()}; {_device()}; {ceilings.dtype}: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {ceilings.matmul_flops_per_s / 1e12:.3f} TFLOP/s; target {programs.target_params / 1e6:.1f}M, "
        f"ready in {programs.load_s + programs.compile_and_time_s:.1f} s",
        highlight=False,
    )
    table = Table("tokens", "rows", "ms", "least ms at the ceilings", "share of ceiling", title="verify programs")
    for step in programs.verify:
        cells = (f"{step.seconds * 1e3:.3f}", f"{step.bound_s * 1e3:.3f}", f"{step.of_bound:.0%}")
        table.add_row(str(step.tokens), str(step.rows), *cells)
    console.print(table)
    if rows:
        console.print(result_table(rows))


def _device() -> str:
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}"


@takes("config", EngineConfig, FIELD_HELP, without=("policy",))
def device(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    policies: Annotated[str, typer.Option(help="policies of the bench, separated by commas")] = "ar,adaserve",
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "2",
    duration: Annotated[float, typer.Option(help="seconds of arrivals per policy and rate; 0: no bench")] = 15.0,
) -> None:
    """Measure this device and the engine on it."""
    ceilings, programs = measure_programs(config)
    rows: list[ResultRow] = []
    if duration > 0:
        plan = BenchPlan(comma_list("policies", policies, str), comma_list("rates", rates, float), duration)
        rows = measure_serving(config, plan)
    result = {
        "commit": source_commit(),
        "machine": machine_name(),
        "device": _device(),
        "jax_version": jax.__version__,
        "config": asdict(config),
        "ceilings": asdict(ceilings),
        "programs": asdict(programs),
        "bench": [asdict(row) for row in rows],
    }
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    show(ceilings, programs, rows)


if __name__ == "__main__":
    try:
        typer.run(device)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
