"""`adaserve bench`: measures policies x loads over a workload; prints a table, writes a folder for a report."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from adaserve_jax.bench.engine import BenchEngine, OpenEngine
from adaserve_jax.bench.multi_slo import (
    CLASS_REQUESTS,
    DURATION_S,
    OWN,
    PRESETS,
    Suite,
    SuiteSettings,
    begin,
    define,
    held_definition,
)
from adaserve_jax.bench.plan import POISSON, BenchPlan, Point, default_rates
from adaserve_jax.bench.resume import FolderUse, check_folder, read_settings
from adaserve_jax.bench.runner import INTERRUPTED, RunObserver, run_bench
from adaserve_jax.cli.options import (
    LIST_METAVAR,
    ByClassOption,
    FormatOption,
    LengthsOption,
    SlosOption,
    comma_list,
    grouped,
    numbers_above_0,
    parse_number,
    takes,
)
from adaserve_jax.cli.report import write_suite_page
from adaserve_jax.cli.terminal import (
    INTERRUPTED_STATUS,
    notes,
    open_bench_engine,
    point_line,
    print_rows,
    resume_command,
    say,
    say_next_step,
    with_options,
)
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.settings import Endpoint, UrlSettings
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.report.multi_slo import targets_text
from adaserve_jax.results.jsonl import read_good_rows
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.run_folder import REQUESTS
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.results.submission import FILE as SUBMISSION
from adaserve_jax.results.submission import Submission, SuitePoint
from adaserve_jax.scheduler.policies import expand_groups, file_hashes, policy_of
from adaserve_jax.settings import Panel, options_of
from adaserve_jax.workloads.arrivals import EXAMPLES
from adaserve_jax.workloads.items import Workload
from adaserve_jax.workloads.mixing import as_chat as send_as_chat
from adaserve_jax.workloads.mixing import parse_lengths, with_lengths
from adaserve_jax.workloads.readers import AUTO
from adaserve_jax.workloads.workload import load_workload, parse_slos

POLICIES = "ar,spec:4,adaserve"
PRESET = "adaserve"
INVALID_STATUS = 1
HIDDEN = "..."
"""Replaces the value of a header where a command line is shown."""
NOT_OF_THE_RUN = ("policy", "seed", "compile_cache")
"""Engine options that stand in the plan or change no result."""
REFRESHES_PER_S = 2
"""Low, because drawing takes the processor from what is measured."""
GUESSED_MORE_S = 2.0
"""Guessed seconds of a point beside those in which requests arrive: warm-up, and the last requests."""
_URL = options_of(UrlSettings)


def _url_option(name: str, *spelling: str, help: str = "with --url: {}") -> Any:
    """Return the option of a field of UrlSettings. help: text with {} for the field's own."""
    return typer.Option(*spelling, help=help.format(_URL[name].help), rich_help_panel=Panel.URL)


