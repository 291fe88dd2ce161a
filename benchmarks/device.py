"""What this device can do, and how near the kernels and the engine's programs come to it. For CPU, GPU and TPU.

    python -m benchmarks.device --out device.json [--grow 8B] [--minutes 10] [--kernels full] [--policies ar,adaserve]

Measures part after part, the most important first, and writes the file after each:

1. ceilings: the device's own copy bandwidth and square matmul;
2. conformance: every kernel, compiled, against the float64 oracle of the tests; on a large device also large shapes;
3. programs: compiles and times every step program, sets each verify program beside the time that all its weights and
   operations take at the ceilings, and beside the time computed from the device's data sheet;
4. bench: a short open-loop bench;
5. times of the kernels beside what their bytes and operations cost at the ceilings, and two ways to pick a token;
6. parts: where the time of a step goes;
7. swaps: exchanges of the draft for KV pages and back.

No part is begun after --minutes. A part that fails is recorded with its error, and the others go on. Parts that the
file holds already, of the same commit, device and settings, are not measured again: the same command continues. Takes
every engine option of `adaserve bench`; --grow makes the target a grown one, in this device's type; --duration 0 leaves
the bench out, --swaps 0 the exchanges, --kernels none the kernels, and --no-programs everything that needs a model.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.bench.console import result_table
from adaserve_jax.bench.plan import BenchPlan
from adaserve_jax.bench.roofline import Assumptions, roofline_of
from adaserve_jax.bench.runner import run_bench
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import open_bench_engine, progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, grow
from adaserve_jax.models.quantize import SCALE
from adaserve_jax.results.provenance import machine_name, source_commit
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.results.whole_file import SHARED, write_whole
from adaserve_jax.runtime.absent_device import DEVICES, AbsentDevice
from adaserve_jax.runtime.absent_engine import DevicePlan
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.loading import find_pair
from adaserve_jax.runtime.warmup import measure
from adaserve_jax.types import CostSamples
from adaserve_jax.workloads.workload import load_workload
from benchmarks import program
from benchmarks.kernels.ceilings import Ceilings, measure_ceilings
from benchmarks.kernels.step_parts import StepParts, measure_parts
from benchmarks.nightjar.elastic import as_result, config_of, run_swaps, show_swaps

CONSOLE = Console(width=140)
DATA_SHEETS = {
    "h100 80gb hbm3": "h100", "h200": "h200", "a100-sxm4-80gb": "a100", "l40s": "l40s", "v5 lite": "v5e", "v5e": "v5e",
    "v5": "v5p", "v6 lite": "v6e", "v6e": "v6e", "7x": "tpu7x",
}  # fmt: skip
"""Names of `DEVICES` by a part of what jax calls the device; the first that fits counts."""
PARTS = ("products", "attention", "head", "sampling", "host", "rest")


@dataclass(frozen=True)
class StepTime:
    """One verify program. bound_s: the larger of weights / copy bandwidth and 2 x weights x tokens / matmul rate. It is
    of all weights, and so no lower bound where the embedding is not the head too: a step reads a few of its rows.
    computed_s: by the roofline of the device's data sheet; None for a device without one."""

    tokens: int
    rows: int
    seconds: float
    bound_s: float
    computed_s: float | None = None

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.seconds


@dataclass(frozen=True)
class ProgramTimes:
    """Every program of the engine, as its own warm-up times it (host to host). compile_s: to compile, or to take from
    the cache; time_s: to time. context: committed tokens in every row."""

    target_params: int
    target_weight_bytes: int
    dtype: str
    load_s: float
    compile_s: float
    time_s: float
    peak_memory_bytes: int | None
    verify: list[StepTime]
    catchup: list[dict[str, float]]
    draft_level: list[dict[str, float]]
    context: int


