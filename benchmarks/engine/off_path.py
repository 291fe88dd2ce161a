"""What a loaded draft costs while speculation is off: the same policy with the draft loaded, and without one.

    python -m benchmarks.engine.off_path --out off_path.json [--requests 1,16,64] [--minutes 10]

Two engines stand side by side, alike but for the draft, both on policy `off`: depth 0, whatever the load. A pair is one
batch of prompts, all submitted at once and completed by both, step by step in turns, so that whatever else runs on the
machine meets both alike; who begins alternates, and every pair has prompts of its own. tokens/s is all new tokens over
the seconds of an engine's own steps, planning and commit included, prefill too; decode tokens/s leaves out what came
before the last prompt was prefilled. The ratio, with the draft over without, is the
median of the pairs' ratios, with its 95 % bootstrap interval over pairs. Pairs are run until both intervals reach no
further than --precision from their medians, or --minutes are over. A draft call in any step is an error.

The target is the demo's, grown to 110M parameters once and kept in the user's cache folder, unless --target names a
folder.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from adaserve_jax import SLO
from adaserve_jax.cli.options import comma_list, takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.engine.core import EngineCore
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.tokenizer import Tokenizer
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit
from benchmarks import program
from benchmarks.engine.throughput_prompts import MAX_TOKENS, MIN_TOKENS, Prompts
from benchmarks.engine.throughput_rows import Ratio, paired_ratio
from benchmarks.engine.throughput_systems import Batch, Engine, Measured
from benchmarks.grown import grown_target

POLICY = "off"
MAX_CONTEXT = 512
LEAST_PAIRS = 6
"""Fewer have no 95 % interval to speak of: of five, it reaches from the least to the largest ratio."""


class Turns:
    """Let two engines step in turns from now on, each on its own thread. Use from one thread."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines = list(engines)
        self._changed = threading.Condition()
        self._running: set[Engine] = set()
        self._next = self._engines[0]
        self._seconds: dict[Engine, list[float]] = {engine: [] for engine in engines}
        for engine in engines:
            self._stand_before(engine)

    def run(self, policy: str, batch: Batch, first: Engine) -> dict[Engine, Measured]:
        """Complete the batch by both. wall_s and the steps' ended_s count seconds of the engine's own steps."""
        self._next = first
        self._running = set(self._engines)
        self._seconds = {engine: [] for engine in self._engines}
        with ThreadPoolExecutor(len(self._engines)) as threads:
            runs = {engine: threads.submit(self._complete, engine, policy, batch) for engine in self._engines}
            return {engine: self._in_own_time(engine, run.result()) for engine, run in runs.items()}

    def _complete(self, engine: Engine, policy: str, batch: Batch) -> Measured:
        try:
            return engine.run(policy, batch)
        finally:
            with self._changed:
                self._running.discard(engine)
                self._changed.notify_all()

    def _in_own_time(self, engine: Engine, measured: Measured) -> Measured:
        ended, steps = 0.0, []
        for step, seconds in zip(measured.steps, self._seconds[engine], strict=True):
            ended += seconds
            steps.append(replace(step, ended_s=ended))
        return replace(measured, steps=tuple(steps), wall_s=ended)

    def _stand_before(self, engine: Engine) -> None:
        """Every core that the engine builds, one per policy, steps in its turn only."""
        build = engine.local.assembly.build_core

        def build_waiting(config: EngineConfig) -> EngineCore:
            core = build(config)
            step = core.step

            def step_in_turn() -> list[OutputChunk]:
                self._wait_for_turn(engine)
                began = time.perf_counter()
                chunks = step()
                if len(engine.noted_steps) > len(self._seconds[engine]):  # it ran something
                    self._seconds[engine].append(time.perf_counter() - began)
                self._pass_on(engine)
                return chunks

            core.step = step_in_turn
            return core

        engine.local.assembly.build_core = build_waiting

    def _wait_for_turn(self, engine: Engine) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is engine or self._running <= {engine})

    def _pass_on(self, engine: Engine) -> None:
        with self._changed:
            self._next = next(other for other in self._engines if other is not engine)
            self._changed.notify_all()


@dataclass(frozen=True)
class Plan:
    """What to measure. precision: how far the intervals may reach from their medians; seconds: for one number of
    requests, settling and the pair that runs then left out."""

    requests: tuple[int, ...]
    new_tokens: int
    precision: float
    seconds: float
    least_pairs: int = LEAST_PAIRS
    temperature: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.requests or min(self.requests) < 1:
            raise ConfigError(f"--requests must name integers of at least 1, got {self.requests}")
        if self.new_tokens < 2 or self.precision <= 0:
            raise ConfigError("--new-tokens must be at least 2, and --precision above 0")


@dataclass(frozen=True)
class Point:
    """One number of requests. *_tps: of each pair, with the draft loaded and without one."""

    requests: int
    with_draft_tps: list[float]
    without_tps: list[float]
    with_draft_decode_tps: list[float]
    without_decode_tps: list[float]
    others_share: float | None

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(self.with_draft_tps, self.without_tps)

    @property
    def decode_ratio(self) -> Ratio:
        return paired_ratio(self.with_draft_decode_tps, self.without_decode_tps)