@dataclass(frozen=True)
class UrlOptions:
    """Options of a server that is measured from outside, as they were given."""

    url: Annotated[str | None, _url_option("url", help="instead of an engine of this process: {}")] = None
    system: Annotated[str | None, _url_option("system")] = None
    model: Annotated[str | None, _url_option("model")] = None
    api_key_env: Annotated[
        str | None, _url_option("api_key", help="with --url: environment variable that holds the API key; {}")
    ] = None
    header: Annotated[
        list[str] | None,
        _url_option("headers", help="with --url: a header of every request, 'Name: value'; may be repeated"),
    ] = None
    endpoint: Annotated[Endpoint, _url_option("endpoint")] = "auto"
    send_slo: Annotated[bool | None, _url_option("send_slo", "--send-slo/--no-send-slo")] = None
    baseline_ms: Annotated[
        float | None,
        _url_option(
            "baseline_s",
            help="with --url: ms of one token alone, which relative targets multiply; without, the server's own where "
            "it says it, else measured at the start",
        ),
    ] = None
    extra_body: Annotated[str | None, _url_option("extra_body", help="with --url: {}: a JSON object")] = None
    spare_connections: Annotated[int, _url_option("spare_connections")] = _URL["spare_connections"].default
    silence_timeout: Annotated[float, _url_option("silence_timeout_s")] = _URL["silence_timeout_s"].default

    def about(self) -> dict[str, Any]:
        """Return the options that a resumed run must share; no key, and of headers no value, which may be one."""
        return {"url": self.url, "system": self.system, "model": self.model, "endpoint": self.endpoint,
                "send_slo": self.send_slo, "baseline_ms": self.baseline_ms, "extra_body": self.extra_body,
                "spare_connections": self.spare_connections, "silence_timeout": self.silence_timeout,
                "headers": sorted(_header(text)[0].lower() for text in self.header or ())}  # fmt: skip

    def check_unused(self) -> None:
        """Raise ConfigError for options that mean nothing without --url."""
        for name, value in vars(self).items():
            if value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"--{name.replace('_', '-')} says how a server is measured; give its --url too")

    def open(self, policy: str | None) -> BenchEngine:
        """Return the server behind the URL. Raises ConfigError when it cannot be measured or a package is missing."""
        from adaserve_jax.bench.http_load import UrlEngine

        baseline_s = None if self.baseline_ms is None else self.baseline_ms / 1e3
        settings = UrlSettings(
            url=self.url or "",
            system=self.system or "",
            model=self.model,
            api_key=self._key(),
            headers=tuple(_header(text) for text in self.header or ()),
            endpoint=self.endpoint,
            send_slo=self.send_slo,
            baseline_s=baseline_s,
            extra_body=self._body(),
            spare_connections=self.spare_connections,
            silence_timeout_s=self.silence_timeout,
        )
        return UrlEngine(settings, policy=policy, on_note=say)

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env names {self.api_key_env}, which is not set; set it to the server's key")
        return key

    def _body(self) -> dict[str, Any]:
        if self.extra_body is None:
            return {}
        try:
            values = json.loads(self.extra_body)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f"--extra-body must be a JSON object, got {self.extra_body!r}")
        return values


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ConfigError("--header must be 'Name: value', got one without a name or without a colon")
    return name.strip(), value.strip()


