"""`adaserve bench`: policies x loads over a workload, a table, and a folder to make a report of."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from adaserve_jax.bench.default_rates import default_rates
from adaserve_jax.bench.engine import BenchEngine, OpenEngine
from adaserve_jax.bench.plan import POISSON, BenchPlan, Point
from adaserve_jax.bench.resume import FolderUse, check_folder, planned
from adaserve_jax.bench.runner import INTERRUPTED, Watch, run_bench
from adaserve_jax.cli.bench_requests import (
    FORMAT_HELP,
    LENGTHS_HELP,
    SLOS_HELP,
    parse_rate,
    parse_share,
    parse_slo_scale,
    read_workload,
)
from adaserve_jax.cli.bench_url import UrlOptions
from adaserve_jax.cli.options import comma_list, grouped, takes
from adaserve_jax.cli.points import point_line, print_rows, say, say_what_is_next
from adaserve_jax.cli.terminal import notes, open_bench_engine, with_drafter, with_learning
from adaserve_jax.config import FIELD_HELP, EngineConfig
from adaserve_jax.drafter_config import FIELD_HELP as DRAFTER_HELP
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import OPTION_HELP, LearnOptions
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.scheduler.policies import expand, file_hashes, policy_of
from adaserve_jax.workloads.arrivals import EXAMPLES
from adaserve_jax.workloads.readers import AUTO
from adaserve_jax.workloads.workload import Workload

# A bench run as it is shown while it runs: a line for each point that ended, and below them how far it is.

REFRESHES_PER_S = 2
"""Drawing takes the processor from what is measured, so it is seldom."""
GUESSED_MORE_S = 2.0
"""What a point may take beside the time in which requests arrive: warm-up, and the last requests."""


class BenchBar(Watch):
    """Keeps rows as they come. guess_s: how long a point may take, until one was measured."""

    def __init__(self, guess_s: float, console: Console, progress: Progress):
        self.rows: list[ResultRow] = []
        self._guess_s, self._console, self._progress = guess_s, console, progress
        self._task = progress.add_task("", total=None)
        self._name, self._flight = "", 0
        self._total = self._done = self._kept = 0
        self._took_s = 0.0
        self._began_s: float | None = None

    def opened(self, todo: Sequence[Point], done: Sequence[ResultRow]) -> None:
        self.rows += done
        self._kept = self._done = len({row.point for row in done})
        self._total = len(todo) + self._done
        if self._kept:
            self._say(
                f"{self._kept} of {self._total} points are there already; relative targets stay those of their "
                f"baseline latency, {done[0].baseline_s * 1e3:.3g} ms"
            )
        self._progress.update(self._task, total=self._total, completed=self._done)

    def begins(self, point: Point) -> None:
        self._name, self._began_s = point.name, time.monotonic()

    def in_flight(self, requests: int) -> None:
        self._flight = requests

    def ended(self, point: Point, rows: Sequence[ResultRow], notes: Sequence[str]) -> None:
        if self._began_s is not None:
            self._took_s += time.monotonic() - self._began_s
        self.rows += rows
        self._done += 1
        self._progress.update(self._task, completed=self._done)
        self._say(point_line(self._done, self._total, rows))
        for note in notes:
            self._say(f"  {note}")

    def left_s(self, now_s: float) -> float:
        """Seconds to the end, if every point takes as long as those so far did."""
        measured = self._done - self._kept
        each_s = self._took_s / measured if measured else self._guess_s
        spent_s = 0.0 if self._began_s is None else now_s - self._began_s
        left = self._total - self._done
        return max(0.0, each_s - spent_s) + each_s * (left - 1) if left else 0.0

    def state(self) -> str:
        """What is shown beside the bar."""
        if self._began_s is None:
            return ""
        minutes, seconds = divmod(round(self.left_s(time.monotonic())), 60)
        return (
            f"{self._done}/{self._total} points, {self._name}: {self._flight} in flight, about {minutes}:{seconds:02d} "
            "left"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def bench_bar(plan: BenchPlan) -> Iterator[BenchBar]:
    """The bar of a run, removed at its end; lines only, unless on a terminal."""
    console = notes()
    said = _Said()
    with Progress(
        BarColumn(),
        said,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
    ) as progress:
        bar = BenchBar(plan.duration_s + GUESSED_MORE_S, console, progress)
        said.text = bar.state
        yield bar


class _Said(ProgressColumn):
    """A text that is asked for whenever the bar is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.text: Callable[[], str] = str

    def render(self, task: Task) -> Text:
        return Text(self.text())


