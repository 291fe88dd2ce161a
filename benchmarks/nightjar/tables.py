"""Nightjar's evaluation in simulation: low, high and dynamic load, fixed lengths, contexts, elastic memory, thresholds.

    python -m benchmarks.nightjar.tables --azure AzureLLMInferenceTrace_conv.csv.gz --out nightjar
    python -m benchmarks.nightjar.tables --quick --out nightjar

Points are written to nightjar.jsonl as they end, and those that it has of the same commit and settings are not run
again, so the same command goes on where it was stopped. `--minutes` bounds it: no point is begun after so many, and how
long the rest will take is printed. From all points: nightjar-lines.json, and of that nightjar-sim.json with a summary,
tables.md with tables, and figures, which `--report-only` writes again. `--quick` takes a short made trace and few
policies.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from adaserve_jax.bench.simulate import result_rows
from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes
from adaserve_jax.errors import ConfigError
from adaserve_jax.results.jsonl import append_rows, make_folder, read_rows
from adaserve_jax.results.provenance import machine_name, new_run_id, source_commit
from adaserve_jax.results.schema import ALL_CLASSES
from adaserve_jax.sim.machines import Machine
from adaserve_jax.sim.simulation import simulate
from adaserve_jax.workloads.traces import Trace
from benchmarks import program
from benchmarks.nightjar.points import (
    CLASSES,
    QUICK,
    REQUESTS,
    Point,
    Scale,
    Setup,
    Workloads,
    find_setups,
    made_segment,
    points,
    segment_of,
)
from benchmarks.nightjar.views import FIGURES, Line, pages_of

LINES = "nightjar-lines.json"
SWAPS = ("expand", "contract", "failed")


def key_of(point: Point, segment: Trace, scale: Scale, commit: str) -> str:
    """The same for the same commit, machine, requests and setting: such a point need not be run again."""
    parts = (commit, point, segment.sha256, scale.requests, scale.saturating)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """One point with what it runs on. commit: of the source when the run began."""

    key: str
    commit: str
    point: Point
    machine: Machine
    trace: Trace


def run(job: Job) -> Line:
    """Simulate one point."""
    point, plan, run_id = job.point, job.point.plan, new_run_id()
    done = simulate(point.policy, plan, job.machine, job.trace, run_id=run_id)
    rows = result_rows(point.policy, plan, job.machine, job.trace, done.records, wall_s=done.wall_s, run_id=run_id)
    row = asdict(next(row for row in rows if row.slo_class == ALL_CLASSES))
    swaps = {name: sum(stats.elastic_moves.get(name, 0) for stats in done.stats) for name in SWAPS}
    return Line(
        job.key, point.setup.name, point.load, point.share, point.policy, point.seed,
        None if point.pool is None else asdict(point.pool), {name: row[name] for name in FIGURES},
        {name: row[name] for name in ("rate_rps", "requests", "wall_s", "workload", "workload_hash")}
        | {"commit": job.commit},
        None if point.pool is None else swaps,
    )  # fmt: skip


def run_all(
    setups: Sequence[Setup], segment: Trace, scale: Scale, out: Path, *, minutes: float, workers: int = 1
) -> tuple[list[Line], dict[str, Any], int]:
    """Every point, those of `out` that have its key not again. Returns the lines, what the setups are, and how many
    points are left when `minutes` are over."""
    commit, path = source_commit(), out / "nightjar.jsonl"
    kept = path.exists() and program.is_clean(commit)
    known = {line.key: line for line in (read_rows(path, Line) if kept else [])}
    todo = [(key_of(point, segment, scale, commit), point) for point in points(setups, scale)]
    missing = [(key, point) for key, point in todo if key not in known]
    notes().print(f"{len(todo)} points, {len(todo) - len(missing)} of them in {path}", highlight=False)
    loads = {setup.name: Workloads(setup, segment, scale) for setup in setups}
    jobs = (Job(key, commit, at, loads[at.setup.name].machine, loads[at.setup.name].trace(at)) for key, at in missing)
    begin_s = time.monotonic()
    for done, line in enumerate(_lines(jobs, workers, begin_s + 60 * minutes), 1):
        append_rows(path, [line])
        known[line.key] = line
        _note(line, done, len(missing), time.monotonic() - begin_s)
    about = {setup.name: loads[setup.name].about() | _setting(setup) for setup in setups}
    lines = [known[key] for key, _ in todo if key in known]
    return lines, about, len(todo) - len(lines)


def _lines(jobs: Iterator[Job], workers: int, until_s: float) -> Iterator[Line]:
    """Lines as they end, in as many processes; none is begun after `until_s` of time.monotonic."""
    in_time = takewhile(lambda _: time.monotonic() < until_s, jobs)
    if workers == 1:
        yield from map(run, in_time)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, job) for job in islice(in_time, workers)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(run, job) for job in islice(in_time, len(ended))}
            yield from (future.result() for future in ended)


def _setting(setup: Setup) -> dict[str, Any]:
    return {"prompt_parts": setup.prompt_parts, "most_output": setup.most_output, "pages": setup.pages}


def _note(line: Line, done: int, total: int, spent_s: float) -> None:
    figures = line.figures
    notes().print(
        f"{done}/{total} {line.setup} {line.load} {line.share:g} {line.policy}{pages_of(line.pool)} seed {line.seed}: "
        f"{figures['throughput_tps']:.0f} tokens/s, {figures['e2e_mean_s']:.2f} s; "
        f"about {spent_s / done * (total - done) / 60:.0f} min left",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def write_result(lines: Sequence[Line], about: dict[str, Any], segment: dict[str, Any], out: Path) -> None:
    """nightjar-lines.json, from which everything else is made. The file is replaced at once."""
    result = {
        "kind": "simulated",
        "commit": ", ".join(sorted({line.about["commit"] for line in lines})),
        "machine": machine_name(),
        "segment": segment,
        "setups": about,
        "lines": [asdict(line) for line in lines],
    }
    text = json.dumps(result | {"lines": None}, indent=1, allow_nan=False)
    body = ",\n".join(json.dumps(line, allow_nan=False) for line in result["lines"])
    scratch = out / f"{LINES}.new"
    scratch.write_text(text.replace('"lines": null', f'"lines": [\n{body}\n]') + "\n")
    scratch.replace(out / LINES)


def nightjar_tables(
    out: Annotated[Path, typer.Option(help="folder for all points, the summary, tables.md and figures")],
    azure: Annotated[Path | None, typer.Option(help="AzureLLMInferenceTrace_conv.csv, .gz or not")] = None,
    setups: Annotated[str, typer.Option(help="setups to run, separated by commas; none: all")] = "",
    seeds: Annotated[int, typer.Option(help="independent runs of each point")] = 3,
    requests: Annotated[int, typer.Option(help="requests of a Poisson load")] = REQUESTS,
    loads: Annotated[str, typer.Option(help="of low, high, dynamic, separated by commas; none: all, and pools")] = "",
    minutes: Annotated[float, typer.Option(help="begin no point after so many minutes")] = 120.0,
    jobs: Annotated[int, typer.Option(help="processes; 0: one per core")] = 0,
    report_only: Annotated[bool, typer.Option(help="run nothing: write the report of nightjar-lines.json")] = False,
    quick: Annotated[bool, typer.Option(help="a short made trace and few policies, to see it work")] = False,
) -> None:
    """Simulate the points and write tables and figures."""
    from benchmarks.nightjar.report import write_report

    if report_only:
        write_report(json.loads((out / LINES).read_text()), out)
        return
    if not quick and azure is None:
        raise ConfigError("--azure: give Azure's conversation trace, or --quick for a made one")
    if seeds < 1 or requests < 1 or jobs < 0 or not minutes > 0:
        raise ConfigError("--seeds and --requests must be at least 1, --jobs not below 0, and --minutes above 0")
    if quick and (loads or requests != REQUESTS):
        raise ConfigError("--quick has few requests and loads of its own; leave --requests and --loads out")
    only = comma_list("loads", loads, str)
    if unknown := sorted(set(only) - CLASSES.keys()):
        raise ConfigError(f"--loads must be of {', '.join(CLASSES)}, got {unknown[0]!r}")
    scale = QUICK if quick else replace(Scale(), seeds=seeds, requests=requests, loads=tuple(only))
    segment = made_segment() if azure is None else segment_of(azure)
    chosen = find_setups(comma_list("setups", setups, str))
    make_folder(out)
    lines, about, left = run_all(chosen, segment, scale, out, minutes=minutes, workers=jobs or os.cpu_count() or 1)
    known = {"trace": segment.name, "requests": len(segment.requests), "rate_rps": segment.rate_rps}
    write_result(lines, about, known | {"sha256": segment.sha256}, out)
    write_report(json.loads((out / LINES).read_text()), out)
    if left:
        notes().print(f"{left} points are left; run the same command again to go on with them", highlight=False)


if __name__ == "__main__":
    program.run(nightjar_tables)
