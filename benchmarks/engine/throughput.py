"""Tokens per second of every policy in closed loops: so many requests run at once, and each that ends is replaced.

    python -m benchmarks.engine.throughput --out throughput.json [--requests 1,8]

The target is the demo's, grown to 110M parameters once and kept in the user's cache folder, unless --target names a
folder. Prompts are cut from standard-library files that the demo pair never saw in training, and a request generates
half to one and a half times --new-tokens. A point is a number of requests at once and a temperature. In each round of a
point every policy completes the same requests, one policy after another, the first one rotating.

A policy starts anew each time and learns costs and acceptance while it serves. So a loop is measured from when as many
requests have ended as run at once, until one ends that no other is left to replace. `nightjar` chooses between what
`ar` and the chains do, and is compared with the best of those. For `adaserve`, which drafts trees too, and from text
already seen, the best of those is a floor. Points that --out holds already are not measured again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import typer

from adaserve_jax import SLO
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from benchmarks import program
from benchmarks.engine.throughput_figures import point_figures, show
from benchmarks.engine.throughput_prompts import MAX_TOKENS, MIN_TOKENS, Prompts
from benchmarks.engine.throughput_rows import Conditions, ThroughputRow, read_rows, write_rows
from benchmarks.engine.throughput_systems import Engine, Load, Looped
from benchmarks.grown import grown_target


@dataclass(frozen=True)
class Plan:
    """What to measure. repeats: rounds. new_tokens: mean of a request. texts: least that end in the measured part.
    slo_scale: TPOT target of every request over the baseline latency; None: none."""

    requests: tuple[int, ...]
    temperatures: tuple[float, ...]
    policies: tuple[str, ...]
    repeats: int = 3
    new_tokens: int = 96
    texts: int = 8
    slo_scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "temperatures", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} must name at least one value, got none")
        least = {"requests": min(self.requests), "repeats": self.repeats, "texts": self.texts}
        least["new-tokens"] = self.new_tokens - 1
        for name, value in least.items():
            if value < 1:
                raise ConfigError(f"--{name} must be at least {2 if name == 'new-tokens' else 1}")

    @property
    def lengths(self) -> tuple[int, int]:
        """Least and most new tokens of a request."""
        return max(1, self.new_tokens // 2), self.new_tokens * 3 // 2

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(requests, temperature) for requests in self.requests for temperature in self.temperatures]


def run(config: EngineConfig, plan: Plan, out: Path, *, target_name: str = "") -> list[ThroughputRow]:
    """Measure every point that `out` does not hold yet, and write each as it ends. Returns all rows.

    Raises ConfigError: `out` holds rows of other conditions, or the engine cannot run so many requests at once.
    """
    target = resolve_folder(config.target, "target")
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
        prompts = Prompts(held_out_code(), Tokenizer.from_folder(target).encode)
        held = {row.point for row in rows}
        for requests, temperature in plan.points:
            if (requests, temperature) in held:
                continue
            found = measure_point(engine, prompts, plan, requests, temperature)
            rows += [ThroughputRow.join(here, each) for each in point_figures(found, requests, temperature)]
            write_rows(out, rows)
        if compiles := engine.llm.stats().compiles_after_ready:
            raise SystemExit(f"error: {compiles} programs were compiled after ready")
    finally:
        engine.close()
    return rows


def measure_point(
    engine: Engine, prompts: Prompts, plan: Plan, requests: int, temperature: float
) -> dict[str, list[Looped]]:
    """Return every policy's measurements, one per round."""
    found: dict[str, list[Looped]] = {policy: [] for policy in plan.policies}
    with progress_bar() as progress:
        for number in range(plan.repeats):
            load = load_of(prompts, plan, requests, temperature, number)
            first = number % len(plan.policies)
            for policy in plan.policies[first:] + plan.policies[:first]:
                found[policy].append(engine.loop(policy, load))
            progress(f"{requests} at once, temperature {temperature:g}", number + 1, plan.repeats)
    return found


def load_of(prompts: Prompts, plan: Plan, requests: int, temperature: float, number: int) -> Load:
    """Return a round's requests: those that end before the measured part, in it, and those that run when it ends."""
    count = requests + max(plan.texts, requests) + requests - 1
    seed = (plan.seed, requests, number)
    least, most = plan.lengths
    lengths = np.random.default_rng(seed).integers(least, most + 1, count).tolist()
    seeds = [1000 * number + index for index in range(count)]
    return Load(requests, prompts.cut(count, seed), lengths, seeds, temperature)


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
        min_new_tokens=plan.lengths[0],
        max_new_tokens=plan.lengths[1],
        texts=plan.texts,
        repeats=plan.repeats,
        slo_scale=plan.slo_scale,
        seed=plan.seed,
    )


@takes("config", EngineConfig, without=("policy", "target"))
def throughput(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write, or to go on with")],
    target: Annotated[str, typer.Option(help="checkpoint folder of the target; none: the demo's, grown")] = "",
    params: Annotated[str, typer.Option(help=f"size to grow it to: {', '.join(SHAPES)}")] = "110M",
    requests: Annotated[str, typer.Option(help="requests at once, separated by commas")] = "1,2,4,8,16,32",
    policies: Annotated[
        str, typer.Option(help="policies, separated by commas")
    ] = "ar,spec:1,spec:2,spec:3,spec:4,adaserve,nightjar",
    temperatures: Annotated[str, typer.Option(help="temperatures, separated by commas")] = "0,0.8",
    repeats: Annotated[int, typer.Option(help="rounds of each point")] = 3,
    new_tokens: Annotated[int, typer.Option(help="mean number of tokens that a request generates")] = 96,
    texts: Annotated[int, typer.Option(help="least number of requests that end in what is measured")] = 8,
    slo_scale: Annotated[float, typer.Option(help="TPOT target over the baseline latency; 0: none")] = 0.0,
) -> None:
    """Measure tokens per second of every policy in closed loops."""
    plan = Plan(
        comma_list("requests", requests, int), comma_list("temperatures", temperatures, float),
        comma_list("policies", policies, str), repeats, new_tokens, texts, slo_scale or None, config.seed,
    )  # fmt: skip
    folder = Path(target).expanduser() if target else grown_target(params)
    name = "" if target else f"demo grown to {params}"
    show(run(replace(config, target=str(folder)), plan, out, target_name=name))


if __name__ == "__main__":
    program.run(throughput)