POLICIES = "ar,spec:4,adaserve"
INVALID_STATUS, INTERRUPTED_STATUS = 1, 130
HIDDEN = "..."
"""Stands for the value of a header where a command line is shown."""
NOT_OF_THE_RUN = ("policy", "seed", "compile_cache")
"""Engine options that the plan has, or that change no result."""


@takes("config", EngineConfig, FIELD_HELP, without=("policy", "seed"))
@takes("learn_options", LearnOptions, OPTION_HELP)
@takes("drafter_options", DrafterOptions, DRAFTER_HELP)
@grouped("remote", UrlOptions)
def bench(
    config: EngineConfig,
    learn_options: LearnOptions,
    drafter_options: DrafterOptions,
    remote: UrlOptions,
    policies: Annotated[
        str,
        typer.Option(
            help="policies to compare, separated by commas, files (FILE.py) among them; ladder, orders or halves: all "
            "ablations of that name; with --url: what the server's policy is called",
        ),
    ] = POLICIES,
    rates: Annotated[
        str,
        typer.Option(
            help="requests per second, separated by commas; trace: the workload's times; auto: two that fit the engine"
        ),
    ] = AUTO,
    urgent_shares: Annotated[
        str, typer.Option(help="shares of the most urgent class to compare, separated by commas; without, as it is")
    ] = "",
    slo_scales: Annotated[
        str,
        typer.Option(help="relative targets to compare, in baseline latencies; without, as they are"),
    ] = "",
    arrivals: Annotated[
        list[str] | None,
        typer.Option(
            help="process of arrivals, poisson unless said, or such as "
            f"{', '.join(EXAMPLES[1:])}; may be repeated to compare several"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="times that everything is measured, each with other arrivals")] = 1,
    duration: Annotated[float, typer.Option(help="seconds in which requests arrive, for each point")] = 15.0,
    out: Annotated[
        Path | None, typer.Option(help="folder for rows, requests and samples; without, a new one named by the date")
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on with the run in --out where it ended, or begin it there")] = False,
    append: Annotated[bool, typer.Option(help="add the run to what --out holds")] = False,
    workload: Annotated[Path | None, typer.Option(help="file of requests; without one, the packaged workload")] = None,
    format: Annotated[str, typer.Option(help=FORMAT_HELP)] = AUTO,
    slos: Annotated[str | None, typer.Option(help=SLOS_HELP)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="most output tokens of requests that do not say; without, as the format has it")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="temperature of requests that do not say; without, as the format has it")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS_HELP)] = None,
    as_chat: Annotated[
        bool, typer.Option("--as-chat", help="send every prompt as a chat of one message, by the model's template")
    ] = False,
    seed: Annotated[int, typer.Option(help="seeds arrivals, the order of requests and their sampling")] = 0,
    drain: Annotated[float, typer.Option(help="most seconds to wait for requests after the last arrival")] = 30.0,
    max_late_ms: Annotated[
        float, typer.Option(help="a point is not valid when the client submits later than this, 99th percentile")
    ] = 50.0,
    warmup_requests: Annotated[int, typer.Option(help="requests before each point, left out of its result")] = 4,
    record: Annotated[
        bool, typer.Option(help="also write acceptance.jsonl, which `adaserve simulate --acceptance` reads")
    ] = False,
) -> None:
    """Measure SLO attainment, goodput and latencies under open-loop load. Columns: docs/metrics.md.

    Without any option: three policies on the packaged workload, in about two minutes. Exit status 1: a point was not
    measured as it must be, and is not reported; 130: interrupted, what is done is kept.
    """
    use = _use(out, resume=resume, append=append)
    folder = out or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    check_folder(folder, use)
    requests = read_workload(
        workload, format, slos, max_tokens=max_tokens, temperature=temperature, lengths=lengths, chat=as_chat,
    )  # fmt: skip
    for note in requests.notes:
        say(f"{requests.name}: {note}")
    given = BenchPlan(
        policies=expand(comma_list("policies", policies, str)),
        rates=(None,) if rates == AUTO else comma_list("rates", rates, parse_rate),
        duration_s=duration,
        seed=seed,
        drain_s=drain,
        max_late_s=max_late_ms / 1e3,
        warmup_requests=warmup_requests,
        record=record,
        urgent_shares=comma_list("urgent_shares", urgent_shares, parse_share) or (None,),
        slo_scales=comma_list("slo_scales", slo_scales, parse_slo_scale) or (None,),
        arrivals=tuple(arrivals or (POISSON,)),
        repeats=repeats,
    )
    if remote.url is None:
        remote.check_unused()
        config = with_drafter(with_learning(config, learn_options), drafter_options)
        engine, about = _Lazy(lambda: _open(config, given)), _about(config)
        policy_files = file_hashes(given.policies)
    else:
        _check_for_url(given, config, learn_options, drafter_options)
        engine, about = _Lazy(lambda: remote.open(None if policies == POLICIES else policies)), remote.about()
        policy_files = {}
    rows, interrupted = [], False
    try:
        with closing(engine):
            plan = given
            if remote.url is not None:
                plan = replace(plan, policies=engine().about.policies or given.policies)
            if rates == AUTO:
                plan = replace(plan, rates=_auto_rates(folder, use, requests, engine))
            with bench_bar(plan) as bar:
                rows = bar.rows
                run_bench(
                    plan, requests, engine, folder, bar, close=False, use=use, about=about, policy_files=policy_files
                )
    except KeyboardInterrupt:
        interrupted = True
    _finish(rows, folder, interrupted=interrupted)