@takes("config", EngineConfig, without=("policy", "seed"))
@takes("learn_options", LearnOptions)
@takes("drafter_options", DrafterOptions)
@grouped("remote", UrlOptions)
def bench(
    context: typer.Context,
    config: EngineConfig,
    learn_options: LearnOptions,
    drafter_options: DrafterOptions,
    remote: UrlOptions,
    policies: Annotated[
        str,
        typer.Option(
            help="policies to compare, separated by commas, files (FILE.py) among them; ladder, orders or halves: all "
            "ablations of that name; with --url: what the server's policy is called",
            metavar=LIST_METAVAR,
        ),
    ] = POLICIES,
    rates: Annotated[
        str,
        typer.Option(
            help="requests per second, separated by commas; trace: the workload's times; auto: two that fit the engine",
            metavar=LIST_METAVAR,
        ),
    ] = AUTO,
    urgent_shares: Annotated[
        str,
        typer.Option(
            help="shares of the most urgent class to compare, separated by commas; without, as it is",
            metavar=LIST_METAVAR,
        ),
    ] = "",
    slo_scales: Annotated[
        str,
        typer.Option(
            help="relative targets to compare, in baseline latencies; without, as they are", metavar=LIST_METAVAR
        ),
    ] = "",
    arrivals: Annotated[
        list[str] | None,
        typer.Option(
            help="process of arrivals, poisson unless said, or such as "
            f"{', '.join(EXAMPLES[1:])}; may be repeated to compare several"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="times that everything is measured, each with other arrivals")] = 1,
    duration: Annotated[
        float,
        typer.Option(
            help=f"seconds in which requests arrive, for each point; with --suite {DURATION_S:g} if not given"
        ),
    ] = 15.0,
    suite: Annotated[
        Literal["multi-slo"] | None,
        typer.Option(
            help="instead of given rates: search the highest rates at which every class keeps its targets, then "
            "overload and a burst; writes multi-slo.json for each policy"
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help=f"with --suite: targets by class: {', '.join(PRESETS)}; {OWN}: those of the workload")
    ] = PRESET,
    class_requests: Annotated[
        int,
        typer.Option(
            help="with --suite: requests of each class, on average, for which a load goes on, up to ten times "
            "--duration; the search for 99% needs 100"
        ),
    ] = CLASS_REQUESTS,
    out: Annotated[
        Path | None, typer.Option(help="folder for rows, requests and samples; without, a new one named by the date")
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on with the run in --out where it ended, or begin it there")] = False,
    append: Annotated[bool, typer.Option(help="add the run to what --out holds")] = False,
    workload: Annotated[Path | None, typer.Option(help="file of requests; without one, the packaged workload")] = None,
    format: FormatOption = AUTO,
    slos: SlosOption = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="most output tokens of requests that do not say; without, as the format has it")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="temperature of requests that do not say; without, as the format has it")
    ] = None,
    lengths: LengthsOption = None,
    as_chat: Annotated[
        bool, typer.Option("--as-chat", help="send every prompt as a chat of one message, by the model's template")
    ] = False,
    seed: Annotated[int, typer.Option(help="seeds arrivals, the order of requests and their sampling")] = 0,
    drain: Annotated[float, typer.Option(help="most seconds to wait for requests after the last arrival")] = 30.0,
    max_late_ms: Annotated[
        float, typer.Option(help="a point is not valid when the client submits later than this, 99th percentile")
    ] = 50.0,
    warmup_requests: Annotated[int, typer.Option(help="requests before each point, left out of its result")] = 4,
    by_class: ByClassOption = False,
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
    if suite is not None:
        varied = {"rates": rates != AUTO, "urgent_shares": urgent_shares, "slo_scales": slo_scales,
                  "arrivals": arrivals, "append": append, "record": record, "by_class": by_class}  # fmt: skip
        if given_option := next((name for name, value in varied.items() if value), None):
            raise ConfigError(f"--{given_option.replace('_', '-')} is chosen by --suite; leave it out")
    elif preset != PRESET or class_requests != CLASS_REQUESTS:
        raise ConfigError("--preset and --class-requests are of --suite; give it too")
    check_folder(folder, use)
    requests = read_workload(
        workload, format, slos, max_tokens=max_tokens, temperature=temperature, lengths=lengths, chat=as_chat,
    )  # fmt: skip
    for note in requests.notes:
        say(f"{requests.name}: {note}")
    given = BenchPlan(
        policies=expand_groups(comma_list("policies", policies, str)),
        rates=(None,) if rates == AUTO else numbers_above_0("rates", rates, or_trace=True),
        duration_s=duration,
        seed=seed,
        drain_s=drain,
        max_late_s=max_late_ms / 1e3,
        warmup_requests=warmup_requests,
        record=record,
        urgent_shares=comma_list("urgent_shares", urgent_shares, parse_share) or (None,),
        slo_scales=numbers_above_0("slo_scales", slo_scales) or (None,),
        arrivals=tuple(arrivals or (POISSON,)),
        repeats=repeats,
    )
    if remote.url is None:
        remote.check_unused()
        config = with_options(config, learn_options, drafter_options)
        if record and config.synthetic_acceptance is not None:
            raise ConfigError("--record keeps the draft's own acceptance; leave it out with --synthetic-acceptance")
        engine, about = _LazyEngine(lambda: _open(config, given)), _about(config)
        policy_files = file_hashes(given.policies)
    else:
        name = None if _is_left_out(context, "policies") else policies
        if name is not None and given.policies != (name,):
            raise ConfigError(f"--policies names the one policy that a server at --url runs, got {policies!r}")
        _check_for_url(given, config, learn_options, drafter_options)
        engine, about = _LazyEngine(lambda: remote.open(name)), remote.about()
        policy_files = {}
    if suite is not None:
        if _is_left_out(context, "duration"):
            given = replace(given, duration_s=DURATION_S)
        with closing(engine):
            settings = SuiteSettings(
                preset, given.duration_s, repeats, seed, drain, given.max_late_s, warmup_requests, class_requests
            )
            _run_suite(
                settings, given.policies, requests, engine, folder, resume=resume, about=about,
                policy_files=policy_files,
            )  # fmt: skip
        return
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
                run_bench(plan, requests, engine, folder, bar, use=use, about=about, policy_files=policy_files)
    except KeyboardInterrupt:
        interrupted = True
    _finish(rows, folder, interrupted=interrupted, by_class=by_class)


