"""Tokens per second of every policy at several loads, beside transformers on the same checkpoints.

    python -m benchmarks.engine.throughput --out throughput.json [--requests 1,8] [--skip-transformers]

The target is the demo's, grown to 110M parameters once and kept in the user's cache folder, unless --target names a
folder. Prompts are cut from standard-library files that the demo pair never saw in training. A point is a number of
requests, all submitted at once, and a temperature. In each round of a point every system completes the same prompts,
one system after another, the first one rotating; each round has prompts of its own, and the first is not counted.

**The headline is decode tokens/s**: the tokens emitted after the last prompt was prefilled, over the time from then to
the last token of all. So no prefill is in it, and every second of decoding is, also those in which only few requests
are left. Whole-call tokens/s, all new tokens over the whole call, stands beside it: it is what transformers is
measured by too, and what the comparison with it uses, at one request.

A policy learns costs and acceptance while it serves, and starts anew when policies change; so every system first
completes --settle-tokens tokens of each prompt, not timed. Points that --out holds already are not measured again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import typer

from adaserve_jax import SLO
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import AdaServeError, ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, grow
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from benchmarks.engine.throughput_figures import point_figures, show
from benchmarks.engine.throughput_prompts import MAX_TOKENS, MIN_TOKENS, Prompts
from benchmarks.engine.throughput_rows import Conditions, ThroughputRow, read_rows, write_rows
from benchmarks.engine.throughput_systems import Batch, Engine, Measured, Transformers

System = Callable[[Batch, int], Measured]
"""system(batch, settle_tokens): one timed call."""


@dataclass(frozen=True)
class Plan:
    """What to measure. repeats: rounds that count. slo_scale: TPOT target of every request over the baseline latency;
    None: none."""

    requests: tuple[int, ...]
    temperatures: tuple[float, ...]
    policies: tuple[str, ...]
    repeats: int = 5
    new_tokens: int = 128
    settle_tokens: int = 32
    slo_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "temperatures", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} must name at least one value, got none")
        least = {"requests": min(self.requests), "repeats": self.repeats, "new-tokens": self.new_tokens - 1}
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"--{name} must be at least {2 if name == 'new-tokens' else 1}")

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(requests, temperature) for requests in self.requests for temperature in self.temperatures]


def run(
    config: EngineConfig, plan: Plan, out: Path, *, target_name: str = "", skip_transformers: bool = False
) -> list[ThroughputRow]:
    """Measure every point that `out` does not hold yet, and write each as it ends. Returns all rows.

    Raises ConfigError: `out` holds rows of other conditions, or the engine cannot run so many requests at once.
    """
    target, draft = resolve_folder(config.target, "target"), resolve_folder(config.draft or "", "draft")
    with progress_bar() as progress:
        engine = Engine(config, SLO(relative=plan.slo_scale), progress)
    try:
        if max(plan.requests) > engine.local.info.max_requests:
            raise ConfigError(f"--requests up to {max(plan.requests)} need --max-requests of at least as many")
        for policy in plan.policies:
            engine.llm.set_policy(policy)  # an unknown name is refused before anything is measured
        here = conditions(plan, engine, target_name or target.name)
        rows = read_rows(out) if out.exists() else []
        if any(row.conditions != here for row in rows):
            raise ConfigError(f"{out} holds rows of another run; choose another --out, or remove it")
        other = None if skip_transformers or 1 not in plan.requests else Transformers(target, draft)
        prompts = Prompts(held_out_code(), Tokenizer.from_folder(target).encode)
        held = {(row.requests, row.temperature) for row in rows}
        for requests, temperature in plan.points:
            if (requests, temperature) in held:
                continue
            systems = systems_of(plan.policies, engine, other if requests == 1 else None)
            found = measure_point(systems, prompts, plan, requests, temperature)
            figures = point_figures(found, plan.policies, requests, temperature)
            rows += [ThroughputRow.join(here, each) for each in figures]
            write_rows(out, rows)
        if compiles := engine.llm.stats().compiles_after_ready:
            raise SystemExit(f"error: {compiles} programs were compiled after ready")
    finally:
        engine.close()
    return rows


def systems_of(policies: Sequence[str], engine: Engine, other: Transformers | None) -> dict[str, System]:
    systems: dict[str, System] = {}
    for policy in policies:
        systems[policy] = lambda batch, settle, policy=policy: engine.run(policy, batch, settle)
    if other is not None:
        for system in other.systems:
            systems[system] = lambda batch, settle, system=system: other.run(system, batch, settle)
    return systems


def measure_point(
    systems: dict[str, System], prompts: Prompts, plan: Plan, requests: int, temperature: float
) -> dict[str, list[Measured]]:
    """Every system's measurements, one per round; one round more is run first, and dropped."""
    names = list(systems)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with progress_bar() as progress:
        for number in range(plan.repeats + 1):
            seeds = [1000 * number + index for index in range(requests)]
            batch = Batch(prompts.cut(requests, (plan.seed, requests, number)), seeds, plan.new_tokens, temperature)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(systems[name](batch, plan.settle_tokens))
            progress(f"{requests} at once, temperature {temperature:g}", number + 1, plan.repeats + 1)
    return {name: rounds[1:] for name, rounds in found.items()}


