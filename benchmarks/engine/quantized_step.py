"""Time and memory of the target's step with its weights as they are, in int8 and in int4, in one run.

    python -m benchmarks.engine.quantized_step --out quantized-step.json [--params 110M | --target CHECKPOINT]

All engines are ready at once and take turns, so that what else runs on the machine meets them alike.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import WEIGHT_KINDS, EngineConfig
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, grow
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from adaserve_jax.runtime.executor import ModelExecutor, load_executor
from adaserve_jax.runtime.warmup import measure
from benchmarks import program
from benchmarks.grown import shape_of

ROWS = 8
CONTEXT = 1024


@dataclass(frozen=True)
class Step:
    """Least seconds of a verify step of so many packed tokens, host to host, by kind of weights."""

    tokens: int
    seconds: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Of each kind of quantised weights, over the weights as they are."""
        return {kind: seconds / self.seconds["none"] for kind, seconds in self.seconds.items() if kind != "none"}


def ready(folder: Path, kind: str, edges: tuple[int, ...], dtype: str) -> ModelExecutor:
    config = EngineConfig(
        target=str(folder), draft=None, quantize=kind, dtype=dtype, max_requests=ROWS, max_context=CONTEXT,
        token_edges=edges, row_edges=(ROWS,), max_tree_tokens=edges[-1],
    )  # fmt: skip
    executor = load_executor(config)
    with progress_bar() as progress:
        executor.warm_up(progress)
    return executor


def take_turns(executors: dict[str, ModelExecutor], edges: tuple[int, ...], rounds: int) -> list[Step]:
    times: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for kind, executor in executors.items():
            for (tokens, _), seconds in measure(executor).samples().verify_s.items():
                times[kind, tokens] = min(seconds, times.get((kind, tokens), seconds))
    return [Step(tokens, {kind: times[kind, tokens] for kind in executors}) for tokens in edges]


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    params: Annotated[str, typer.Option(help=f"size that the demo target is grown to: {', '.join(SHAPES)}")] = "110M",
    target: Annotated[str, typer.Option(help="checkpoint folder to measure instead")] = "",
    tokens: Annotated[str, typer.Option(help="packed tokens of a step, increasing")] = "1,4,8,16,32,64,128",
    dtype: Annotated[str, typer.Option(help="f32, bf16 or auto")] = "auto",
    rounds: Annotated[int, typer.Option(help="turns of each")] = 5,
) -> None:
    """Compare steps."""
    shape = shape_of(params)
    edges = comma_list("tokens", tokens, int)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(target or Path(scratch) / "grown")
        if not target:
            grow(resolve_folder("demo", "target"), folder, shape)
        executors = {kind: ready(folder, kind, edges, dtype) for kind in WEIGHT_KINDS}
        parameters = count_parameters(folder)
    sizes = {kind: sum(x.nbytes for x in executor.target.params.values()) for kind, executor in executors.items()}
    steps = take_turns(executors, edges, rounds)
    result = {
        "commit": source_commit(), "machine": machine_name(), "device": jax.local_devices()[0].device_kind,
        "jax_version": jax.__version__, "target_params": parameters,
        "dtype": executors["none"].resolved.config.dtype, "weight_bytes": sizes,
        "steps": [asdict(step) | {"ratios": step.ratios} for step in steps],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [f"{kind} / none" for kind in WEIGHT_KINDS if kind != "none"]
    table = Table("tokens", *(f"{kind} ms" for kind in WEIGHT_KINDS), *ratios, title=f"{parameters:,} parameters")
    for step in steps:
        cells = [f"{s * 1e3:.2f}" for s in step.seconds.values()] + [f"{ratio:.2f}" for ratio in step.ratios.values()]
        table.add_row(str(step.tokens), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    program.run(main)