def run(config: EngineConfig, plan: Plan) -> tuple[list[Point], dict[str, Any]]:
    """All points, and the conditions they were measured in."""
    config = replace(
        config,
        policy=POLICY,
        max_requests=config.max_requests or max(plan.requests),
        max_context=config.max_context or MAX_CONTEXT,
    )
    if max(plan.requests) > config.max_requests:
        raise ConfigError(f"--requests up to {max(plan.requests)} need --max-requests of at least as many")
    if config.draft is None:
        raise ConfigError("--draft must name the draft that is loaded and not used")
    with progress_bar() as progress:
        drafting = Engine(config, SLO(), progress)
        try:
            pages = drafting.local.config.num_pages
            plain = Engine(replace(config, draft=None, num_pages=pages), SLO(), progress)
        except BaseException:
            drafting.close()
            raise
    try:
        prompts = Prompts(held_out_code(), Tokenizer.from_folder(resolve_folder(config.target, "target")).encode)
        turns = Turns((drafting, plain))
        points = [measure_point(turns, drafting, plain, prompts, plan, requests) for requests in plan.requests]
        if drafting.llm.stats().compiles_after_ready or plain.llm.stats().compiles_after_ready:
            raise SystemExit("error: programs were compiled after ready")
        return points, conditions(drafting, plan)
    finally:
        drafting.close()
        plain.close()


def measure_point(turns: Turns, drafting: Engine, plain: Engine, prompts: Prompts, plan: Plan, requests: int) -> Point:
    """Pairs until both intervals are narrow, or time is over; the first pair is not counted."""
    pairs: list[tuple[Measured, Measured]] = []
    deadline = time.perf_counter() + plan.seconds
    with progress_bar() as progress:
        while True:
            number = len(pairs)
            seeds = [1000 * number + index for index in range(requests)]
            batch = Batch(
                prompts.cut(requests, (plan.seed, requests, number)), seeds, plan.new_tokens, plan.temperature
            )
            found = turns.run(POLICY, batch, first=drafting if number % 2 else plain)
            check_off(found[drafting])
            pairs.append((found[drafting], found[plain]))
            if number == 0:
                deadline = time.perf_counter() + plan.seconds
                continue
            point = point_of(requests, pairs[1:])
            progress(f"{requests} at once, {number} pairs, {point.ratio.median:.3f}", number, plan.least_pairs)
            over = time.perf_counter() > deadline
            if number >= plan.least_pairs and (over or narrow(point, plan.precision)):
                return point


def check_off(measured: Measured) -> None:
    """Raises SystemExit where the draft did anything."""
    totals = measured.totals
    if any(step.depth for step in measured.steps) or (totals is not None and totals.draft_s > 0):
        raise SystemExit("error: the draft was called while speculation was off")


def narrow(point: Point, precision: float) -> bool:
    return all(
        ratio.high - ratio.median <= precision and ratio.median - ratio.low <= precision
        for ratio in (point.ratio, point.decode_ratio)
    )


def point_of(requests: int, pairs: Sequence[tuple[Measured, Measured]]) -> Point:
    others = [each.others_share for pair in pairs for each in pair if each.others_share is not None]
    return Point(
        requests,
        [drafting.whole_tps for drafting, _ in pairs],
        [plain.whole_tps for _, plain in pairs],
        [drafting.decode_tps or 0.0 for drafting, _ in pairs],
        [plain.decode_tps or 0.0 for _, plain in pairs],
        max(others) if others else None,
    )


def conditions(engine: Engine, plan: Plan) -> dict[str, Any]:
    """Where and with what. Folders are named without their paths."""
    used = engine.local.config
    target = resolve_folder(used.target, "target")
    draft = resolve_folder(used.draft or "", "draft")
    shown = replace(used, target=target.name, draft=draft.name, compile_cache=None)
    return {
        "commit": source_commit(),
        "machine": machine_name(),
        "device": engine.local.info.device,
        "jax_version": jax.__version__,
        "target": target.name,
        "target_params": count_parameters(target),
        "draft": draft.name,
        "draft_params": count_parameters(draft),
        "config": json.loads(json.dumps(asdict(shown))),
        "prompt_tokens": [MIN_TOKENS, MAX_TOKENS],
        "plan": asdict(plan),
    }


def report(points: Sequence[Point], where: dict[str, Any]) -> dict[str, Any]:
    """What is written: figures of every pair, and their ratios."""
    rows = [
        asdict(point)
        | {"pairs": len(point.without_tps), "ratio": asdict(point.ratio), "decode_ratio": asdict(point.decode_ratio)}
        for point in points
    ]
    return where | {"points": rows}


def show(points: Sequence[Point]) -> None:
    table = Table("requests", "pairs", "with the draft, tokens/s", "without", "times", "times, decoding", "others")
    for point in points:
        rates = (sorted(each)[len(each) // 2] for each in (point.with_draft_tps, point.without_tps))
        table.add_row(
            str(point.requests), str(len(point.without_tps)), *(f"{rate:.1f}" for rate in rates),
            *(f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for r in (point.ratio, point.decode_ratio)),
            "-" if point.others_share is None else f"{point.others_share:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)


@takes("config", EngineConfig, without=("policy", "target"))
def off_path(
    config: EngineConfig,
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    target: Annotated[str, typer.Option(help="checkpoint folder of the target; none: the demo's, grown")] = "",
    params: Annotated[str, typer.Option(help=f"size to grow it to: {', '.join(SHAPES)}")] = "110M",
    requests: Annotated[str, typer.Option(help="requests at once, separated by commas")] = "1,16,64",
    new_tokens: Annotated[int, typer.Option(help="tokens that each request generates")] = 64,
    precision: Annotated[float, typer.Option(help="how far the intervals may reach from their medians")] = 0.005,
    minutes: Annotated[float, typer.Option(help="for each number of requests; then what there is counts")] = 10.0,
) -> None:
    """Measure what a draft costs that is loaded and not used."""
    plan = Plan(comma_list("requests", requests, int), new_tokens, precision, 60 * minutes, seed=config.seed)
    folder = Path(target).expanduser() if target else grown_target(params)
    points, where = run(replace(config, target=str(folder)), plan)
    out.write_text(json.dumps(report(points, where), indent=1) + "\n")
    show(points)


if __name__ == "__main__":
    program.run(off_path)