def measure_programs(config: EngineConfig, ceilings: Ceilings) -> ProgramTimes:
    """Load, compile and time the engine's programs; frees them again."""
    started = time.perf_counter()
    executor = load_executor(config)
    loaded = time.perf_counter()
    try:
        with progress_bar() as progress:
            executor.compile(progress)
            compiled = time.perf_counter()
            samples = measure(executor, progress=progress).samples()
        timed = time.perf_counter()
        weights = executor.target.params
        params = sum(x.size for name, x in weights.items() if not name.endswith(SCALE))
        weight_bytes = sum(x.nbytes for x in weights.values())
        dtype = executor.resolved.dtype
        computed = computed_step(executor, config, samples.context)
        memory = jax.local_devices()[0].memory_stats() or {}
    finally:
        executor.close()
    return ProgramTimes(
        target_params=params,
        target_weight_bytes=weight_bytes,
        dtype=dtype.name,
        load_s=loaded - started,
        compile_s=compiled - loaded,
        time_s=timed - compiled,
        peak_memory_bytes=memory.get("peak_bytes_in_use"),
        verify=step_times(samples, ceilings, params, weight_bytes, computed),
        catchup=[{"tokens": tokens, "seconds": s} for tokens, s in sorted(samples.catchup_s.items())],
        draft_level=[{"rows": r, "width": w, "seconds": s} for (r, w), s in sorted(samples.draft_level_s.items())],
        context=samples.context,
    )


def measure_step_parts(config: EngineConfig) -> list[StepParts]:
    """Where the time of a step goes, of an engine that is loaded and compiled for it and then freed."""
    executor = load_executor(config)
    try:
        executor.compile()
        return measure_parts(executor)
    finally:
        executor.close()


def data_sheet(kind: str) -> AbsentDevice | None:
    """Return the data sheet of a device by jax's name for it; None if there is none."""
    return next((DEVICES[name] for part, name in DATA_SHEETS.items() if part in kind.lower()), None)


def computed_step(executor: ModelExecutor, config: EngineConfig, context: int) -> Callable[[int, int], float] | None:
    """Return the seconds of a verify program, by tokens and rows, as `adaserve profile --device` computes them."""
    sheet = data_sheet(jax.local_devices()[0].device_kind)
    if sheet is None:
        return None
    engine = DevicePlan(sheet, find_pair(config), executor.resolved, 0)
    roofline = roofline_of(engine, engine.pair.target, ways=config.tp, assumed=Assumptions())
    buckets = executor.resolved.verify_buckets

    def seconds(tokens: int, rows: int) -> float:
        sampled = buckets.pick(tokens, rows).sampled
        return roofline.forward_s(tokens, min(rows, tokens), context, scored=sampled)

    return seconds


def step_times(
    samples: CostSamples, ceilings: Ceilings, params: int, weight_bytes: int,
    computed: Callable[[int, int], float] | None = None,
) -> list[StepTime]:  # fmt: skip
    """Measured verify times beside their bounds, which leave out attention, and count the head at every token.

    A model that fits the caches of a CPU can beat its bound: the bandwidth is that of memory.
    """
    reading_s = weight_bytes / ceilings.copy_bytes_per_s
    return [
        StepTime(
            tokens, rows, s, max(reading_s, 2 * params * tokens / ceilings.matmul_flops_per_s),
            None if computed is None else computed(tokens, rows),
        )
        for (tokens, rows), s in sorted(samples.verify_s.items())
    ]  # fmt: skip


def measure_serving(config: EngineConfig, plan: BenchPlan, target: str) -> list[ResultRow]:
    """Return the rows of a short open-loop bench over the packaged workload. target: its name in the rows."""
    config = replace(config, policy=plan.policies[0])
    with tempfile.TemporaryDirectory() as folder, closing(open_bench_engine(config)) as engine:
        rows = run_bench(plan, load_workload(), lambda: engine, Path(folder))
    return [replace(row, target=target) for row in rows]


def show_ceilings(ceilings: Ceilings) -> None:
    CONSOLE.print(
        f"{machine_name()}; {_device()}; {ceilings.dtype}: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {ceilings.matmul_flops_per_s / 1e12:.3f} TFLOP/s",
        highlight=False,
    )


def show_conformance(checked: list[Any]) -> None:
    wrong = [each for each in checked if not each.ok]
    CONSOLE.print(f"kernels: {len(checked)} shapes checked, {len(wrong)} wrong", highlight=False)
    for each in wrong:
        CONSOLE.print(f"{each.kernel} {each.implementation} {each.spec}: {each.detail or each.error}", markup=False)