def _run_suite(
    settings: SuiteSettings, policies: Sequence[str], workload: Workload, engine: _LazyEngine, out: Path, *,
    resume: bool, about: Mapping[str, Any], policy_files: Mapping[str, str],
) -> None:  # fmt: skip
    """Run the suite under every policy, and print the headline of its page. Raises typer.Exit as `_finish` does."""
    held = held_definition(out, resume=resume)
    facts = engine().about
    baseline_ms = facts.baseline_s * 1e3 if held is None else float(held["baseline_ms"])
    definition, targeted = define(settings, workload, baseline_ms)
    begin(out, definition, held)
    say(f"targets: {targets_text(definition.classes)}")
    runs = Suite(definition, settings, targeted, engine, bench_bar, about=about, policy_files=policy_files)
    files: list[Path] = []
    try:
        for policy in facts.policies or policies:
            last = None
            place = out / re.sub(r"[^\w.-]+", "-", policy)
            for last in runs.run(policy, place):
                if isinstance(last, SuitePoint):
                    say(
                        f"{policy} {last.stage} {last.rate_rps:g} requests/s: {last.attainment:.1%} met, worst class "
                        f"{last.worst.name} {last.worst.attainment:.1%}, goodput {last.goodput_tps:.1f} tokens/s"
                    )
            if not isinstance(last, Submission):
                say(f"to measure again what is not valid: {_resume_command(out)}")
                raise typer.Exit(INVALID_STATUS)
            files.append(place / SUBMISSION)
    except KeyboardInterrupt:
        say(f"interrupted; to go on: {_resume_command(out)}")
        raise typer.Exit(INTERRUPTED_STATUS) from None
    write_suite_page(files, None, None)


def read_workload(
    path: Path | None, format: str, slos: str | None, *, max_tokens: int | None = None,
    temperature: float | None = None, lengths: str | None = None, chat: bool = False,
) -> Workload:  # fmt: skip
    """Return the requests of a run, without a path the packaged ones; for the others see the options."""
    workload = load_workload(
        path,
        format=format,
        slos=None if slos is None else parse_slos(slos),
        max_tokens=max_tokens,
        temperature=temperature,
    )
    if lengths is not None:
        workload = with_lengths(workload, parse_lengths(lengths))
    return send_as_chat(workload) if chat else workload


def parse_share(text: str) -> float:
    """Return a share from 0 to 1."""
    share = parse_number(text)
    if not 0 <= share <= 1:
        raise ConfigError(f"--urgent-shares must be numbers from 0 to 1, separated by commas, got {text!r}")
    return share


class _LazyEngine:
    """An engine that is opened on first use."""

    def __init__(self, open_engine: Callable[[], BenchEngine]):
        self._open = open_engine
        self._engine: BenchEngine | None = None

    def __call__(self) -> BenchEngine:
        """Return the engine, which serves by any policy."""
        if self._engine is None:
            self._engine = self._open()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def _open(config: EngineConfig, plan: BenchPlan) -> BenchEngine:
    """Open the engine by a policy with elastic memory, if there is one: its pools are laid out at the start."""
    named = [replace(config, policy=name) for name in plan.policies]
    first = next((each for each in named if policy_of(each).elastic), named[0])
    return open_bench_engine(replace(first, seed=plan.seed), record=plan.record)


def _about(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name not in NOT_OF_THE_RUN}


