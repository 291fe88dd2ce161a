"""What this device can do, and how near the kernels and the engine's programs come to it. For CPU, GPU and TPU.

    python -m benchmarks.device --out device.json [--kernels full] [--grow 1B] [--policies ar,adaserve]

Measures the device's own ceilings (copy bandwidth, square matmul). Runs every kernel, compiled, against the float64
oracle of the tests, and times it beside what its bytes and operations cost at those ceilings; on a large device
also the large shapes. Compiles and times every step program, sets each verify program beside the least time that its
weights and operations need, and says where a step's time goes. Exchanges the draft for KV pages and back. Runs a short
open-loop bench. Takes every engine option of `adaserve bench`; --grow makes the target a grown one, in this device's
type; --duration 0 leaves the bench out, --swaps 0 the exchanges, --kernels none the kernels, and --no-programs
everything that needs a model.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.bench.console import result_table
from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import open_bench_engine, progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, grow
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.types import CostSamples
from adaserve_jax.workloads.workload import load_workload
from benchmarks.kernels.ceilings import Ceilings, measure_ceilings
from benchmarks.kernels.step_parts import StepParts, measure_parts
from benchmarks.nightjar.elastic import as_result, config_of, run_swaps, show_swaps

CONSOLE = Console(width=140)
PARTS = ("products", "attention", "head", "sampling", "host", "rest")


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
    parts: list[StepParts]
    catchup: list[dict[str, float]]
    draft_level: list[dict[str, float]]


def measure_programs(config: EngineConfig, ceilings: Ceilings) -> ProgramTimes:
    """Load, compile and time the engine's programs; frees them again."""
    started = time.perf_counter()
    executor = load_executor(config)
    loaded = time.perf_counter()
    try:
        with progress_bar() as progress:
            samples = executor.warm_up(progress)
        ready = time.perf_counter()
        parts = measure_parts(executor)
        weights = executor.target.params
        params = sum(x.size for name, x in weights.items() if not name.endswith(SCALE))
        weight_bytes = sum(x.nbytes for x in weights.values())
        dtype = executor.resolved.dtype
        memory = jax.local_devices()[0].memory_stats() or {}
    finally:
        executor.close()
    return ProgramTimes(
        target_params=params,
        target_weight_bytes=weight_bytes,
        dtype=dtype.name,
        load_s=loaded - started,
        compile_and_time_s=ready - loaded,
        peak_memory_bytes=memory.get("peak_bytes_in_use"),
        verify=step_times(samples, ceilings, params, weight_bytes),
        parts=parts,
        catchup=[{"tokens": tokens, "seconds": s} for tokens, s in sorted(samples.catchup_s.items())],
        draft_level=[{"rows": r, "width": w, "seconds": s} for (r, w), s in sorted(samples.draft_level_s.items())],
    )


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


def show_ceilings(ceilings: Ceilings) -> None:
    CONSOLE.print(
        f"{machine_name()}; {_device()}; {ceilings.dtype}: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {ceilings.matmul_flops_per_s / 1e12:.3f} TFLOP/s",
        highlight=False,
    )