class _Lazy:
    """An engine that is opened when it is first asked for."""

    def __init__(self, open_engine: Callable[[], BenchEngine]):
        self._open = open_engine
        self._engine: BenchEngine | None = None

    def __call__(self, policy: str = "") -> BenchEngine:
        """policy: it serves by any."""
        if self._engine is None:
            self._engine = self._open()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def _open(config: EngineConfig, plan: BenchPlan) -> BenchEngine:
    """Pools that extend are laid out at the start, or never: by a policy that wants them, if there is one."""
    named = [replace(config, policy=name) for name in plan.policies]
    first = next((each for each in named if policy_of(each).elastic), named[0])
    return open_bench_engine(replace(first, seed=plan.seed), record=plan.record)


def _about(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in NOT_OF_THE_RUN}


def _check_for_url(plan: BenchPlan, *options: EngineConfig | LearnOptions | DrafterOptions) -> None:
    """Raise ConfigError for what only an engine of this process can do."""
    changed = [name for given in options for name in given.changed()]
    if changed:
        raise ConfigError(f"--{changed[0].replace('_', '-')} is of an engine in this process; leave it out with --url")
    if plan.record:
        raise ConfigError("--record needs an engine in this process; leave it out with --url")


def _auto_rates(folder: Path, use: FolderUse, requests: Workload, engine: OpenEngine) -> tuple[float | None, ...]:
    """Of the run that is resumed, as the machine may be measured a little otherwise now; else by this machine."""
    held = planned(folder) if use == "resume" else None
    if held is not None:
        return tuple(held["rates"])
    return default_rates(requests, engine("").about.baseline_s)


def _use(out: Path | None, *, resume: bool, append: bool) -> FolderUse:
    if resume and append:
        raise ConfigError("--resume goes on with a run and --append adds one; give one of them")
    if out is None and (resume or append):
        raise ConfigError(f"--{'resume' if resume else 'append'} needs the run's folder; give it as --out")
    return "resume" if resume else "append" if append else "new"


def _finish(rows: Sequence[ResultRow], folder: Path, *, interrupted: bool) -> None:
    """Print what there is; raises typer.Exit with a status that says how it went."""
    if rows:
        print_rows(rows)
        say_what_is_next(folder)
    if interrupted or any(row.invalid_reason == INTERRUPTED for row in rows):
        say(f"interrupted; to go on: {_resume_command(folder)}")
        raise typer.Exit(INTERRUPTED_STATUS)
    if not all(row.valid for row in rows):
        say(f"to measure again what is not reported: {_resume_command(folder)}")
        raise typer.Exit(INVALID_STATUS)


def _resume_command(folder: Path) -> str:
    """This command line, so that it goes on in `folder`; values of headers, which may be keys, are to be put back."""
    given = [text for text in _without_secrets(sys.argv[1:]) if text not in ("--resume", "--append")]
    if not any(text == "--out" or text.startswith("--out=") for text in given):
        given += ["--out", str(folder)]
    return shlex.join(["adaserve", *given, "--resume"])


def _without_secrets(given: Sequence[str]) -> list[str]:
    """A command line without what its headers hold."""
    shown: list[str] = []
    for text in given:
        option, _, header = text.partition("=")
        if shown and shown[-1] == "--header":
            shown.append(_name_of(text))
        else:
            shown.append(f"--header={_name_of(header)}" if option == "--header" and header else text)
    return shown


def _name_of(header: str) -> str:
    return f"{header.partition(':')[0]}: {HIDDEN}"