def _is_left_out(context: typer.Context, option: str) -> bool:
    """Return whether an option has its default because nobody gave it."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"


def _check_for_url(plan: BenchPlan, *options: EngineConfig | LearnOptions | DrafterOptions) -> None:
    """Raise ConfigError for options that need an engine in this process."""
    changed = [name for given in options for name in given.changed()]
    if changed:
        raise ConfigError(f"--{changed[0].replace('_', '-')} is of an engine in this process; leave it out with --url")
    if plan.record:
        raise ConfigError("--record needs an engine in this process; leave it out with --url")


def _auto_rates(folder: Path, use: FolderUse, requests: Workload, engine: OpenEngine) -> tuple[float | None, ...]:
    """Return rates that fit this machine; a resumed run keeps its own, since a new measurement differs a little."""
    held = read_settings(folder) if use == "resume" else None
    if held is not None:
        return tuple(held["rates"])
    return default_rates(requests, engine().about.baseline_s)


def _use(out: Path | None, *, resume: bool, append: bool) -> FolderUse:
    if resume and append:
        raise ConfigError("--resume goes on with a run and --append adds one; give one of them")
    if out is None and (resume or append):
        raise ConfigError(f"--{'resume' if resume else 'append'} needs the run's folder; give it as --out")
    return "resume" if resume else "append" if append else "new"


def _finish(rows: Sequence[ResultRow], folder: Path, *, interrupted: bool, by_class: bool) -> None:
    """Print the rows. Raises typer.Exit with a status if the run was interrupted or a point is not valid."""
    if rows:
        file, repeated = folder / REQUESTS, any(row.repeat for row in rows)
        records = read_good_rows(file, RequestRecord)[0] if repeated and file.exists() else []
        print_rows(rows, by_class=by_class, records=records)
        say_next_step(folder)
    if interrupted or any(row.invalid_reason == INTERRUPTED for row in rows):
        say(f"interrupted; to go on: {_resume_command(folder)}")
        raise typer.Exit(INTERRUPTED_STATUS)
    if not all(row.valid for row in rows):
        say(f"to measure again what is not reported: {_resume_command(folder)}")
        raise typer.Exit(INVALID_STATUS)


def _resume_command(folder: Path) -> str:
    """Return this command line with --resume and `folder`; the user puts values of headers, maybe keys, back."""
    given = [text for text in _without_secrets(sys.argv[1:]) if text != "--append"]
    if not any(text == "--out" or text.startswith("--out=") for text in given):
        given += ["--out", str(folder)]
    return resume_command(given)


def _without_secrets(given: Sequence[str]) -> list[str]:
    """Return a command line without the values of its headers."""
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


class BenchBar(RunObserver):
    """Collects rows; prints a line per point that ended and shows progress. guess_s: of a point, until one is known."""

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
        """Return the seconds to the end, if every point takes as long as those so far did."""
        measured = self._done - self._kept
        each_s = self._took_s / measured if measured else self._guess_s
        spent_s = 0.0 if self._began_s is None else now_s - self._began_s
        left = self._total - self._done
        return max(0.0, each_s - spent_s) + each_s * (left - 1) if left else 0.0

    def state(self) -> str:
        """Return the text beside the bar."""
        if self._began_s is None:
            return ""
        minutes, seconds = divmod(round(self.left_s(time.monotonic())), 60)
        return (
            f"{self._done}/{self._total} points, {self._name}: {self._flight} requests in flight, about {minutes} min "
            f"{seconds} s left"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def bench_bar(plan: BenchPlan) -> Iterator[BenchBar]:
    """Show the bar of a run and remove it at its end; print lines only, unless on a terminal."""
    console = notes()
    state = _StateColumn()
    with Progress(
        BarColumn(),
        state,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
    ) as progress:
        bar = BenchBar(plan.duration_s + GUESSED_MORE_S, console, progress)
        state.text = bar.state
        yield bar


class _StateColumn(ProgressColumn):
    """A column whose text is computed whenever the bar is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.text: Callable[[], str] = str

    def render(self, task: Task) -> Text:
        return Text(self.text())