def show_kernels(kernels: dict[str, list[Any]]) -> None:
    wrong = [each for each in kernels["conformance"] if not each.ok]
    CONSOLE.print(f"kernels: {len(kernels['conformance'])} shapes checked, {len(wrong)} wrong", highlight=False)
    for each in wrong:
        CONSOLE.print(f"{each.kernel} {each.implementation} {each.spec}: {each.detail or each.error}", markup=False)
    table = Table("kernel", "shape", "implementation", "us", "us at the ceilings", "times that", title="kernels")
    for each in kernels["times"]:
        table.add_row(
            each.kernel, each.spec, each.implementation, f"{each.seconds * 1e6:.1f}", f"{each.floor_s * 1e6:.1f}",
            f"{each.of_floor:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)
    table = Table("vocabulary", "argmax us", "top_k us", title="largest of 64 rows of scores")
    for each in kernels["picks"]:
        table.add_row(str(each.vocabulary), f"{each.argmax_s * 1e6:.1f}", f"{each.top_k_s * 1e6:.1f}")
    CONSOLE.print(table)


def show_programs(programs: ProgramTimes) -> None:
    CONSOLE.print(
        f"target {programs.target_params / 1e6:.1f}M, ready in {programs.load_s + programs.compile_and_time_s:.1f} s",
        highlight=False,
    )
    least = min(programs.verify, key=lambda step: (step.tokens, step.rows))
    table = Table(
        "tokens", "rows", "ms", "times one token", "least ms at the ceilings", "share of ceiling",
        title="verify programs",
    )  # fmt: skip
    for step in programs.verify:
        cells = (f"{step.seconds / least.seconds:.2f}", f"{step.bound_s * 1e3:.3f}", f"{step.of_bound:.0%}")
        table.add_row(str(step.tokens), str(step.rows), f"{step.seconds * 1e3:.3f}", *cells)
    CONSOLE.print(table)
    table = Table(
        "rows", "tokens", "context", "step ms", *PARTS, "attention of step", "step over products",
        title="parts of a step, ms",
    )  # fmt: skip
    for each in programs.parts:
        table.add_row(
            str(each.rows), str(each.tokens), str(each.context), f"{each.step_s * 1e3:.2f}",
            *(f"{getattr(each, f'{part}_s') * 1e3:.2f}" for part in PARTS),
            f"{each.attention_s / each.step_s:.0%}", f"{each.step_s / each.products_s:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)


def _device() -> str:
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}"


def measure_kernels(ceilings: Ceilings, full: bool) -> dict[str, list[Any]]:
    from benchmarks.kernels import kernels as device_kernels

    return {
        "conformance": device_kernels.conformance(full),
        "times": device_kernels.time_kernels(ceilings, full=full),
        "picks": device_kernels.time_picks(),
    }


@takes("config", EngineConfig, without=("policy",))
def device(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    kernels: Annotated[
        str, typer.Option(help="none, tiny or full: shapes; auto: tiny on a CPU, full elsewhere")
    ] = "auto",
    programs: Annotated[bool, typer.Option(help="compile and time the engine's programs, and run the bench")] = True,
    grown: Annotated[
        str, typer.Option("--grow", help=f"size that the demo target is grown to: {', '.join(SHAPES)}; none: --target")
    ] = "",
    policies: Annotated[str, typer.Option(help="policies of the bench, separated by commas")] = "ar,adaserve",
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "2",
    swaps: Annotated[int, typer.Option(help="exchanges of the draft and KV pages to time; 0: none")] = 7,
    duration: Annotated[float, typer.Option(help="seconds of arrivals per policy and rate; 0: no bench")] = 15.0,
) -> None:
    """Measure this device and the engine on it."""
    on_cpu = jax.default_backend() == "cpu"
    if kernels not in ("auto", "none", "tiny", "full"):
        raise ConfigError(f"--kernels must be auto, none, tiny or full, got {kernels!r}")
    if grown and grown not in SHAPES:
        raise ConfigError(f"--grow must be one of {', '.join(SHAPES)}, got {grown!r}")
    shapes = ("tiny" if on_cpu else "full") if kernels == "auto" else kernels
    dtype = ("f32" if on_cpu else "bf16") if config.dtype == "auto" else config.dtype
    ceilings = measure_ceilings(jnp.float32 if dtype == "f32" else jnp.bfloat16)
    show_ceilings(ceilings)
    result: dict[str, Any] = {
        "command": shlex.join(
            ["python", "benchmarks/device.py", *(w.replace(str(out), out.name) for w in sys.argv[1:])]
        ),
        "commit": source_commit(),
        "machine": machine_name(),
        "device": _device(),
        "jax_version": jax.__version__,
        "ceilings": asdict(ceilings),
    }

    def keep(**parts: Any) -> None:
        """Write what there is, so that a later part that fails loses nothing."""
        result.update(parts)
        out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")

    keep()
    if shapes != "none":
        measured = measure_kernels(ceilings, full=shapes == "full")
        show_kernels(measured)
        keep(kernels={name: [asdict(each) for each in found] for name, found in measured.items()})
    if not programs:
        return
    with ExitStack() as stack:
        if grown:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / grown
            grow(resolve_folder("demo", "target"), folder, SHAPES[grown], dtype=dtype)
            config = replace(config, target=str(folder))
        times = measure_programs(config, ceilings)
        show_programs(times)
        keep(config={**asdict(config), "target": grown or config.target}, programs=asdict(times))
        if swaps > 0 and config.draft is not None and config.tp == 1:
            timed, _ = run_swaps(config_of(config.target, config.draft, dtype), swaps)
            show_swaps(timed, CONSOLE)
            keep(swaps=as_result(timed))
        if duration > 0:
            plan = BenchPlan(comma_list("policies", policies, str), comma_list("rates", rates, float), duration)
            rows = measure_serving(config, plan)
            CONSOLE.print(result_table(rows))
            keep(bench=[asdict(row) for row in rows])


if __name__ == "__main__":
    try:
        typer.run(device)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