def show_times(times: list[Any]) -> None:
    table = Table("kernel", "shape", "implementation", "us", "us at the ceilings", "times that", title="kernels")
    for each in times:
        table.add_row(
            each.kernel, each.spec, each.implementation, f"{each.seconds * 1e6:.1f}", f"{each.floor_s * 1e6:.1f}",
            f"{each.of_floor:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)


def show_picks(picks: list[Any]) -> None:
    table = Table("vocabulary", "argmax us", "top_k us", title="largest of 64 rows of scores")
    for each in picks:
        table.add_row(str(each.vocabulary), f"{each.argmax_s * 1e6:.1f}", f"{each.top_k_s * 1e6:.1f}")
    CONSOLE.print(table)


def show_programs(programs: ProgramTimes) -> None:
    CONSOLE.print(
        f"target {programs.target_params / 1e6:.1f}M: loaded in {programs.load_s:.1f} s, compiled in "
        f"{programs.compile_s:.1f} s, timed in {programs.time_s:.1f} s",
        highlight=False,
    )
    least = min(programs.verify, key=lambda step: (step.tokens, step.rows))
    table = Table(
        "tokens", "rows", "ms", "times one token", "ms at the ceilings", "share of ceiling",
        "ms computed from the data sheet", title="verify programs",
    )  # fmt: skip
    for step in programs.verify:
        computed = "" if step.computed_s is None else f"{step.computed_s * 1e3:.3f}"
        cells = (f"{step.seconds / least.seconds:.2f}", f"{step.bound_s * 1e3:.3f}", f"{step.of_bound:.0%}", computed)
        table.add_row(str(step.tokens), str(step.rows), f"{step.seconds * 1e3:.3f}", *cells)
    CONSOLE.print(table)


def show_parts(parts: list[StepParts]) -> None:
    table = Table(
        "rows", "tokens", "context", "step ms", *PARTS, "attention of step", "step over products",
        title="parts of a step, ms",
    )  # fmt: skip
    for each in parts:
        table.add_row(
            str(each.rows), str(each.tokens), str(each.context), f"{each.step_s * 1e3:.2f}",
            *(f"{getattr(each, f'{part}_s') * 1e3:.2f}" for part in PARTS),
            f"{each.attention_s / each.step_s:.0%}", f"{each.step_s / each.products_s:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)


def _device() -> str:
    device = jax.local_devices()[0]
    return f"{device.platform}: {device.device_kind}"


@dataclass
class Measurement:
    """Parts of a file of results, measured one after another.

    about: commit, device and so on; an old file that differs in them counts as none. command: of the run. deadline_s:
    on the clock of `time.monotonic`; no part is begun after it. result: what is written.
    """

    out: Path
    about: dict[str, Any]
    command: str
    deadline_s: float
    result: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        old = json.loads(self.out.read_text()) if self.out.exists() else {}
        same = all(old.get(name) == value for name, value in self.about.items())
        self.result = {**(old if same else {}), "command": self.command, **self.about, "errors": {}, "not_begun": []}
        self.result.setdefault("settings", {})

    def part(
        self, name: str, settings: dict[str, Any], measure: Callable[[], Any], show: Callable[[Any], None],
        plain: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        """Measure a part and write it, unless the file holds it with these settings, or the time is over.

        name: its place in the file, with dots between keys. plain: makes what JSON can hold of what `measure` returns.
        """
        settings = json.loads(json.dumps(settings, default=str))
        if self.result["settings"].get(name) == settings:
            return CONSOLE.print(f"{name}: measured before", highlight=False)
        *above, last = name.split(".")
        place = self.result
        for key in above:
            place = place.setdefault(key, {})
        place.pop(last, None)  # what was measured with other settings is no result of this command
        self.result["settings"].pop(name, None)
        if time.monotonic() >= self.deadline_s:
            self.result["not_begun"].append(name)
            CONSOLE.print(f"{name}: not begun, the time is over; the same command continues", highlight=False)
            return self._write()
        try:
            measured = measure()
        except Exception as error:  # whatever fails on a device is a finding, and the other parts are worth their time
            self.result["errors"][name] = f"{type(error).__name__}: {error}"[:1000]
            CONSOLE.print(f"{name}: {self.result['errors'][name]}", style="red", markup=False)
            return self._write()
        place[last] = plain(measured)
        self.result["settings"][name] = settings
        self._write()
        show(measured)

    def _write(self) -> None:
        write_whole(self.out, json.dumps(self.result, indent=1, allow_nan=False) + "\n", mode=SHARED)


def as_rows(measured: list[Any]) -> list[dict[str, Any]]:
    return [asdict(each) for each in measured]


@takes("config", EngineConfig, without=("policy",))
def device(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write; parts that it holds are not measured again")],
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
    minutes: Annotated[float, typer.Option(min=0, help="time after which no part is begun; 0: no limit")] = 10.0,
) -> None:
    """Measure this device and the engine on it."""
    deadline_s = time.monotonic() + 60 * minutes if minutes else float("inf")
    on_cpu = jax.default_backend() == "cpu"
    if kernels not in ("auto", "none", "tiny", "full"):
        raise ConfigError(f"--kernels must be auto, none, tiny or full, got {kernels!r}")
    if grown and grown not in SHAPES:
        raise ConfigError(f"--grow must be one of {', '.join(SHAPES)}, got {grown!r}")
    shapes = ("tiny" if on_cpu else "full") if kernels == "auto" else kernels
    dtype = ("f32" if on_cpu else "bf16") if config.dtype == "auto" else config.dtype
    words = (word.replace(str(out), out.name) for word in sys.argv[1:])
    about = {
        "commit": source_commit(),
        "machine": machine_name(),
        "device": _device(),
        "jax_version": jax.__version__,
    }
    found = Measurement(out, about, shlex.join(["python", "benchmarks/device.py", *words]), deadline_s)

    def ceilings() -> Ceilings:
        if "ceilings" not in found.result:
            raise ConfigError("needs the part ceilings, which was not measured")
        return Ceilings(**found.result["ceilings"])

    array_type = jnp.float32 if dtype == "f32" else jnp.bfloat16
    found.part("ceilings", {"dtype": dtype}, lambda: measure_ceilings(array_type), show_ceilings, asdict)
    with ExitStack() as stack:

        @cache
        def model() -> EngineConfig:
            if not grown:
                return config
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / grown
            grow(resolve_folder("demo", "target"), folder, SHAPES[grown], dtype=dtype)
            return replace(config, target=str(folder))

        named = {**asdict(config), "target": grown or config.target}
        if shapes != "none":
            _measure_conformance(found, shapes)
        if programs:
            found.part("programs", named, lambda: measure_programs(model(), ceilings()), show_programs, asdict)
        if programs and duration > 0:
            plan = BenchPlan(comma_list("policies", policies, str), comma_list("rates", rates, float), duration)
            found.part(
                "bench", named | asdict(plan), lambda: measure_serving(model(), plan, named["target"]),
                lambda rows: CONSOLE.print(result_table(rows)), as_rows,
            )  # fmt: skip
        if shapes != "none":
            _time_kernels(found, shapes, ceilings)
        if programs:
            found.part("parts", named, lambda: measure_step_parts(model()), show_parts, as_rows)
        if programs and swaps > 0 and config.draft is not None and config.tp == 1:
            draft = config.draft
            found.part(
                "swaps", {"target": named["target"], "draft": draft, "dtype": dtype, "swaps": swaps},
                lambda: run_swaps(config_of(model().target, draft, dtype), swaps)[0],
                lambda timed: show_swaps(timed, CONSOLE), as_result,
            )  # fmt: skip


def _measure_conformance(found: Measurement, shapes: str) -> None:
    from benchmarks.kernels import kernels as device_kernels

    full = shapes == "full"
    found.part(
        "kernels.conformance", {"shapes": shapes}, lambda: device_kernels.conformance(full), show_conformance, as_rows
    )


def _time_kernels(found: Measurement, shapes: str, ceilings: Callable[[], Ceilings]) -> None:
    from benchmarks.kernels import kernels as device_kernels

    full = shapes == "full"
    found.part(
        "kernels.times", {"shapes": shapes}, lambda: device_kernels.time_kernels(ceilings(), full=full), show_times,
        as_rows,
    )  # fmt: skip
    found.part("kernels.picks", {}, device_kernels.time_picks, show_picks, as_rows)


if __name__ == "__main__":
    program.run(device)