def conditions(plan: Plan, engine: Engine, target: str) -> Conditions:
    """Where and with what this run measures. Folders are named without their paths, which are of one machine."""
    used = engine.local.config
    draft_folder = resolve_folder(used.draft or "", "draft")
    draft = "demo" if used.draft == "demo" else draft_folder.name
    shown = replace(used, target=target, draft=draft, compile_cache=None)
    return Conditions(
        commit=source_commit(),
        machine=machine_name(),
        device=engine.local.info.device,
        jax_version=jax.__version__,
        torch_version=version("torch") if find_spec("torch") else None,
        transformers_version=version("transformers"),
        threads=os.cpu_count() or 1,
        target=target,
        target_params=count_parameters(resolve_folder(used.target, "target")),
        draft=draft,
        draft_params=count_parameters(draft_folder),
        dtype=used.dtype,
        config=json.loads(json.dumps(asdict(shown))),
        prompts="standard-library source held out from training",
        min_prompt_tokens=MIN_TOKENS,
        max_prompt_tokens=MAX_TOKENS,
        new_tokens=plan.new_tokens,
        settle_tokens=plan.settle_tokens,
        repeats=plan.repeats,
        slo_scale=plan.slo_scale,
        seed=plan.seed,
    )


def grown_target(params: str) -> Path:
    """The demo target in f32, grown to a named size once and kept in the user's cache folder."""
    if params not in SHAPES:
        raise ConfigError(f"--params must be one of {', '.join(SHAPES)}, got {params!r}")
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "adaserve_jax" / "grown" / f"{params}-f32"
    if not folder.is_dir():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        grow(resolve_folder("demo", "target"), scratch, SHAPES[params], dtype="f32")
        scratch.rename(folder)
    return folder


@takes("config", EngineConfig, without=("policy", "target"))
def throughput(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write, or to go on with")],
    target: Annotated[str, typer.Option(help="checkpoint folder of the target; none: the demo's, grown")] = "",
    params: Annotated[str, typer.Option(help=f"size to grow it to: {', '.join(SHAPES)}")] = "110M",
    requests: Annotated[str, typer.Option(help="requests at once, separated by commas")] = "1,4,8,16,32",
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = "ar,spec:4,adaserve",
    temperatures: Annotated[str, typer.Option(help="temperatures, separated by commas")] = "0,0.8",
    repeats: Annotated[int, typer.Option(help="rounds of each point; one more, for warming up, is left out")] = 5,
    new_tokens: Annotated[int, typer.Option(help="tokens that each request generates")] = 128,
    settle_tokens: Annotated[int, typer.Option(help="tokens of each prompt before a measurement, not timed")] = 32,
    slo_scale: Annotated[float, typer.Option(help="TPOT target over the baseline latency; 0: none")] = 0.0,
    skip_transformers: Annotated[bool, typer.Option(help="measure the engine only")] = False,
) -> None:
    """Measure tokens per second of every policy and of transformers."""
    plan = Plan(
        comma_list("requests", requests, int), comma_list("temperatures", temperatures, float),
        comma_list("policies", policies, str), repeats, new_tokens, settle_tokens, slo_scale or None, config.seed,
    )  # fmt: skip
    folder = Path(target).expanduser() if target else grown_target(params)
    name = "" if target else f"demo grown to {params}"
    show(run(replace(config, target=str(folder)), plan, out, target_name=name, skip_transformers=skip_transformers))


if __name__ == "__main__":
    try:
        typer.run(throughput)
    except AdaServeError as error:
        sys.exit(f"error: {error}")
