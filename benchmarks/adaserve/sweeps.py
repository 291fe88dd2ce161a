"""AdaServe's sweeps in simulation: rate, urgent share as published and drawn anew, SLO scale, deadlines, and a load
that fluctuates or doubles for a minute.

    python -m benchmarks.adaserve.sweeps --traces adaserve-traces --out sweeps [--jobs 8]
    python -m benchmarks.adaserve.sweeps --quick --out sweeps

Every contender runs at every point twice: with TPOT targets only, as in the paper, and with a TTFT target of 4 s beside
them. The contenders: `adaserve`, and the policies of its paper and of its authors' code, each with one setting for all
points; every other policy at the setting that the paper gives its baselines (prefill chunk 128, unless the policy
chooses it, at most 64 requests); and, where requests have both targets, the best fixed chain of each point (length, 0
for plain decoding, prefill chunk and most requests), found by search: with TPOT targets alone a search finds chunks so
small that prompts wait for minutes.

Points are written to sweeps.jsonl as they end, and those that it has of the same commit and settings are not run again.
From all of them: README.md with tables and figures, verdict.json, contenders.json with every contender at every point,
and a figure for each machine and kind of targets.
`--report-only` writes these of whatever is there. `--beside` takes contenders that do not run from the contenders.json
of an earlier run, so that a policy that changed is compared without running all others again. `--quick` takes short
generated traces and few contenders.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.bench.simulate import TUNED, ChainSetting, Grid, as_run, result_rows, tune_fixed
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, make_folder, read_rows
from adaserve_jax.results.provenance import new_run_id, source_commit
from adaserve_jax.results.submission import recovery_s
from adaserve_jax.sim.machines import Machine, load_machine
from adaserve_jax.sim.simulation import SimulationPlan, simulate
from benchmarks import program
from benchmarks.adaserve.sweeps_points import (
    OVERLOAD,
    OVERLOAD_FROM_S,
    OVERLOAD_S,
    SWEEPS,
    TARGETS,
    Contender,
    Point,
    contenders,
    named_contenders,
    points,
)
from benchmarks.adaserve.sweeps_tables import Line, contenders_by_point, lines_of, tables, verdict

QUICK_GRID = Grid((2, 4), (128, 512), (32, 64))


@dataclass(frozen=True)
class Job:
    """One contender at one point on one machine. commit: of the source, without which a result is not the same."""

    commit: str
    machine: Machine
    point: Point
    contender: Contender
    seed: int
    grid: Grid
    setting: ChainSetting | None = None
    """Of the tuned contender, if it is known."""

    @property
    def key(self) -> str:
        """The same for the same commit, machine, trace and setting: such a point need not be run again."""
        parts = (self.commit, self.machine, self.point.trace.sha256, self.contender, self.seed)
        parts += (self.point.sweep, self.point.value, self.point.targets)
        parts += (self.setting or self.grid,) if self.contender.policy is None else ()
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def run(job: Job) -> Line:
    """Simulate one job."""
    point, contender = job.point, job.contender
    machine = contender.machine(job.machine)
    plan = SimulationPlan(
        (), job.seed, contender.max_requests, contender.max_prefill_tokens, keep_token_times=False
    )  # fmt: skip
    policy, label = contender.policy, None
    if policy is None and job.setting is not None:
        policy, plan = as_run(job.setting, plan)
        label = f"{contender.name}, as found before"
    elif policy is None:
        tuned = tune_fixed(plan, machine, point.trace, grid=job.grid)
        policy, plan = as_run(tuned.setting, plan)
        label = f"{contender.name}, best of {tuned.tried} tried"
    run_id = new_run_id()
    simulated = simulate(policy, plan, machine, point.trace, run_id=run_id)
    rows = result_rows(
        policy, plan, machine, point.trace, simulated.records, wall_s=simulated.wall_s, run_id=run_id, label=label
    )
    about = (job.key, job.machine.name, point.sweep, point.value, point.targets, contender.name, contender.group)
    recovered = None
    if point.sweep == OVERLOAD:
        met = ((record.due_s, record.slo_met is True) for record in simulated.records)
        recovered = recovery_s(met, OVERLOAD_FROM_S + OVERLOAD_S)
    return Line(*about, rows=tuple(asdict(row) for row in rows), recovery_s=recovered)


def run_all(jobs: Sequence[Job], out: Path, workers: int) -> list[Line]:
    """Every job, those of `out` that have its key not again; lines in the order of `jobs`."""
    path = out / "sweeps.jsonl"
    known = {line.key: line for line in (read_rows(path, Line) if path.exists() else [])}
    missing = [job for job in jobs if job.key not in known or not program.is_clean(job.commit)]
    notes().print(f"{len(jobs)} points, {len(jobs) - len(missing)} of them in {path}", highlight=False)
    missing.sort(key=lambda job: job.contender.policy is not None)  # the long ones first
    for done, line in enumerate(_lines(missing, workers), 1):
        append_rows(path, [line])
        known[line.key] = line
        attained, goodput = line.overall["attainment"], line.overall["goodput_tps"]
        notes().print(
            f"{done}/{len(missing)} {line.machine} {line.sweep} {line.value:g} {line.targets} {line.contender}: "
            f"{attained:.3f} met, {goodput:.0f} tokens/s",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return [known[job.key] for job in jobs]


def _lines(jobs: Sequence[Job], workers: int) -> Iterator[Line]:
    if workers == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            yield future.result()


_SETTING = re.compile(r"(ar|spec:([0-9]+)), chunk ([0-9]+), ([0-9]+) running")


def known_settings(files: Sequence[str]) -> dict[tuple[str, str, str, float], ChainSetting]:
    """Return the tuned settings that earlier runs found, by machine, targets, sweep and value.

    files: their verdict.json or contenders.json. Raises ConfigError: one cannot be read.
    """
    found: dict[tuple[str, str, str, float], ChainSetting] = {}
    for file in files:
        try:
            for point in json.loads(Path(file).read_text())["points"]:
                text = point.get("tuned_setting") or point.get("contenders", {}).get(TUNED, {}).get("setting") or ""
                if match := _SETTING.fullmatch(text):
                    setting = ChainSetting(int(match[2] or 0), int(match[3]), int(match[4]))
                    found[point["machine"], point["targets"], point["sweep"], point["value"]] = setting
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"--known: {file} is no verdict.json or contenders.json of a run: {error}") from error
    return found


def with_earlier(lines: Sequence[Line], file: Path | None) -> list[Line]:
    """Return the lines and those of an earlier run's contenders.json about other contenders and points.

    Raises ConfigError: it cannot be read.
    """
    if file is None:
        return list(lines)
    try:
        earlier = lines_of(json.loads(file.read_text()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--beside: {file} is no contenders.json of a run: {error}") from error
    return list({_place(line): line for line in [*earlier, *lines]}.values())


def _place(line: Line) -> tuple[str, str, str, float, str]:
    return line.machine, line.targets, line.sweep, line.value, line.contender


def write_report(lines: Sequence[Line], out: Path) -> dict[str, Any]:
    """README.md, verdict.json, contenders.json and, where matplotlib is installed, the figures; returns the verdict."""
    commit = ", ".join(sorted({each for line in lines for each in line.overall["commit"].split(", ")}))
    judged = {"commit": commit, **verdict(lines)}
    each = {"commit": commit, "points": contenders_by_point(lines)}
    (out / "README.md").write_text(f"# Policy sweeps\n\n{tables(each)}\n")
    (out / "verdict.json").write_text(json.dumps(judged, indent=1, allow_nan=False) + "\n")
    (out / "contenders.json").write_text(json.dumps(each, indent=1, allow_nan=False) + "\n")
    try:
        from benchmarks.adaserve.sweeps_figures import draw
    except ModuleNotFoundError:
        notes().print("no figures: install matplotlib and run the same command again")
    else:
        draw(lines, out)
    return judged


def policy_sweeps(
    out: Annotated[Path, typer.Option(help="folder for sweeps.jsonl, README.md, verdict.json and figures")],
    traces: Annotated[Path | None, typer.Option(help="folder of AdaServe's traces")] = None,
    machines: Annotated[
        str, typer.Option(help="machines, by name or file, separated by commas")
    ] = "llama-70b,qwen-32b",
    only: Annotated[str, typer.Option(help="contenders to run, separated by commas; none: all")] = "",
    sweeps: Annotated[str, typer.Option(help=f"sweeps to run, of {', '.join(SWEEPS)}; none: all")] = "",
    targets: Annotated[str, typer.Option(help="kinds of targets, of tpot, joint; none: both")] = "",
    requests: Annotated[int, typer.Option(help="first requests of each trace to take; 0: all")] = 0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
    seed: Annotated[int, typer.Option(help="seeds what the draft gets right, and generated traces")] = 0,
    known: Annotated[
        str,
        typer.Option(
            help="verdict.json or contenders.json of earlier runs, separated by commas: their tuned "
            "settings are run again, and none is searched for"
        ),
    ] = "",
    beside: Annotated[
        Path | None, typer.Option(help="contenders.json of an earlier run: what is not run is taken from it")
    ] = None,
    report_only: Annotated[bool, typer.Option(help="run nothing: write the report of what sweeps.jsonl has")] = False,
    quick: Annotated[bool, typer.Option(help="short generated traces and few contenders, to see it work")] = False,
) -> None:
    """Simulate the sweeps and write tables, verdicts and figures."""
    if not quick and traces is None and not report_only:
        raise ConfigError("--traces: give the folder of AdaServe's traces, or --quick for generated ones")
    if min(requests, jobs, seed) < 0:
        raise ConfigError("--requests, --jobs and --seed must not be below 0")
    if report_only:
        file = out / "sweeps.jsonl"
        lines = read_rows(file, Line) if file.exists() or beside is None else []
        make_folder(out)
        show(write_report(with_earlier(lines, beside), out), out)
        return
    named = [load_machine(name) for name in comma_list("machines", machines, str)]
    chosen = contenders(quick=quick)
    chosen = named_contenders("only", only, chosen) or chosen
    of_sweeps, of_targets = _among("sweeps", sweeps, SWEEPS), _among("targets", targets, TARGETS)
    todo = [
        point for point in points(None if quick else traces, requests=requests, seed=seed)
        if point.sweep in of_sweeps and point.targets in of_targets
    ]  # fmt: skip
    if not todo:
        raise ConfigError(
            f"--sweeps: no trace of {traces or 'those that --quick generates'} is a point of {', '.join(of_sweeps)}"
        )
    make_folder(out)
    grid = QUICK_GRID if quick else Grid()
    commit = source_commit()
    settings = known_settings(comma_list("known", known, str))

    def job(machine: Machine, point: Point, contender: Contender) -> Job:
        setting = settings.get((machine.name, point.targets, point.sweep, point.value))
        return Job(commit, machine, point, contender, seed, grid, setting if contender.policy is None else None)

    every = [
        job(machine, point, contender)
        for machine in named for point in todo for contender in chosen if contender.runs_at(point, machine)
    ]  # fmt: skip
    all_jobs = [each for each in every if each.contender.policy is not None or each.setting is not None or not known]
    lines = run_all(all_jobs, out, jobs or os.cpu_count() or 1)
    show(write_report(with_earlier(lines, beside), out), out)


def _among(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """What an option names; all that is known where it names nothing."""
    named = comma_list(option, text, str)
    if set(named) - set(known):
        raise ConfigError(f"--{option}: expected some of {', '.join(known)}, got {text!r}")
    return named or tuple(known)


def show(judged: dict[str, Any], out: Path) -> None:
    """Tables and verdict, to stdout."""
    typer.echo((out / "README.md").read_text())
    typer.echo(json.dumps(judged["overall"], indent=1))


if __name__ == "__main__":
    program.run(policy_sweeps)
